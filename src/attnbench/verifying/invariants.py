"""Relations that hold for any attention, so that whole outputs can be checked without a reference.

The same numbers at other batch rows and heads, or in other memory, give the same results; one value in all of V is the
result of every row; a key that is not seen changes nothing; all but the last token and then that one give what the
whole sequence gives. No call may write into the result of an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import array_api_compat
import msgspec
import numpy as np

from attnbench.frameworks import Inputs, Program
from attnbench.masks import Causal
from attnbench.spec import Array, Call
from attnbench.verifying.subject import LONG_NAMES, Examination, Subject, Wrong, run
from attnbench.verifying.tolerance import EPS, SLACK, SUMMED_ULPS, Limits, apart, rounded_terms, spot
from attnbench.workloads.suites import shrink

Result = TypeVar("Result")
SMALL = 1e-3
"""Share of a typical head's size; smaller heads are compared with it instead of their own size."""


class Places(NamedTuple):
    """Sources of batch rows, query heads and key/value heads in moved arrays."""

    batch: np.ndarray
    heads: np.ndarray
    kv_heads: np.ndarray

    def of(self, name: str) -> np.ndarray:
        """Return the sources of an array's heads: key/value heads for k, v and their gradients, else query heads."""
        return self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads


def check_places(subject: Subject, good: Mapping[str, Array], allowed: Mapping[str, float]) -> tuple[str, ...]:
    """Check that inputs moved to other batch rows and heads give moved results; return what was moved.

    `good` are the outputs on the first input set, `allowed` their relative errors.
    """
    places = draw_places(subject)
    if places is None:
        return ()
    for (name, before), after in zip(good.items(), subject.outputs(moved_inputs(subject, places)).values()):
        bound = SLACK * allowed[name]
        if found := _head_apart(subject, name, moved(subject, before, name, places), after, bound):
            batch, head, share = found
            raise Wrong(
                f"the {LONG_NAMES[name]} depends on its place: batch {places.batch[batch]}, head "
                f"{places.of(name)[head]} moved to batch {batch}, head {head} gives another result (off by "
                f"{share:.1e}, {bound:.1e} allowed)"
            )
    kinds = {"permuted batch": places.batch, "permuted heads": places.heads}
    return tuple(words for words, order in kinds.items() if _others(order))


def draw_places(subject: Subject) -> Places | None:
    """Draw where batch rows and heads move to; None if none may be moved under this mask."""
    w = subject.workload
    rng = np.random.default_rng(subject.draws.seed)
    batch = 0 if w.batch == 1 or w.visible_mask.per_batch else int(rng.integers(1, w.batch))
    alike = w.kv_heads > 1 and not w.visible_mask.per_head and subject.declared_error is None
    heads = int(rng.integers(1, w.kv_heads)) if alike else 0
    if not batch and not heads:
        return None
    grouped = np.arange(w.heads).reshape(w.kv_heads, w.group)
    return Places(
        np.roll(np.arange(w.batch), batch),
        np.roll(grouped, heads, axis=0).ravel(),
        np.roll(np.arange(w.kv_heads), heads),
    )


def _others(order: np.ndarray) -> bool:
    return not np.array_equal(order, np.arange(len(order)))


def moved(subject: Subject, array: Array, name: str, places: Places) -> Array:
    """Return an input or output with its batch rows and heads taken from these places."""
    for order, axis in ((places.batch, 0), (places.of(name), subject.head_axis)):
        if _others(order):
            index = subject.framework.namespace(subject.device).asarray(order)
            array = array_api_compat.array_namespace(array).take(array, index, axis=axis)
    return array


def moved_inputs(subject: Subject, places: Places) -> Inputs:
    """Return the first input set with its batch rows and heads taken from these places."""
    return Inputs(*(moved(subject, x, name, places) for name, x in zip(("q", "k", "v", "out"), subject.inputs[0])))


def _head_apart(subject: Subject, name: str, want: Array, got: Array, bound: float) -> tuple[int, int, float] | None:
    """Return (batch, head, share) of the first head that is off by more than this share and rounding; or None."""
    fw = subject.framework
    if fw.same_bits(want, got):
        return None
    want, got = fw.cast(want, subject.wide), fw.cast(got, subject.wide)
    off, size = head_norms(subject, got - want), head_norms(subject, want)
    size = np.maximum(size, SMALL * np.median(size))
    over = ~(off <= bound * size + rounded_of_head(subject, name))
    if not over.any():
        return None
    batch, head = (int(place) for place in np.argwhere(over)[0])
    return batch, head, off[batch, head] / size[batch, head] if size[batch, head] else float("inf")


def rounded_of_head(subject: Subject, name: str) -> float:
    """Return what rounding may leave of the terms that cancel in the gradient of a whole head."""
    w, draws = subject.workload, subject.draws
    if name not in ("dq", "dk") or not draws.gradient_heads:
        return 0.0
    terms = (truth.cancelling(name) for truth in draws.truths(0, True))
    least = (rounded_terms(one, w.dtype, w.head_dim) for one in terms if one is not None)
    return max((float(np.linalg.norm(one)) for one in least), default=0.0)


def head_norms(subject: Subject, array: Array) -> np.ndarray:
    """Return the norm of each head of each batch row of an output, [batch, heads]."""
    tokens = 1 if subject.head_axis == 2 else 2
    xp = array_api_compat.array_namespace(array)
    return np.sqrt(subject.host(xp.sum(array * array, axis=(tokens, 3))))


OVERWRITES = "overwrites the result of its previous call"


def check_overwritten_inputs(examination: Examination) -> tuple[str, ...]:
    """Check that a result is computed from its inputs and not found by their address; return the property.

    Other values are written into the memory of inputs that were used before. Nothing is checked if arrays cannot be
    changed in place.
    """
    subject, limits = examination.subject, examination.limits
    framework, good = subject.framework, examination.found.good[1]
    if not framework.overwrites:
        return ()
    for (name, got), right in zip(on_overwritten_inputs(subject, subject.outputs).items(), good):
        if framework.same_bits(got, right):
            continue
        if differs := apart(framework, got, right, limits[name], subject.workload.dtype):
            raise Wrong(
                f"wrong {name} after its inputs were overwritten in place: a stored result? "
                f"({spot(differs, subject.layout)} differs by {differs.share:.1e}, {differs.allowed:.1e} allowed)"
            )
    return ("overwritten inputs",)


def on_overwritten_inputs(subject: Subject, call: Callable[[Inputs], Result]) -> Result:
    """Return what a call gives for the second input set, in memory in which it has seen the first one before."""
    first, second = subject.inputs[:2]
    inputs = Inputs(*subject.framework.snapshot(tuple(first)))
    call(inputs)
    for array, values in zip(inputs, second):
        subject.framework.overwrite(array, values)
    return call(inputs)


TRANSPOSED, LAST_AXIS = (0, 2, 1, 3), (0, 1, 3, 2)
EXPANDED = "one number that is expanded"
DEPENDS_ON_DOUT = (
    "gradients are wrong if dO has another order of memory than in earlier calls of the shape (a library keeps a plan "
    "for the first one)"
)


def _ordered(subject: Subject, array: Array, order: tuple[int, ...]) -> Array:
    """Return a copy whose axes lie in memory in this order."""
    xp = array_api_compat.array_namespace(array)
    (dense,) = subject.framework.snapshot((xp.permute_dims(array, order),))
    return xp.permute_dims(dense, order)


def _cut_out(array: Array, before: int) -> Array:
    """Return a copy that is the last columns of an array `before` times as much wider, as of joined projections."""
    xp = array_api_compat.array_namespace(array)
    return xp.concat([array] * (before + 1), axis=3)[..., before * array.shape[3] :]


def check_strided_inputs(examination: Examination) -> tuple[str, ...]:
    """Check that results are right if Q, K and V are views: transposed, and cut out of wider arrays; return the
    property.

    Wrong results of views are noted: the caller may hand over dense arrays, as `ab.attention` does to implementations
    that are not ours. Nothing is checked if arrays have no order of memory, or if the call refuses views.
    """
    subject = examination.subject
    framework, inputs = subject.framework, subject.inputs[0]
    if not framework.overwrites:
        return ()
    views = inputs._replace(
        q=_ordered(subject, inputs.q, TRANSPOSED), k=_cut_out(inputs.k, 1), v=_ordered(subject, inputs.v, TRANSPOSED)
    )
    try:
        outputs = subject.outputs(views)
    except Exception:
        return ()
    if wrong := _first_apart(subject, examination.outputs, outputs, examination.limits):
        examination.notes.append(f"takes dense arrays only: {wrong[0]} is wrong if Q, K and V are views ({wrong[1]})")
        return ()
    return ("Q, K and V in any order of memory",)


def check_unwritten_memory(examination: Examination) -> tuple[str, ...]:
    """Check that results are right if memory that the call gets holds other numbers than zeros; return the property.

    A kernel that adds to a buffer it has not cleared, or leaves rows unwritten that should be 0, is right as long as
    the system hands out zeros. Nothing is checked if memory cannot be filled.
    """
    subject = examination.subject
    with subject.framework.filled_memory(subject.device) as filled:
        if not filled:
            return ()
        outputs = subject.outputs(subject.inputs[0])
    if wrong := _first_apart(subject, examination.outputs, outputs, examination.limits):
        raise Wrong(
            f"{wrong[0]} is wrong if new memory does not hold zeros: {wrong[1]}; is it read before it is written?"
        )
    return ("no unwritten memory is read",)


BESIDE = 128
"""Tokens of NaN before and behind an input: a tile of most kernels."""


def check_read_beyond(examination: Examination) -> tuple[str, ...]:
    """Check that results are right if NaN lies before and behind each input in memory; return the property.

    A kernel that reads a whole tile at the end of a sequence and gives what lies behind no weight is right as long as
    that is finite: 0 times NaN is NaN. Nothing is checked if arrays have no place in memory of their own.
    """
    subject, framework = examination.subject, examination.subject.framework
    if not framework.overwrites:
        return ()
    inputs = Inputs(*(_among_nan(subject, array) for array in subject.inputs[0]))
    if wrong := _first_apart(subject, examination.outputs, subject.outputs(inputs), examination.limits):
        raise Wrong(f"{wrong[0]} is wrong if NaN lies beside its inputs in memory: {wrong[1]}; is it read beyond them?")
    return ("nothing is read beyond its inputs",)


def _among_nan(subject: Subject, array: Array) -> Array:
    """Return a contiguous copy with NaN before and behind it in the same memory."""
    xp = array_api_compat.array_namespace(array)
    tokens = array.shape[1 if subject.head_axis == 2 else 2]
    beside = BESIDE * (math.prod(array.shape[1:]) // tokens)
    nothing = xp.zeros_like(xp.reshape(array, (-1,))[:1]) + float("nan")
    nan = xp.broadcast_to(nothing, (beside,))
    return xp.reshape(xp.concat([nan, xp.reshape(array, (-1,)), nan])[beside:-beside], array.shape)


def check_shared_memory(examination: Examination) -> tuple[str, ...]:
    """Check that results are right if V is the array of K, as in latent attention, and if Q is too where all three have
    one shape; return the property.

    A kernel that changes an input and then restores it reads the changed one as the other.
    """
    subject, w = examination.subject, examination.subject.workload
    framework, inputs = subject.framework, subject.inputs[0]
    if not framework.overwrites or w.head_dim != w.value_dim:
        return ()
    one = inputs.k
    cases = {"V is the same array as K": inputs._replace(v=one)}
    if inputs.q.shape == one.shape:
        cases["Q, K and V are the same array"] = inputs._replace(q=one, v=one)
    for words, shared in cases.items():
        right = subject.outputs(type(inputs)(*framework.snapshot(tuple(shared))))
        if wrong := _first_apart(subject, right, subject.outputs(shared), examination.limits):
            raise Wrong(f"{wrong[0]} is wrong if {words}: {wrong[1]}")
    return ("inputs in one array",)


def check_strided_dout(examination: Examination) -> tuple[str, ...]:
    """Check that gradients are right if dO has another order of memory, as after a transposition, or is one number at
    every place, as after a sum; return the property.

    Nothing is checked without gradients or if arrays have no order of memory. A call that refuses such a dO passes, but
    has no property: it gives nobody a wrong number. Gradients that are right as soon as Q too is new in its order of
    memory are noted: the function follows dO, but a library below it keeps a plan for the first order.
    """
    subject, good, limits = examination.subject, examination.outputs, examination.limits
    framework, inputs = subject.framework, subject.inputs[0]
    if not framework.overwrites or not subject.workload.needs_gradients:
        return ()
    xp = array_api_compat.array_namespace(inputs.dout)
    orders = {"transposed": TRANSPOSED, "strided along its last axis": LAST_AXIS}
    cases = {words: _ordered(subject, inputs.dout, order) for words, order in orders.items()}
    cases[EXPANDED] = xp.broadcast_to(inputs.dout[:1, :1, :1, :1], inputs.dout.shape)
    held = True
    for times, (words, dout) in enumerate(cases.items(), 1):
        given = inputs._replace(dout=dout)
        try:
            outputs = subject.outputs(given)
        except Exception:
            held = False
            continue
        right = subject.outputs(inputs._replace(dout=framework.snapshot((dout,))[0])) if words is EXPANDED else good
        if (wrong := _first_apart(subject, right, outputs, limits)) is None:
            continue
        held, fresh = False, given._replace(q=_cut_out(given.q, times))
        if _first_apart(subject, right, subject.outputs(fresh), limits) is not None:
            raise Wrong(f"{wrong[0]} is wrong if dO is {words}: {wrong[1]}")
        if DEPENDS_ON_DOUT not in examination.notes:
            examination.notes.append(DEPENDS_ON_DOUT)
    return ("dO in any order of memory",) if held else ()


def _first_apart(
    subject: Subject, right: Mapping[str, Array], outputs: Mapping[str, Array], limits: Mapping[str, Limits]
) -> tuple[str, str] | None:
    """Return the name of the first output with a head that is off by more than allowed, and where; or None."""
    for name, got in outputs.items():
        bound = SLACK * limits[name].relative
        if found := _head_apart(subject, name, right[name], got, bound):
            batch, head, share = found
            return f"the {LONG_NAMES[name]}", f"batch {batch}, head {head} is off by {share:.1e}, {bound:.1e} allowed"
    return None


def require_result_kept(subject: Subject, program: Program) -> None:
    """Hold the result of a call over three later ones on the other input set; raises Wrong if it changes."""
    framework, (first, second) = subject.framework, subject.inputs[:2]
    if not framework.overwrites:
        return
    held = run(program, first)
    framework.wait(held)
    before = framework.snapshot(held)
    for _ in range(3):
        framework.wait(run(program, second))
        if not all(framework.same_bits(old, now) for old, now in zip(before, held)):
            raise Wrong(OVERWRITES)


def check_built_beside(examination: Examination) -> tuple[str, ...]:
    """Check that the call gives the same after another one was built for a smaller shape; return the property.

    `ab.attention` keeps the calls of many shapes side by side. Nothing is checked without a call for another shape.
    """
    subject = examination.subject
    small = shrink(subject.workload)
    if examination.build is None or small == subject.workload or examination.build(small) is None:
        return ()
    again = subject.outputs(subject.inputs[0])
    if wrong := _first_apart(subject, examination.outputs, again, examination.limits):
        raise Wrong(f"{wrong[0]} is wrong after a call for another shape was built: {wrong[1]}")
    return ("calls of two shapes side by side",)


def check_prefill_and_decode(examination: Examination) -> tuple[str, ...]:
    """Check that all but the last token and then that one give what the whole sequence gives; return the property.

    A model that decodes relies on this; a kernel that aligns a causal mask elsewhere than at the end fails it. Nothing
    is checked for other masks, or if the implementation has no call for one of the steps.
    """
    w, mask = examination.subject.workload, examination.subject.workload.visible_mask
    if w.pass_ == "backward" or not isinstance(mask, Causal) or w.q_len != w.kv_len or w.q_len < 2:
        return ()
    if examination.build is None or mask.align != "bottom-right":
        return ()
    first, last = w.q_len - 1, slice(w.q_len - 1, None)
    steps = {
        "prefill": (msgspec.structs.replace(w, q_len=first, kv_len=first, pass_="forward"), slice(first), slice(first)),
        "decode": (msgspec.structs.replace(w, q_len=1, pass_="forward"), last, slice(None)),
    }
    good, bound = examination.outputs["out"], SLACK * examination.limits["out"].relative
    for name, (step, queries, keys) in steps.items():
        call = examination.build(step)
        if call is None:
            return ()
        _require_same_output(examination.subject, name, call, queries, keys, good, bound)
    return ("prefill and decode give the whole",)


def _require_same_output(
    subject: Subject, name: str, call: Call, queries: slice, keys: slice, good: Array, bound: float
) -> None:
    fw, whole = subject.framework, subject.inputs[0]

    def cut(array: Array, tokens: slice) -> Array:
        part = array[:, tokens] if subject.layout == "bshd" else array[:, :, tokens]
        return array_api_compat.array_namespace(part).asarray(part, copy=True)

    inputs = Inputs(cut(whole.q, queries), cut(whole.k, keys), cut(whole.v, keys), cut(whole.dout, queries))
    (out,) = run(fw.programs(call, "forward", inputs).main, inputs)
    fw.wait(out)
    got, want = (subject.host(array) for array in (out, cut(good, queries)))
    if got.shape != want.shape:
        raise Wrong(f"{name} alone gives an output of shape {got.shape}, expected {want.shape}")
    off = float(np.linalg.norm(got - want)) / (float(np.linalg.norm(want)) or 1.0)
    if not off <= bound:
        raise Wrong(
            f"{name} alone gives another output than the whole sequence (off by {off:.1e}, {bound:.1e} allowed)"
        )


ROWS_LOOKED_AT = 64
PAIRS_LOOKED_AT = 1 << 28
"""On the host, about a second."""
VALUES = {"float16": 2.0**15}
"""Value of V by dtype, 1 otherwise: sums of unnormalised weights times values that are kept in float16 end at 65504."""
ULPS = {"float64": 64, "float32": 64, "float16": 4, "bfloat16": 2}


def check_unseen_key(examination: Examination) -> tuple[str, ...]:
    """Require that a key which some rows cannot see does not change those rows; return the property that holds."""
    subject = examination.subject
    if subject.workload.pass_ == "backward" or (hidden := _first_hidden(subject)) is None:
        return ()
    batch, key, rows = hidden
    before = subject.row(subject.inputs[0], batch)[rows]
    after = subject.row(_with_key(subject, batch, key, 3.0), batch)[rows]
    size = float(np.linalg.norm(before))
    off = float(np.linalg.norm(before.astype(np.float64) - after)) / (size or 1.0)
    if not off <= _tolerance(subject):
        raise Wrong(f"key {key} changes rows that cannot see it (by {off:.1e}): the mask leaks")
    return ("an unseen key changes nothing",)


def check_nan(examination: Examination) -> tuple[str, ...]:
    """Require that rows which see a NaN value are NaN, so that divergence shows; return the property.

    Notes `contained` if a NaN key and value leave the rows that do not see them finite, else `leaks`; nothing if every
    key is seen. A call that raises for NaN passes.
    """
    subject, first = examination.subject, examination.subject.inputs[0]
    if subject.workload.pass_ == "backward":
        return ()
    seen = subject.framework.put(first.v, (...,), float("nan"))
    try:
        out = subject.row(first._replace(v=seen), 0)
        if (hidden := _first_hidden(subject)) is not None:
            batch, key, rows = hidden
            other = subject.row(_with_key(subject, batch, key, float("nan")), batch)[rows]
            examination.noted["hidden_nan"] = "contained" if np.isfinite(other).all() else "leaks"
    except Exception:
        return ()
    sees = np.broadcast_to(_rows_see(subject), (subject.workload.batch, *out.shape[:2]))[0]
    if subject.declared_error is None and np.isfinite(out[sees == 1]).any():
        raise Wrong("rows that see NaN in V are finite: NaN is replaced, so that a diverging model would not show")
    return ("a NaN that is seen shows",)


def _with_key(subject: Subject, batch: int, key: int, value: float) -> Inputs:
    """Return the first input set with one key and its value replaced."""
    first = subject.inputs[0]
    index = (batch, key) if subject.layout == "bshd" else (batch, slice(None), key)
    k, v = (subject.framework.put(array, index, value) for array in (first.k, first.v))
    return first._replace(k=k, v=v)


def _tolerance(subject: Subject) -> float:
    """Return the relative difference that the dtype's rounding explains."""
    if subject.declared_error is not None:
        return 4 * subject.declared_error
    dtype = subject.workload.dtype
    return EPS[dtype] * (ULPS[dtype] + 2 * SUMMED_ULPS.get(dtype, 0.0) * subject.workload.kv_len**0.5)


def check_one_value(examination: Examination) -> tuple[str, ...]:
    """Check on every row of every head that one value in all of V gives that value; return the property.

    Weights that sum to something else fail it, and so does a row that was left out.
    """
    subject = examination.subject
    if subject.workload.pass_ == "backward":
        return ()
    fw, first, dtype = subject.framework, subject.inputs[0], subject.workload.dtype
    value = VALUES.get(dtype, 1.0)
    out = run(subject.programs.main, first._replace(v=fw.put(first.v, (...,), value)))[0]
    known = _rows_see(subject)
    sees = fw.transpose(fw.array(known[..., None], subject.wide, subject.device), "bshd", subject.layout)
    xp = array_api_compat.array_namespace(out)
    off = xp.abs(fw.cast(out, subject.wide) / value - sees)
    if np.isnan(known).any():
        off = xp.where(xp.isnan(sees), xp.zeros_like(off), off)
    error = float(fw.numpy(xp.max(off)))
    if not error <= _tolerance(subject):
        raise Wrong(f"V = {value:g} does not give {value:g} on every row that sees a key (relative error {error:.1e})")
    return (f"V = {value:g} gives {value:g}",)


def _rows_see(subject: Subject) -> np.ndarray:
    """Return [batch or 1, q, heads or 1]: 1 if a row sees a key, 0 if it sees none, NaN if that was not looked up.

    If rows see more than a run of keys, the key at a row's own place is looked at first, and all keys only for rows
    that do not see that one, as far as PAIRS_LOOKED_AT goes.
    """
    mask, shape = subject.workload.visible_mask, subject.workload.mask_shape
    if (runs := mask.runs(shape)) is not None:
        return (runs[1] > runs[0]).astype(np.float64)[:, :, None]
    b, h, q, _ = mask.indices(shape)
    own = np.clip(q + shape.kv_len - shape.q_len, 0, shape.kv_len - 1)
    seen = np.broadcast_to(mask.predicate(shape, np)(b, h, q, own), np.broadcast_shapes(b.shape, h.shape, q.shape))
    sees = np.where(seen[..., 0], 1.0, np.nan)
    per_row = shape.kv_len * sees.shape[0] * sees.shape[1]
    asked = np.flatnonzero(np.isnan(sees).any(axis=(0, 1)))
    few = max(ROWS_LOOKED_AT, PAIRS_LOOKED_AT // per_row)
    if len(asked) > few:
        asked = asked[np.linspace(0, len(asked) - 1, few).astype(int)]
    step = max(1, (1 << 24) // per_row)
    for rows in (asked[n : n + step] for n in range(0, len(asked), step)):
        sees[:, :, rows] = mask.array(shape, rows).any(axis=-1)
    return sees.transpose(0, 2, 1)


def _first_hidden(subject: Subject) -> tuple[int, int, np.ndarray] | None:
    """Return a batch row, a key, and query rows that see it in no head; None if the rows looked at see everything."""
    mask, shape = subject.workload.visible_mask, subject.workload.mask_shape
    rows = np.unique(np.linspace(0, shape.q_len - 1, min(shape.q_len, ROWS_LOOKED_AT)).astype(int))
    seen = np.asarray(mask.array(shape, rows).any(axis=1))
    for batch, hidden in enumerate(np.logical_not(seen)):
        if hidden.any():
            key = int(np.argmax(hidden.sum(axis=0)))
            return batch, key, rows[hidden[:, key]]
    return None
