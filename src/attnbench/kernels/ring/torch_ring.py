"""torch.ring: full, causal and dilated attention over a sequence that is sharded over several ranks; see docs/ring.md.

On a CPU, and where there is a GPU for each rank, ranks are processes over gloo or NCCL that this one starts and drives;
they time themselves, without the way of whole arrays to them and back. On a single GPU they are virtual.
"""

from __future__ import annotations

from typing import Any, Self

from attnbench.impls.conditions import first_reason, needs_device
from attnbench.kernels.ring.settings import BY_NAME_ONLY, TUNABLES, Settings, check_inner, needs_ring_mask
from attnbench.spec import Call, Config, Environment, Implementation, Workload


class Ring(Implementation):
    """`torch.ring[world=4,layout=striped,inner=torch.eager]`."""

    name = "torch.ring"
    framework = "torch"
    tunables = TUNABLES
    by_name_only = BY_NAME_ONLY

    def configured(self, config: Config) -> Self:
        check_inner(Settings.of(config).inner)
        return self

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu", "cuda")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(self.available(environment), needs_ring_mask(workload))

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=True)

    def apparatus(self, framework: Any, config: Config) -> Any:
        from attnbench.kernels.ring.apparatus import RingApparatus

        return RingApparatus(Settings.of(config).world)

    def _call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.kernels.ring.apparatus import OverRanks
        from attnbench.kernels.ring.call import RingCall
        from attnbench.kernels.ring.virtual import VirtualRing

        settings = Settings.of(config)
        processes = RingCall(workload, settings, with_lse=with_lse)
        return OverRanks(processes, VirtualRing(workload, settings, with_lse))


RING = Ring()
