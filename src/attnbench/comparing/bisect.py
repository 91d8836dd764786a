"""The first slow commit of a line of commits, by halving; what cannot be judged is stepped over, as git bisect does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct


class Found(Struct, frozen=True, kw_only=True):
    """What the search ended with."""

    first: str | None
    """The first slow commit; None when commits that could not be judged leave several."""
    suspects: tuple[str, ...]
    """The first slow commit is one of these, oldest first."""
    tried: dict[str, bool | None]
    """Commit -> whether it was slow; None where that could not be told."""


def find_first_slower(commits: Sequence[str], is_slower: Callable[[str], bool | None]) -> Found:
    """Search commits, oldest first, whose last is known to be slow and before whose first nothing was."""
    if not commits:
        raise ValueError("there is no commit to search")
    fast, slow = -1, len(commits) - 1
    tried: dict[str, bool | None] = {}
    while open_ := [place for place in range(fast + 1, slow) if commits[place] not in tried]:
        middle = min(open_, key=lambda place: abs(2 * place - fast - slow))
        verdict = tried[commits[middle]] = is_slower(commits[middle])
        if verdict is True:
            slow = middle
        elif verdict is False:
            fast = middle
    suspects = tuple(commits[fast + 1 : slow + 1])
    return Found(first=suspects[0] if len(suspects) == 1 else None, suspects=suspects, tried=tried)
