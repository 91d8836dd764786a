"""torch.ring and torch.ring-templated: attention over a sequence that is sharded over several ranks; see docs/ring.md.

On a CPU, and if there is a GPU for each rank, ranks are processes over gloo or NCCL that this process starts and
drives; they time themselves, without the transfer of whole arrays. On fewer GPUs they are virtual. torch.ring takes
full, causal and dilated masks. torch.ring-templated is the ring inside torch's own context parallelism, to compare
with: shards must be equal, and balance over ranks (zigzag) is for causal masks only.
"""

from __future__ import annotations

from typing import Any, Self

from attnbench.errors import Unsupported
from attnbench.impls import WithLse, conditions
from attnbench.kernels.ring import schedule
from attnbench.spec import Call, Config, Environment, Workload


class TorchRing(WithLse):
    """Sequence split over ranks, keys sent around a ring: `torch.ring[world=4,layout=striped,inner=torch.eager]`."""

    name = "torch.ring"
    framework = "torch"
    tunables = schedule.TUNABLES
    by_name_only = schedule.BY_NAME_ONLY
    can_be_virtual = True
    """Whether one process computes all ranks if there are fewer accelerators."""

    def configured(self, config: Config) -> Self:
        schedule.check_inner(schedule.RingSettings.of(config).inner)
        return self

    def available(self, environment: Environment) -> str | None:
        return conditions.needs_device(environment, "cpu", "cuda")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return conditions.first_reason(self.available(environment), schedule.needs_ring_mask(workload))

    def apparatus(self, framework: Any, config: Config) -> Any:
        from attnbench.kernels.ring.torch_calls import RingApparatus

        return RingApparatus(schedule.RingSettings.of(config).world, self.can_be_virtual)

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.kernels.ring.torch_calls import OverRanks, RingCall, VirtualRing

        settings = schedule.RingSettings.of(config)
        processes = RingCall(workload, settings, with_lse=with_lse)
        return OverRanks(processes, VirtualRing(workload, settings, with_lse))


class TorchTemplatedRing(TorchRing):
    """Sequence split over ranks by PyTorch's own ring template, `torch.ring-templated[world=4,layout=contiguous]`."""

    name = "torch.ring-templated"
    tunables = {name: value for name, value in schedule.TUNABLES.items() if name != "inner"}
    can_be_virtual = False

    def available(self, environment: Environment) -> str | None:
        return conditions.needs_device(environment, "cpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        lengths = "takes as many keys as queries" if workload.q_len != workload.kv_len else None
        return conditions.first_reason(
            self.available(environment),
            schedule.needs_dense_mask(workload),
            conditions.needs_dtype(workload, "float32", "bfloat16", "float16"),
            conditions.needs_equal_dims(workload),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            lengths,
        )

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.kernels.ring.torch_calls import OverRanks, RingCall

        settings = schedule.RingSettings.of(config)
        if not schedule.problem_of(workload, 1, "contiguous").causal and settings.layout == "zigzag":
            settings = settings._replace(layout="contiguous")
        if settings.layout == "striped":
            raise Unsupported("PyTorch's ring has no striped layout: use contiguous, or zigzag with a causal mask")
        parts = settings.world * (2 if settings.layout == "zigzag" else 1)
        if workload.q_len % parts:
            raise Unsupported(
                f"needs a sequence that can be cut into {parts} equal parts, which {workload.q_len} tokens cannot"
            )
        return OverRanks(RingCall(workload, settings, "templated", with_lse))


RING = TorchRing()
TEMPLATED = TorchTemplatedRing()
