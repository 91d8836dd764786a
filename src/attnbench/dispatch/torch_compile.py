"""`ab.attention` inside torch.compile: one graph, no break. Needs torch.

Dynamo follows `attention` here and sees only plain values. The choice is made from the shapes while it traces, by a
function that Dynamo calls and does not follow; then it traces into the call that was built, or, if the implementation
is not `traceable`, writes one operator into the graph. If a size is dynamic nothing can be chosen yet: the graph gets
an operator that chooses when it runs, unless a named implementation could not be trained that way.

The operator is `attnbench::forward`, with `attnbench::backward`. It gets the key of a request and looks up what to run
by the sizes of its arrays. Its backward pass is the one of the partial form, so nothing is computed twice. If the
choice is made when the forward runs, the forward returns its number to the backward: other policies may be active by
then, or in that thread. Arrays are bshd or bhsd, results contiguous.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value

from attnbench import policy, registry
from attnbench.dispatch.choice import PickDecision, chosen, known_failure, next_choice, takes_any_length
from attnbench.dispatch.demand import Demand, Outline, Words, demand_of, to_layout
from attnbench.dispatch.plan import OWN_RUN, Plans, built, bytes_kept, refuse_lse_gradient
from attnbench.errors import InvalidWorkload, Unsupported, UsageError
from attnbench.frameworks.torch.internals import without_autocast
from attnbench.impls._arguments import LAYOUTS, both_heads
from attnbench.impls.partial.torch_autograd import of_both, refuse, through_lse, turned
from attnbench.impls.partial.torch_choice import current
from attnbench.masks import DeviceMask
from attnbench.masks.device import PACKED, MaskForm, mask_or_form, outline_of
from attnbench.spec import Array, Call, Config, Implementation, Workload
from attnbench.tracing import constant_when_traced

ANY = Workload(batch=1, q_len=128, heads=4, head_dim=64, pass_="train")
"""Workload for which every implementation with a partial form has one."""
CHOSEN_BEFORE = -1
SCHEMA = 3
"""Version of the operators' arguments and results: graphs cached on disk may be from another version of attnbench."""


class TracedCalls:
    """Calls that traced code runs, by attribute: Dynamo can trace and guard what it finds at a place of its own.

    Nothing is ever dropped: compiled code is guarded by the entry that it found here, and gives no notice when it is
    thrown away. So there is one entry for each call that differs in what a choice depends on (shapes, dtypes, device,
    gradients, words, mask, pick), and none more if a call is traced again.
    """

    def keep(self, call: Call, *what: Any) -> str:
        """Return the attribute of a call; the first call of a name stays, because compiled code is guarded by it."""
        name = f"call_{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}"
        self.__dict__.setdefault(name, call)
        return name


CALLS = TracedCalls()


def attention(
    q: Array, k: Array, v: Array, mask: Any, scale: float | None, softcap: float | None, impl: str, layout: str,
    heads: int | tuple[int, int] | None, return_lse: bool, sinks: bool,
) -> Any:  # fmt: skip
    """Compute `attnbench.attention` by a call that Dynamo can trace."""
    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    words: Any = specialised((outline_of(mask), scale, softcap, impl, layout, heads, return_lse, sinks))
    static = all(has_static_value(size) for x in (q, k, v) for size in x.shape)
    if isinstance(mask, DeviceMask):
        any_size = not static and takes_any_size(*words)
        sizes = typical_sizes(layout, mask.parts[0].kind == PACKED) if any_size else {}
        shapes = outline_shapes((q, k, v), sizes)
        outlines = tuple([(shape, x.dtype, x.device) for shape, x in zip(shapes, (q, k, v))])
        return getattr(CALLS, choose_now(outlines, train, any_size, *words))(q, k, v, *mask.values)
    if static or (train and must_be_traced(impl)):
        outlines = tuple([(specialised(tuple(x.shape)), x.dtype, x.device) for x in (q, k, v)])
        name = choose_now(outlines, train, False, *words)
    else:
        name = choose_when_run(train, *words)
    return getattr(CALLS, name)(q, k, v)


def specialised(value: Any) -> Any:
    """Return a value with plain numbers, which Dynamo guards on, in place of numbers that Dynamo made symbols of."""
    if isinstance(value, tuple):
        return tuple([specialised(one) for one in value])
    return guard_scalar(value) if isinstance(value, (int, float)) else value


@constant_when_traced
def takes_any_size(mask: Any, scale: Any, softcap: Any, impl: str, *rest: Any) -> bool:
    """Return whether one call under a mask on the device can serve all numbers of tokens, so that a graph of dynamic
    sizes can contain it."""
    form: MaskForm = mask_or_form(mask)
    if form.packed:
        return True
    return form.any_size and (impl == "auto" or takes_any_length(registry.get(registry.asked(impl)[0])))


TYPICAL = {"batch": 8, "tokens": 1024, "packed tokens": 8192}
"""Sizes by which a call of dynamic sizes is judged under a mask on the device."""


def typical_sizes(layout: str, packed: bool) -> dict[int, int]:
    """Return typical sizes of the axes that may be dynamic."""
    if packed:
        return {0: TYPICAL["packed tokens"]}
    return {0: TYPICAL["batch"], 2 if layout == "bhsd" else 1: TYPICAL["tokens"]}


def outline_shapes(arrays: tuple[torch.Tensor, ...], sizes: dict[int, int]) -> list[tuple[int, ...]]:
    """Return shapes in plain numbers: in place of dynamic ones the given sizes by axis; on others Dynamo guards.

    Whether an axis is dynamic is asked last, since one symbol may stand for a size that may be dynamic and for another.
    """
    shapes = [[size if axis in sizes else specialised(size) for axis, size in enumerate(x.shape)] for x in arrays]
    q, k, v = shapes
    same = q[0] == k[0] == v[0] if len(sizes) > 1 else True
    for axis in sizes:  # a question that Dynamo answers by making two sizes one
        same = same and k[axis] == v[axis]
    if not same:  # the choice says what is wrong
        sizes = {}
    return [
        tuple([
            sizes[at] if at in sizes and not has_static_value(size) else specialised(size)
            for at, size in enumerate(shape)
        ])
        for shape in shapes
    ]  # fmt: skip


@constant_when_traced
def choose_now(outlines: tuple[Any, ...], train: bool, any_size: bool, mask: Any, *rest: Any) -> str:
    """Return the name in CALLS of what the traced call runs, in its own layout.

    `any_size`: whether numbers of tokens are dynamic, and those in `outlines` typical ones.
    """
    words = Words(mask_or_form(mask), *rest)
    q, k, v = (Outline(*one) for one in outlines)
    demand = demand_of(q, k, v, words, train, "traced", "torch")
    demand = demand._replace(any_kv_len=any_size or (demand.values is not None and demand.values.packed))
    pick, decision = chosen(words.impl, demand)
    while words.impl == "auto" and (error := _error_of(pick, decision, demand, words.layout, (q, k, v))):
        pick, decision = next_choice(pick.name, decision.config, demand, error)
    if pick.traceable:
        call = built(pick, decision.config, demand, words.layout, q.device)
    else:
        call = as_operator(words, train, (pick.name, decision.config))
    return CALLS.keep(call, outlines, train, mask, rest, any_size, pick.name, decision.config, registry.generation())


@constant_when_traced
def choose_when_run(train: bool, mask: Any, *rest: Any) -> str:
    """Return the name in CALLS of an operator for any sizes."""
    return CALLS.keep(as_operator(Words(mask_or_form(mask), *rest), train), train, mask, rest)


@constant_when_traced
def must_be_traced(impl: str) -> bool:
    """Return whether a named implementation is traceable and has no backward pass that an operator could call.

    Then each shape has a graph of its own.
    """
    if impl == "auto":
        return False
    name, config = registry.asked(impl)
    implementation = registry.get(name)
    return implementation.traceable and implementation.partial(ANY, config) is None


def without_numbers(q: Array, k: Array, v: Array, words: Words, train: bool) -> Call:
    """Return what a call with meta or fake tensors runs: it computes their shapes, and can be traced into a graph.

    An implementation that is not `traceable` becomes one operator, as inside torch.compile. So does a call with
    symbolic sizes, whose implementation is chosen when the graph runs.
    """
    symbols = any(not isinstance(size, int) for x in (q, k, v) for size in x.shape)
    if isinstance(words.mask, MaskForm):
        shapes = outline_shapes((q, k, v), typical_sizes(words.layout, words.mask.packed) if symbols else {})
        outlines = tuple((shape, x.dtype, x.device) for shape, x in zip(shapes, (q, k, v)))
        return getattr(CALLS, choose_now(outlines, train, symbols, outline_of(words.mask), *words[1:]))
    if symbols and not (train and must_be_traced(words.impl)):
        return as_operator(words, train)
    demand = demand_of(q, k, v, words, train, "traced", "torch")
    pick, decision = chosen(words.impl, demand)
    if pick.traceable:
        return built(pick, decision.config, demand, words.layout)
    return as_operator(words, train, (pick.name, decision.config))


def _error_of(
    pick: Implementation, decision: PickDecision, demand: Demand, layout: str, outlines: tuple[Outline, ...]
) -> Unsupported | None:
    """Return the Unsupported that an implementation raises with tensors that have no numbers; None if it raises none.

    Inside the graph the error could not be caught. An implementation that compiles by itself is not tried.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not pick.traceable or pick.compiles_each_plan or demand.values is not None:
        return None
    try:
        call = built(pick, decision.config, demand, layout)  # a second one: the masks of this one would have no numbers
        with FakeTensorMode(allow_non_fake_inputs=True):
            train = demand.workload.needs_gradients
            call(*[torch.empty(x.shape, dtype=x.dtype, device=x.device, requires_grad=train) for x in outlines])
    except Unsupported as error:
        return error
    except Exception:  # no other candidate would avoid it, and whoever traces the call will see it
        return None
    return None


class GraphRequest(NamedTuple):
    """Arguments that a graph gives its operator once; the pick is None if sizes were dynamic."""

    words: Words
    train: bool
    pick: tuple[str, Config] | None


class GraphKernels(NamedTuple):
    """Functions on arrays in the request's layout; no backward if no gradients were asked."""

    pick: tuple[str, Config]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None


_requests: dict[str, GraphRequest] = {}
_picks: list[tuple[str, Config]] = []
"""Choices made while a graph ran; the forward returns an index into this list to the backward."""
_picked = Plans()
_kernels = Plans()
_choosing = Lock()


def as_operator(words: Words, train: bool, pick: tuple[str, Config] | None = None) -> Call:
    """Return a function that torch.compile can trace: the operator, and what packed arrays need around it."""
    layout, heads, return_lse = words.layout, words.heads, words.return_lse
    if layout not in LAYOUTS:
        raise InvalidWorkload(f'layout must be one of {", ".join(LAYOUTS)}, not "{layout}".')
    if (layout == "packed") != (heads is not None):
        raise InvalidWorkload("layout packed needs heads=, and no other layout takes it.")
    q_heads, kv_heads = both_heads(heads)
    inner = "bshd" if layout == "packed" else layout
    key = _remember(GraphRequest(words._replace(layout=inner, heads=None), train, pick))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any) -> Any:
        q = to_layout(q, layout, inner, q_heads)
        k, v = to_layout(k, layout, inner, kv_heads), to_layout(v, layout, inner, kv_heads)
        arrays = [value for value in values if isinstance(value, torch.Tensor)]
        out, lse, _ = torch.ops.attnbench.forward(q, k, v, arrays, list(values[len(arrays) :]), key)
        out = to_layout(out, inner, layout)
        return (out, lse if words.sinks else lse.float()) if return_lse else out

    return run


def _remember(request: GraphRequest) -> str:
    """Keep a request and return its key, which is the same in every process: compiled graphs are cached on disk."""
    mask, *rest = request.words
    pick = request.pick and (request.pick[0], sorted(request.pick[1].items()))
    key = hashlib.sha256(repr((SCHEMA, outline_of(mask), rest, request.train, pick)).encode()).hexdigest()[:24]
    _requests[key] = request
    return key


def _request_of(key: str) -> GraphRequest:
    if key not in _requests:
        raise UsageError(
            "this graph was compiled in another process, so its mask is unknown: compile it in this process."
        )
    return _requests[key]


@torch.library.custom_op("attnbench::forward", mutates_args=())
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arrays: Sequence[torch.Tensor], limits: Sequence[int], key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, lse, ran): the LSE is undefined unless asked for; `ran` is empty if the choice was made before.

    `arrays` and `limits` are the values of a mask on the device.
    """
    while True:
        at = _choice(q, k, v, key)
        kernels = _kernels_for(q, k, v, key, at)
        try:
            with OWN_RUN, without_autocast(q.device.type):
                out, lse = kernels.forward(q, k, v, *arrays, *limits)
            break
        except Unsupported as error:
            _replace(q, k, v, key, kernels, error)
    blank, ran = _empty_lse(q, key), _empty_ran(q, key)
    return out.contiguous(), blank if lse is None else lse.to(blank.dtype).contiguous(), ran.fill_(at)


@forward.register_fake
def _empty(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arrays: Any, limits: Any, key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), _empty_lse(q, key), _empty_ran(q, key)


def _empty_ran(q: torch.Tensor, key: str) -> torch.Tensor:
    """Return one number on the host, or an empty tensor on the device, so that a graph of one device stays one."""
    chooses = _request_of(key).pick is None
    return torch.empty((1,) if chooses else (0,), dtype=torch.int64, device="cpu" if chooses else q.device)


def _empty_lse(q: torch.Tensor, key: str) -> torch.Tensor:
    *batch, second, third, _ = q.shape  # packed sequences have no axis of batch rows
    rows = (second, third) if _request_of(key).words.layout == "bhsd" else (third, second)
    return q.new_empty((*batch, *rows), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("attnbench::backward", mutates_args=())
def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    ran: torch.Tensor, arrays: Sequence[torch.Tensor], limits: Sequence[int], key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (dq, dk, dv) by the implementation whose forward ran."""
    kernel = _kernels_for(q, k, v, key, int(ran) if ran.numel() else CHOSEN_BEFORE).backward
    assert kernel is not None
    with OWN_RUN, without_autocast(q.device.type):
        dq, dk, dv = kernel(q, k, v, out, lse, dout.contiguous(), *arrays, *limits)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@backward.register_fake
def _empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, lse: Any, dout: Any, ran: Any, arrays: Any,
    limits: Any, key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, arrays, ctx.limits, ctx.key = inputs
    ctx.save_for_backward(q, k, v, *output, *arrays)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    *saved, ran = ctx.saved_tensors[:6]
    values = list(ctx.saved_tensors[6:])
    words = _request_of(ctx.key).words
    if values and words.return_lse and dlse is not None:
        refuse_lse_gradient(f"{words.impl} under a mask on the device")

    def backward(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.attnbench.backward(*arrays, ran, values, ctx.limits, ctx.key)

    layout = "bhsd" if words.layout == "bhsd" else "bshd"
    grads = of_both(
        lambda dout: backward(*saved, dout), lambda dlse: through_lse(backward, layout, *[*saved, dlse]),
        dout, dlse if words.return_lse else None,
    )  # fmt: skip
    # Torch takes an empty list for one of tensors, which has a list of gradients, and other numbers for one argument.
    return *grads, [None] * len(values), None if ctx.limits else [], None


forward.register_autograd(_gradients, setup_context=_save)
backward.register_autograd(refuse)


def _choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str) -> int:
    """Return the index in `_picks` of what a forward pass runs; the active policies are asked once for each problem."""
    request = _request_of(key)
    if request.pick is not None:
        return CHOSEN_BEFORE
    place = (*_place(q, k, v, key), current(), policy.generation())
    index: Any = _picked.get(place)
    if index is None:
        pick, decision = chosen(request.words.impl, demand_of(q, k, v, request.words, request.train, "operator"))
        index = _number((pick.name, decision.config))
        _picked.put(place, index)
    return index


def _number(pick: tuple[str, Config]) -> int:
    """Return the index of a pick in `_picks`, adding it if it is new."""
    with _choosing:
        if pick not in _picks:
            _picks.append(pick)
        return _picks.index(pick)


def _replace(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, failed: GraphKernels, error: Unsupported
) -> None:
    """Replace an automatic choice that could not run by the next candidate; raise the error if there is none.

    If the choice was made before, the backward pass is replaced too: it takes the output and LSE of any kernel.
    """
    request, place = _request_of(key), _place(q, k, v, key)
    if request.words.impl != "auto":
        raise error
    demand = demand_of(q, k, v, request.words, request.train, "operator")
    pick, decision = next_choice(*failed.pick, demand, error)
    if request.pick is None:
        _picked.put((*place, current(), policy.generation()), _number((pick.name, decision.config)))
    else:
        kernels = _build(request, demand, pick, decision.config)
        _kernels.put((*place, CHOSEN_BEFORE), kernels, bytes_kept(demand))


def _kernels_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, at: int) -> GraphKernels:
    place = (*_place(q, k, v, key), at)
    kernels: Any = _kernels.get(place)
    if kernels is None:
        request = _request_of(key)
        name, config = _picks[at] if request.pick is None else request.pick
        demand = demand_of(q, k, v, request.words, request.train, "operator")
        pick = registry.get(name).configured(config)
        if at == CHOSEN_BEFORE and request.words.impl == "auto" and known_failure(name, config, demand):
            pick, decision = chosen("auto", demand)
            config = decision.config
        kernels = _build(request, demand, pick, config)
        _kernels.put(place, kernels, bytes_kept(demand))
    return kernels


def _place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str) -> tuple[Any, ...]:
    devices, mask = (q.device, k.device, v.device), _request_of(key).words.mask
    shapes: tuple[Any, ...] = (q.shape, k.shape, v.shape)
    if isinstance(mask, MaskForm) and mask.packed:  # one kernel serves all numbers of tokens
        shapes = tuple([(shape[0].bit_length(), *shape[1:]) for shape in shapes])
    return (key, *shapes, q.dtype, k.dtype, v.dtype, *devices, registry.generation())


def _build(request: GraphRequest, demand: Demand, pick: Implementation, config: Config) -> GraphKernels:
    words, layout = request.words, request.words.layout
    if not request.train:
        run = built(pick, config, demand, layout)
        return GraphKernels((pick.name, config), run if words.return_lse else lambda *arrays: (run(*arrays), None))
    if demand.values is not None:
        pair = pick.partial_values(demand.workload, demand.values, config)
    else:
        pair = pick.partial(demand.workload, config)
    assert pair is not None
    return GraphKernels((pick.name, config), *(turned(pair) if layout == "bhsd" else pair))
