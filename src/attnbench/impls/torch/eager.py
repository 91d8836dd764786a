"""Plain attention in torch, operator by operator (`torch.eager`) and compiled as one graph (`torch.compiled`).

Every mask, soft cap, grouped heads, V of another width; the T x S logits are stored.
"""

from __future__ import annotations

from typing import Any

from attnbench.frameworks.torch.device_masks import plain_values_call
from attnbench.frameworks.torch.plain import attend, mask_tensors, once_per_device, plain_call
from attnbench.impls import WithLse
from attnbench.impls.conditions import first_reason, needs_small_bias
from attnbench.impls.partial.torch_passes import plain_partial
from attnbench.impls.torch._caches import plain_decode
from attnbench.impls.torch._compile import COMPILED_GRAPH, CompiledCall, compile_fresh, needs_compiler
from attnbench.masks.device import MaskForm
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Array, CacheCall, Call, Config, Environment, Implementation, Partial, ValuesCall, Workload


class Eager(WithLse):
    """Plain PyTorch, operator by operator: any mask and soft cap; stores all scores."""

    name = "torch.eager"
    framework = "torch"
    any_kv_len = True
    lse_gradient = True
    traceable = True
    materialises_scores = True
    untested = ("rocm", "xpu", "mps")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return _needs_float64(workload, environment)

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        return plain_call(workload, with_lse)

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        return first_reason(self.supports(workload, environment), needs_small_bias(form))

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall:
        return plain_values_call(workload, form, with_lse)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        return None if has_large_bias(workload.visible_mask) else plain_partial(workload)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        return plain_decode(workload)


class Compiled(Implementation):
    """Plain PyTorch compiled by torch.compile as one graph: any mask and soft cap; stores all scores."""

    name = "torch.compiled"
    framework = "torch"
    traceable = True
    compiles_each_plan = True
    materialises_scores = True
    untested = ("rocm", "xpu", "mps")
    expects = (COMPILED_GRAPH,)
    forbids = (r"^aten::_softmax", r"cunn_SoftMax")

    def available(self, environment: Environment) -> str | None:
        return needs_compiler(environment)

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return _needs_float64(workload, environment)

    def build(self, workload: Workload, config: Config) -> Call:
        masks = once_per_device(lambda device: mask_tensors(workload, device))
        scale, softcap = workload.softmax_scale, workload.softcap

        def body(q: Array, k: Array, v: Array, mask: Any) -> Array:
            return attend(q, k, v, mask, scale, softcap)[0]

        compiled = compile_fresh(body)
        return CompiledCall(lambda q, k, v: compiled(q, k, v, masks(q.device)))


def _needs_float64(workload: Workload, environment: Environment) -> str | None:
    lacks = environment.device == "mps" and workload.dtype == "float64"
    return "mps has no float64" if lacks else None


EAGER = Eager()
COMPILED = Compiled()
