"""A ring whose ranks somebody else started (torchrun): rank 0 asks, the others serve, over the default process group.

The same questions as to processes of our own, so that a cell under torchrun is built, verified, timed and recorded as
any other. A rank that dies is torchrun's to notice: it ends all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attnbench.errors import Unsupported, UsageError
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.launcher import RankFailed, Reply
from attnbench.kernels.ring.rank import Rank, broke

if TYPE_CHECKING:
    import torch

LAST = None
"""What is scattered to say that nothing more will be asked."""


def started_by_torchrun() -> bool:
    """Whether this process is one of a group that torchrun started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class GroupRanks:
    """This process's end: on rank 0 a ring to ask, elsewhere one to serve."""

    def __init__(self, device: str, timeout_s: float) -> None:
        import torch.distributed as dist

        limit = timedelta(seconds=timeout_s)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._mine = Rank(self.rank, self.world, device, None, timeout_s, None, int(os.environ.get("LOCAL_RANK", 0)))
        # Questions and arrays go over the host whatever the ranks' own links are.
        self._messages: Any = dist.new_group(backend="gloo", timeout=limit)
        self.alive = True

    def ask(
        self, questions: Sequence[tuple[m.Question, tuple[torch.Tensor, ...]]], patience: float = 1.0
    ) -> list[Reply]:
        """As RankProcesses.ask; only on rank 0."""
        del patience
        letters = [(question, [array.detach().cpu() for array in arrays]) for question, arrays in questions]
        self._scatter(letters)
        replies = self._gather(self._answer(*letters[0]))
        broken = {rank: reply.answer for rank, reply in enumerate(replies) if isinstance(reply.answer, m.Broke)}
        if not broken:
            return replies
        if all(one.kind == "unsupported" for one in broken.values()):
            raise Unsupported(next(iter(broken.values())).reason)
        self.alive = False
        rank, one = next(iter(broken.items()))
        text = f"rank {rank} of {self.world} raised {one.reason}\n{one.detail}"
        raise MemoryError(text) if one.kind == "out_of_memory" else RankFailed(text)

    def of_size(self, world: int) -> GroupRanks:
        """Itself, where that many ranks are asked for: torchrun decides how many there are."""
        if self.world != world:
            raise UsageError(f"torchrun started {self.world} ranks, {world} were asked for: set world={self.world}.")
        return self

    def serve(self) -> None:
        """On every rank but 0: answer until rank 0 closes."""
        while (letter := self._scatter(None)) is not LAST:
            self._gather(self._answer(*letter))

    def close(self) -> None:
        """On rank 0: let the others go."""
        if self.alive:
            self.alive = False
            self._scatter([LAST] * self.world)

    def _answer(self, question: m.Question, arrays: list[torch.Tensor]) -> Reply:
        try:
            answer, results = self._mine.answer(question, arrays)
        except Exception as error:
            answer, results = broke(error), ()
        return Reply(answer, [array.detach().cpu() for array in results])

    def _scatter(self, letters: list[Any] | None) -> Any:
        import torch.distributed as dist

        received: list[Any] = [None]
        dist.scatter_object_list(received, letters, src=0, group=self._messages)
        return received[0]

    def _gather(self, reply: Reply) -> list[Reply]:
        import torch.distributed as dist

        found: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(reply, found, dst=0, group=self._messages)
        return found or []
