"""The command line. Commands parse, call and print; this file gathers them and turns errors into exit codes.

0 fine · 1 a check says no · 2 usage · 3 nothing could be measured · 4 inconclusive · 5 untrusted · 130 interrupted
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from attnbench.cli.baseline import baseline
from attnbench.cli.bisect import bisect
from attnbench.cli.choose import choose
from attnbench.cli.compare import compare
from attnbench.cli.doctor import doctor
from attnbench.cli.export import export
from attnbench.cli.gate import gate
from attnbench.cli.history import history
from attnbench.cli.listing import listing
from attnbench.cli.report import report
from attnbench.cli.run import run
from attnbench.cli.show import show
from attnbench.cli.tune import tune
from attnbench.cli.verify import verify
from attnbench.errors import AttnBenchError

USAGE, BUG, INTERRUPTED = 2, 70, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def installed_version() -> str:
    """Version of the distribution; a bare source tree has none."""
    try:
        return version("attnbench")
    except PackageNotFoundError:
        return "0 (not installed)"


app = App(
    name="attnbench",
    help="Find out which attention to run, prove that it is right, and see how fast it is.",
    version=installed_version,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
app.command(doctor)
app.command(listing, name="list")
app.command(verify)
app.command(run)
app.command(show)
app.command(compare)
app.command(gate)
app.command(baseline, name="baseline")
app.command(history)
app.command(bisect)
app.command(choose)
app.command(tune)
app.command(export)
app.command(report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the script: run a command and exit with its code."""
    sys.exit(execute(sys.argv[1:] if arguments is None else arguments))


def execute(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code. An expected error is one line on stderr, never a traceback."""
    _end_tidily()
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except MissingArgumentError as error:
        option = error.keyword
        return _tell(_one_line(error) if option is None else f"{option} needs a value.", USAGE)
    except UnusedCliTokensError as error:
        return _tell(_unused(error), USAGE)
    except CycloptsError as error:
        return _tell(_one_line(error), USAGE)
    except AttnBenchError as error:
        return _tell(str(error), USAGE)
    except KeyboardInterrupt:
        return _tell("interrupted.", INTERRUPTED)
    except MemoryError:
        return _tell("the request does not fit into this machine's memory: take smaller shapes.", USAGE)
    except BrokenPipeError:
        _leave_stdout()  # the reader (head, less) has seen enough
        return 0
    except OSError as error:
        if error.errno not in FULL:
            return _tell_bug()
        _leave_stdout()
        return _tell(f"cannot write the output: {os.strerror(error.errno)}. Make room, or send it elsewhere.", USAGE)
    except Exception:
        return _tell_bug()
    return code if isinstance(code, int) else 0


def _end_tidily() -> None:
    """End as Ctrl-C does, so that workers and worktrees go too, on SIGTERM (a cancelled CI job) and SIGHUP (a terminal
    that closes). What the caller lets the process ignore (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _leave_stdout() -> None:
    """What cannot be written any more must not make the interpreter complain at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: CycloptsError) -> str:
    return " ".join(str(error).split())


def _unused(error: UnusedCliTokensError) -> str:
    command, words = " ".join(error.command_chain or ()), " ".join(error.unused_tokens or ())
    if command == "verify":
        return f'verify takes options only, not "{words}": a suite is named by --suite {words}.'
    return f'{command} does not take "{words}": see `attnbench {command} --help`.'


def _tell_bug() -> int:
    traceback.print_exc()
    return _tell("this is a bug in attnbench: please report it with the lines above.", BUG)


def _tell(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
