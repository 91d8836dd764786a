"""torch's own context parallelism, as implementations to compare with: the public one, and the ring template inside it.

`torch.ring-context-parallel` (public, experimental) patches scaled_dot_product_attention; it knows CUDA kernels only,
and fails on gloo: "Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy
registered". `torch.ring-templated` calls the private function that it is made of with the CPU's operator, and works.
Both want equal shards; balance over ranks ("zigzag") is for causal masks only.
"""

from __future__ import annotations

from typing import Any, Self

from attnbench.errors import Unsupported
from attnbench.impls.conditions import (
    first_reason,
    needs_device,
    needs_dtype,
    needs_equal_dims,
    needs_no_softcap,
    needs_positive_scale,
)
from attnbench.kernels.ring.settings import BY_NAME_ONLY, TUNABLES, Settings, needs_dense_mask, problem_of
from attnbench.spec import Call, Config, Environment, Implementation, Workload

NO_CPU = (
    "torch's context_parallel has CUDA kernels only: on gloo it raises that "
    "aten._scaled_dot_product_flash_attention_for_cpu has no sharding strategy (torch.ring-templated runs there)"
)


class TorchOwn(Implementation):
    """What both share: shards of one size, over processes."""

    framework = "torch"
    method: str
    by_name_only = BY_NAME_ONLY
    tunables = {name: value for name, value in TUNABLES.items() if name != "inner"}

    def configured(self, config: Config) -> Self:
        Settings.of(config)
        return self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        lengths = "takes as many keys as queries" if workload.q_len != workload.kv_len else None
        return first_reason(
            self.available(environment),
            needs_dense_mask(workload),
            needs_dtype(workload, "float32", "bfloat16", "float16"),
            needs_equal_dims(workload),
            needs_no_softcap(workload),
            needs_positive_scale(workload),
            lengths,
        )

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=False)

    def apparatus(self, framework: Any, config: Config) -> Any:
        from attnbench.kernels.ring.apparatus import RingApparatus

        return RingApparatus(Settings.of(config).world, can_be_virtual=False)

    def _call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.kernels.ring.apparatus import OverRanks
        from attnbench.kernels.ring.call import RingCall

        settings = Settings.of(config)
        if not problem_of(workload, 1, "contiguous").causal and settings.layout == "zigzag":
            settings = settings._replace(layout="contiguous")
        _check(workload, settings)
        return OverRanks(RingCall(workload, settings, self.method, with_lse))


def _check(workload: Workload, settings: Settings) -> None:
    """What can only be told once the settings are known."""
    if settings.layout == "striped":
        raise Unsupported("torch has no striped layout, only contiguous and (causal) zigzag")
    parts = settings.world * (2 if settings.layout == "zigzag" else 1)
    if workload.q_len % parts:
        raise Unsupported(f"takes sequences in {parts} equal parts, not {workload.q_len} tokens")


class ContextParallel(TorchOwn):
    """`torch.distributed.tensor.experimental.context_parallel`."""

    name = "torch.ring-context-parallel"
    method = "context-parallel"
    untested = ("cuda",)

    def available(self, environment: Environment) -> str | None:
        if environment.device == "cpu":
            return NO_CPU
        few = (
            f"NCCL takes one rank per GPU, and there is {environment.devices} here" if environment.devices < 2 else None
        )
        return needs_device(environment, "cuda") or few


class Templated(TorchOwn):
    """`_templated_ring_attention` and its backward, over the CPU's flash operator."""

    name = "torch.ring-templated"
    method = "templated"

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu")

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=True)


CONTEXT_PARALLEL = ContextParallel()
TEMPLATED = Templated()
