"""Arrays whose last axis is not dense: every implementation gives what it gives for a copy, or says why not."""

from __future__ import annotations

import pytest

import attnbench as ab
from attnbench import registry
from attnbench.errors import Unsupported
from attnbench.frameworks import get

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
CAUSAL = ab.masks.causal()
SLOW = {"torch.flex", "torch.compiled", "torch.ring", "torch.ring-templated"}
PAIRS = [
    f"torch.pair[forward={one},backward={other}]"
    for one, other in (("torch.sdpa-flash", "torch.eager"), ("torch.eager", "torch.sdpa-flash"))
]


def names() -> list[str]:
    """Whatever attends on a CPU, without what compiles or starts processes."""
    environment = get("torch").environment("cpu")
    found = [registry.get(name) for name in registry.names() if name.startswith("torch.") and name not in SLOW]
    plain = [one.name for one in found if not one.step and not one.approximate and one.name != "torch.pair"]
    on = ab.Workload(batch=2, q_len=16, heads=4, head_dim=8, mask=CAUSAL)
    able = (registry.get(name) for name in plain)
    return [one.name for one in able if not one.available(environment) and not one.supports(on, environment)]


def odd(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if kind == "transposed":
        return [torch.randn(2, 16, 8, 4).transpose(2, 3) for _ in range(3)]
    if kind == "every second":
        return [torch.randn(2, 16, 4, 16)[..., ::2] for _ in range(3)]
    return [torch.randn(2, 16, 4, 1).expand(2, 16, 4, 8) for _ in range(3)]


@pytest.mark.parametrize("kind", ["transposed", "every second", "expanded"])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", ["auto", *names(), *PAIRS])
@pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
def test_strides_change_nothing(name: str, lse: bool, kind: str):
    def results(arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in arrays]
        found = ab.attention(*leaves, mask=CAUSAL, impl=name, return_lse=lse)
        out, *rest = found if lse else (found,)
        return [out, *rest, *torch.autograd.grad(out.sum(), leaves)]

    arrays = odd(kind)
    assert not any(x.stride(-1) == 1 for x in arrays)
    try:
        wanted = results([x.contiguous() for x in arrays])
    except Unsupported:
        pytest.skip("cannot do this at all")
    for got, want in zip(results(arrays), wanted):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_negated_queries_are_dense_whatever_strides_they_have():
    """Rows that overlap are dense as they come, and torch gives their product by -1 strides of its own choice."""
    torch.manual_seed(0)
    q = torch.randn(64).unfold(0, 16, 1)[:8][None, None]
    k, v = torch.randn(2, 1, 1, 8, 16)
    assert q.stride(-1) == 1 != (q * -1.0).stride(-1)
    arrays = q, k, v
    got = ab.attention(*arrays, scale=-0.3, layout="bhsd", impl="torch.sdpa-flash", return_lse=True)
    want = ab.attention(*arrays, scale=-0.3, layout="bhsd", impl="torch.eager", return_lse=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
