"""Every exception the package raises on purpose.

AttnBenchError
├── UsageError                 the request cannot mean anything: exit code 2
│   ├── UnknownName            no implementation, suite or command of that name (carries the nearest)
│   ├── InvalidWorkload        impossible shapes, heads that do not divide, a mask that does not fit
│   ├── BrokenFile             a TOML or run file that cannot be read, with its line
│   ├── CannotSend             a function that cannot be sent to a worker (run/user_functions.py)
│   └── BuildFailed            a git ref whose build command failed (comparing/refs.py)
├── Unsupported                a known case this implementation or device cannot do (also a NotImplementedError)
└── PolicyMiss                 nothing was measured for a call of `attention`, and on_miss is error

What may well happen to a cell (wrong numbers, out of memory, a crash, a timeout) is a Record, not an exception.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from attnbench.printable import printable


class AttnBenchError(Exception):
    """Root of the tree; its message is one sentence that a user can act on."""


class UsageError(AttnBenchError):
    """The request itself is wrong."""


SHORT_LIST = 8
"""Number of known names up to which an error lists them all, even if one of them is near."""


class UnknownName(UsageError):
    """A name nobody registered; `see` is the command that lists the known ones, empty if the message lists them."""

    def __init__(self, what: str, name: str, known: Iterable[str], see: str) -> None:
        known = list(known)
        near = get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f" Near: {', '.join(near)}." if near else ""
        short = len(known) <= SHORT_LIST
        listed = f" Known: {', '.join(known)}." if known and (short or not near) else ""
        super().__init__(printable(f'no {what} called "{name}".{hint}{f" See `{see}`." if see else listed}'))
        self.near = near


class InvalidWorkload(UsageError):
    """A workload that cannot exist."""


class BrokenFile(UsageError):
    """A file that cannot be read as what it claims to be."""

    def __init__(self, path: object, line: int | None, why: str) -> None:
        where = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(printable(f"{where}: {why}"))


class Unsupported(AttnBenchError, NotImplementedError):
    """This implementation cannot do this case here; the message is the reason."""


class PolicyMiss(AttnBenchError):
    """No measured policy covers a call, and the setting on_miss asks for an error."""


class PolicyWarning(UserWarning):
    """No measured policy covers a call, or one that was asked for does not hold here."""
