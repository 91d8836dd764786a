"""The command line. Commands parse, call and print; this file names their modules and turns errors into exit codes.

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
from contextlib import suppress
from importlib.metadata import version
from io import TextIOWrapper
from types import FrameType

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from attnbench.errors import AttnBenchError
from attnbench.printable import printable, printable_lines

USAGE, BUG, INTERRUPTED = 2, 70, 130
COMMANDS = {
    "doctor": "listing:doctor", "list": "listing:listing", "verify": "verify:verify", "run": "run:run",
    "show": "run:show", "compare": "compare:compare", "gate": "gate:gate", "baseline": "baseline:baseline",
    "history": "history:history", "bisect": "bisect:bisect", "choose": "choose:choose", "tune": "tune:tune",
    "export": "export:export", "report": "report:report",
}  # fmt: skip
"""Command -> its module and function. A module is imported when its command is run: it may import what it needs."""
LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of an output that can take no more: a full disk, or a terminal that was closed."""

app = App(
    name="attnbench",
    help="Find out which attention to run, prove that it is right, and see how fast it is.",
    version=lambda: version("attnbench"),
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
for name, place in COMMANDS.items():
    app.command(f"attnbench.cli.{place}", name=name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: the entry point of the script."""
    sys.exit(execute(sys.argv[1:] if arguments is None else arguments))


def execute(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. An expected error is one line on stderr, never a traceback."""
    _end_tidily()
    _open_streams()
    try:
        if not arguments or arguments[0] in ("--help", "-h"):
            _ = [app[name] for name in COMMANDS]  # imports them all, since help says what each is for
        code = app(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except UnusedCliTokensError as error:
        command, words = " ".join(error.command_chain or ()), " ".join(error.unused_tokens or ())
        told = f'{command} does not take "{words}": see `attnbench {command} --help`.'
        if command == "verify":
            told = f'verify takes options only, not "{words}": a suite is named by --suite {words}.'
        return _print_error(told, USAGE)
    except CycloptsError as error:
        option = error.keyword if isinstance(error, MissingArgumentError) else None
        return _print_error(f"{option} needs a value." if option else " ".join(str(error).split()), USAGE)
    except AttnBenchError as error:
        return _print_error(str(error), USAGE)
    except KeyboardInterrupt:
        return _print_error("interrupted.", INTERRUPTED)
    except MemoryError:
        return _print_error("the request needs more memory than this machine has: use smaller shapes.", USAGE)
    except UnicodeEncodeError as error:
        name = error.object[max(0, error.start - 40) : error.end + 40]
        return _print_error(
            f'"{name}" cannot be written to a file, because it is not UTF-8. Rename the file or folder.', USAGE
        )
    except BrokenPipeError:
        _leave_stdout()  # the reader (head, less) has seen enough
        return 0
    except OSError as error:
        if error.errno not in LOST:
            return _print_bug()
        _leave_stdout()
        return _print_error(
            f"cannot write the output: {os.strerror(error.errno)}. Make room, or send it elsewhere.", USAGE
        )
    except Exception:
        return _print_bug()
    return code if isinstance(code, int) else 0


def _end_tidily() -> None:
    """End as Ctrl-C does, so that workers and folders go too, when a CI job is cancelled (SIGTERM) or the terminal is
    closed (SIGHUP, unless `nohup` asked to go on)."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
        signal.signal(hangup, _hang_up)


def _hang_up(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # shell and system both send one: the second must not stop the tidying
    signal.default_int_handler(number, frame)


def _open_streams() -> None:
    """Let every text be printed: a stream that was closed (`>&-`) leads nowhere, and what the encoding of a stream
    lacks is shown as an escape."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            with suppress(OSError):
                try:  # the next file that is opened, such as a run file, must not get the number of a closed stream
                    os.fstat(number)
                except OSError:
                    os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif number and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_stdout() -> None:
    """Point stdout at nothing, so that the interpreter does not complain at exit about output nobody can take."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_bug() -> int:
    print(printable_lines(traceback.format_exc()), file=sys.stderr)
    return _print_error("this is a bug in attnbench: please report it with the lines above.", BUG)


def _print_error(message: str, code: int) -> int:
    """Print an error and return the exit code; lines indented by four spaces, such as a build's output, stay lines."""
    with suppress(OSError):
        print("\n    ".join(map(printable, f"error: {message}".split("\n    "))), file=sys.stderr)
    return code
