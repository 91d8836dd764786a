"""`partial` of every implementation that offers it: views of any strides give what dense copies give."""

from __future__ import annotations

import numpy as np
import pytest

import attnbench as ab
from attnbench import registry
from attnbench.frameworks import get
from attnbench.spec import Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

BATCH, TOKENS, HEADS, DIM = 2, 32, 4, 16
SHAPE = {"batch": BATCH, "q_len": TOKENS, "heads": HEADS, "head_dim": DIM, "pass_": "train"}
WORKLOADS = {
    "causal": Workload(**SHAPE, mask=ab.masks.causal()),
    "dilated": Workload(**SHAPE, mask=ab.masks.dilated([8, 32], [1, 2])),
    "dilated-causal": Workload(**SHAPE, mask=ab.masks.dilated([8, 16], [2, 1]) & ab.masks.causal()),
    "blocks": Workload(**SHAPE, mask=ab.masks.blocks(np.tri(4, dtype=bool), 8)),
}
PAIRS = [
    "torch.pair[forward=torch.sdpa-flash,backward=torch.eager]",
    "torch.pair[forward=torch.dilated,backward=torch.dilated-improved]",
    "torch.pair[forward=torch.dilated-improved,backward=torch.dilated]",
]
KINDS = [
    "last axis strided", "every other", "slice of wider", "bhsd view", "batch expanded", "heads expanded",
    "tokens expanded", "rows expanded", "odd offset",
]  # fmt: skip


def view(kind: str, *lead: int) -> torch.Tensor:
    """An array [b, s, h, d] of that kind; `lead` seeds its numbers."""
    make = torch.Generator().manual_seed(sum(lead))
    b, s, h, d = BATCH, TOKENS, HEADS, DIM

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    return {
        "last axis strided": lambda: drawn(b, s, d, h).transpose(2, 3),
        "every other": lambda: drawn(b, s, h, 2 * d)[..., ::2],
        "slice of wider": lambda: drawn(b, s, h, 2 * d)[..., :d],
        "bhsd view": lambda: drawn(b, h, s, d).transpose(1, 2),
        "batch expanded": lambda: drawn(1, s, h, d).expand(b, s, h, d),
        "heads expanded": lambda: drawn(b, s, 1, d).expand(b, s, h, d),
        "tokens expanded": lambda: drawn(b, 1, h, d).expand(b, s, h, d),
        "rows expanded": lambda: drawn(b, s, h, 1).expand(b, s, h, d),
        "odd offset": lambda: drawn(b * s * h * d + 1)[1:].view(b, s, h, d),
    }[kind]()


def cells() -> list[tuple[str, str]]:
    """(implementation, workload) of whatever has a partial form on a CPU."""
    environment = get("torch").environment("cpu")
    found = []
    for name in [*(one for one in registry.names() if one.startswith("torch.") and one != "torch.pair"), *PAIRS]:
        base, config = registry.asked(name)
        one = registry.get(base).configured(config)
        if one.available(environment) or one.step:
            continue
        able = [title for title, workload in WORKLOADS.items() if one.supports(workload, environment) is None]
        found += [(name, title) for title in able if one.partial(WORKLOADS[title], config) is not None]
    return found


CELLS = cells()


def test_nobody_is_missing():
    assert {name for name, _ in CELLS} >= {
        "torch.eager", "torch.sdpa-flash", "torch.dilated", "torch.dilated-improved", "torch.block-sparse", *PAIRS
    }  # fmt: skip


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "title"), CELLS)
def test_views_give_what_copies_give(name: str, title: str, kind: str):
    base, config = registry.asked(name)
    partial = registry.get(base).configured(config).partial(WORKLOADS[title], config)
    assert partial is not None
    forward, backward = partial
    views = [view(kind, seed) for seed in range(3)]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in views]
    out, lse = forward(*dense)
    out, lse = out.contiguous(), lse.contiguous()
    same(forward(*views), (out, lse))
    dout = view(kind, 7)
    want = backward(*dense, out, lse, dout.clone(memory_format=torch.contiguous_format))
    same(backward(*views, out, lse, dout), want)
    # Results of a larger whole are views as well: another order of axes, and a row of a wider array.
    odd_out = out.transpose(2, 3).contiguous().transpose(2, 3)
    odd_lse = torch.stack([lse, lse + 1], -1)[..., 0]
    same(backward(*views, odd_out, odd_lse, dout), want)


@pytest.mark.parametrize("kind", ["last axis strided", "every other", "rows expanded"])
@pytest.mark.parametrize("impl", ["torch.dilated", "torch.dilated-improved", PAIRS[1]])
@pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
def test_a_compiled_training_graph_reads_views_rightly(impl: str, kind: str):
    mask = ab.masks.dilated([8, 32], [1, 2])
    compiled = torch.compile(
        lambda q, k, v: ab.attention(q, k, v, mask=mask, impl=impl), backend="aot_eager", fullgraph=True
    )

    def results(function, arrays):
        leaves = [x.detach().requires_grad_() for x in arrays]
        out = function(*leaves)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), leaves))

    views = [view(kind, seed) for seed in range(3)]
    dense = [x.contiguous() for x in views]
    want = results(lambda q, k, v: ab.attention(q, k, v, mask=mask, impl="torch.eager"), dense)
    for got, expected in zip(results(compiled, views), want):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
