"""An implementation as one operator of torch.compile's graphs: `attnbench::forward`, and `attnbench::backward` of it.

The operator is handed a key to what was asked; what it runs is looked up by the sizes it meets. The backward is the
partial form's, so nothing is computed twice. Where the choice is made when it runs, the forward tells the backward
which one it was: policies may be others by then, and of another thread. Arrays are bshd or bhsd, results contiguous.
Needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch

from attnbench import policy, registry
from attnbench.dispatch import failures
from attnbench.dispatch.arrays import to_layout
from attnbench.dispatch.order import Demand
from attnbench.dispatch.plan import Plan, Plans, Words, arranged, bytes_kept, chosen, demand_of, next_choice
from attnbench.dispatch.torch_hook import OWN_RUN
from attnbench.errors import InvalidWorkload, Unsupported, UsageError
from attnbench.frameworks.torch_autocast import without_autocast
from attnbench.impls._arguments import LAYOUTS, both_heads
from attnbench.impls.partial.torch_autograd import of_both, refuse, through_lse
from attnbench.impls.partial.torch_choice import current
from attnbench.masks.combine import literal
from attnbench.spec import Call, Config, Implementation, Workload


class Request(NamedTuple):
    """What a graph asks of its operator; the pick is None where sizes were dynamic."""

    words: Words
    train: bool
    pick: tuple[str, Config] | None


class Kernels(NamedTuple):
    """Functions on arrays in the request's layout; no backward where no gradients were asked."""

    pick: tuple[str, Config]
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    backward: Callable[..., tuple[torch.Tensor, ...]] | None


CHOSEN_BEFORE = -1
SCHEMA = 2
"""Another number whenever the operators take or return something else: graphs cached on disk outlive our versions."""
_requests: dict[str, Request] = {}
_picks: list[tuple[str, Config]] = []
"""What was chosen while a graph ran; its place here is what the forward tells the backward."""
_picked = Plans()
_kernels = Plans()
_choosing = Lock()


def as_operator(words: Words, train: bool, pick: tuple[str, Config] | None = None) -> Call:
    """A function that torch.compile can look into: the operator, and what packed arrays need around it."""
    layout, heads, return_lse = words.layout, words.heads, words.return_lse
    if layout not in LAYOUTS:
        raise InvalidWorkload(f'layout is one of {", ".join(LAYOUTS)}, not "{layout}".')
    if (layout == "packed") != (heads is not None):
        raise InvalidWorkload("heads= belongs to layout packed, which needs it.")
    q_heads, kv_heads = both_heads(heads)
    inner = "bshd" if layout == "packed" else layout
    key = _remember(Request(words._replace(layout=inner, heads=None), train, pick))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        q = to_layout(q, layout, inner, q_heads)
        k, v = to_layout(k, layout, inner, kv_heads), to_layout(v, layout, inner, kv_heads)
        out, lse, _ = torch.ops.attnbench.forward(q, k, v, key)
        out = to_layout(out, inner, layout)
        return (out, lse.float()) if return_lse else out

    return run


def _remember(request: Request) -> str:
    """A key that says the same in every process, because compiled graphs are cached on disk."""
    mask, *rest = request.words
    pick = request.pick and (request.pick[0], sorted(request.pick[1].items()))
    key = hashlib.sha256(repr((SCHEMA, literal(mask), rest, request.train, pick)).encode()).hexdigest()[:24]
    _requests[key] = request
    return key


def _asked(key: str) -> Request:
    if key not in _requests:
        raise UsageError("this graph was compiled in another process: compile it here, so that it knows its mask.")
    return _requests[key]


@torch.library.custom_op("attnbench::forward", mutates_args=())
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, ran); the LSE means nothing where nobody asked for it, `ran` is empty where the choice came before."""
    while True:
        at = _choice(q, k, v, key)
        kernels = _kernels_for(q, k, v, key, at)
        try:
            with OWN_RUN, without_autocast(q.device.type):
                out, lse = kernels.forward(q, k, v)
            break
        except Unsupported as error:
            _give_way(q, k, v, key, kernels, error)
    blank, ran = _empty_lse(q, key), _empty_ran(q, key)
    return out.contiguous(), blank if lse is None else lse.to(blank.dtype).contiguous(), ran.fill_(at)


@forward.register_fake
def _empty(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), _empty_lse(q, key), _empty_ran(q, key)


def _empty_ran(q: torch.Tensor, key: str) -> torch.Tensor:
    """One number on the host, or nothing at all: a graph of one device stays one."""
    chooses = _asked(key).pick is None
    return torch.empty((1,) if chooses else (0,), dtype=torch.int64, device="cpu" if chooses else q.device)


def _empty_lse(q: torch.Tensor, key: str) -> torch.Tensor:
    batch, second, third, _ = q.shape
    rows = (second, third) if _asked(key).words.layout == "bhsd" else (third, second)
    return q.new_empty((batch, *rows), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("attnbench::backward", mutates_args=())
def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    ran: torch.Tensor,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv)."""
    kernel = _kernels_for(q, k, v, key, int(ran) if ran.numel() else CHOSEN_BEFORE).backward
    assert kernel is not None
    with OWN_RUN, without_autocast(q.device.type):
        dq, dk, dv = kernel(q, k, v, out, lse, dout.contiguous())
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@backward.register_fake
def _empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, lse: Any, dout: Any, ran: Any, key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *arrays, ctx.key = inputs
    ctx.save_for_backward(*arrays, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, ran = ctx.saved_tensors
    words = _asked(ctx.key).words

    def backward(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.attnbench.backward(*arrays, ran, ctx.key)

    layout = "bhsd" if words.layout == "bhsd" else "bshd"
    grads = of_both(
        lambda dout: backward(q, k, v, out, lse, dout),
        lambda dlse: through_lse(backward, layout, q, k, v, out, lse, dlse),
        dout,
        dlse if words.return_lse else None,
    )
    return *grads, None


forward.register_autograd(_gradients, setup_context=_save)
backward.register_autograd(refuse)


def _choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str) -> int:
    """What a forward pass runs, as a place in `_picks`: the policies in force are asked once for each problem."""
    request = _asked(key)
    if request.pick is not None:
        return CHOSEN_BEFORE
    place = (*_place(q, k, v, key), current(), policy.generation())
    found: Any = _picked.get(place)
    if found is None:
        pick, decision = chosen(request.words.impl, demand_of(q, k, v, request.words, request.train, "operator"))
        found = _number(pick.name, decision.config)
        _picked.put(place, Plan(found))
    return found


def _number(name: str, config: Config) -> int:
    """Return the place of a pick in `_picks`."""
    with _choosing:
        if (name, config) not in _picks:
            _picks.append((name, config))
        return _picks.index((name, config))


def _give_way(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, failed: Kernels, error: Unsupported) -> None:
    """Put the next candidate in the place of an automatic choice that could not run; raise if there is none.

    Where the choice came before, the backward pass follows: it takes any kernel's output and LSE.
    """
    request, place = _asked(key), _place(q, k, v, key)
    if request.words.impl != "auto":
        raise error
    demand = demand_of(q, k, v, request.words, request.train, "operator")
    pick, decision = next_choice(*failed.pick, demand, error)
    if request.pick is None:
        _picked.put((*place, current(), policy.generation()), Plan(_number(pick.name, decision.config)))
    else:
        kernels = _build(request, demand, pick, decision.config)
        _kernels.put((*place, CHOSEN_BEFORE), Plan(kernels, bytes_kept(demand)))


def _kernels_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, at: int) -> Kernels:
    place = (*_place(q, k, v, key), at)
    found: Any = _kernels.get(place)
    if found is None:
        request = _asked(key)
        name, config = _picks[at] if request.pick is None else request.pick
        demand = demand_of(q, k, v, request.words, request.train, "operator")
        pick = registry.get(name).configured(config)
        if at == CHOSEN_BEFORE and request.words.impl == "auto" and failures.remembered(name, config, demand):
            pick, decision = chosen("auto", demand)
            config = decision.config
        found = _build(request, demand, pick, config)
        _kernels.put(place, Plan(found, bytes_kept(demand)))
    return found


def _place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str) -> tuple[Any, ...]:
    devices = q.device, k.device, v.device
    return (key, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, *devices, registry.generation())


def _build(request: Request, demand: Demand, pick: Implementation, config: Config) -> Kernels:
    words = request.words
    workload, layout = demand.workload, words.layout
    if request.train:
        return _with_backward(pick, config, workload, layout)
    call = pick.build_lse(workload, config) if words.return_lse else pick.build(workload, config)
    assert call is not None
    run = arranged(call, demand, layout, pick.layout)
    return Kernels((pick.name, config), run if words.return_lse else lambda q, k, v: (run(q, k, v), None), None)


def _with_backward(pick: Implementation, config: Config, workload: Workload, layout: str) -> Kernels:
    pair = pick.partial(workload, config)
    assert pair is not None

    def there(arrays: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [to_layout(x, layout, "bshd") for x in arrays]

    def forward(*arrays: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = pair[0](*there(arrays))
        return to_layout(out, "bshd", layout), lse

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, out, dout = there((q, k, v, out, dout))
        return tuple(to_layout(x, "bshd", layout) for x in pair[1](q, k, v, out, lse, dout))

    return Kernels((pick.name, config), forward, backward)
