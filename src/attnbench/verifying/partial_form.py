"""Is the partial form of an implementation right, of which attention over parts of a whole is built? Its output and LSE
are compared with the truth, and its gradients if output and LSE are those of a larger whole."""

from __future__ import annotations

import numpy as np

from attnbench import reference
from attnbench.spec import DTYPE_BYTES, Partial
from attnbench.verifying.draws import by_head
from attnbench.verifying.lse import GRADIENT_OFF, GRADIENT_PAIRS
from attnbench.verifying.subject import Subject, Wrong
from attnbench.verifying.tolerance import SLACK, compare_lse, relative_error

LEAST_SHARE = 0.2
"""Of the weight of a row of the whole, what lies in the part at least."""


def check(subject: Subject, partial: Partial | None, relative: float) -> tuple[str, ...]:
    """Return what held; nothing if there is no partial form, with a soft cap, or if a head is too large. `relative` is
    what the output may be off by. One head is compared."""
    w, draws, fw = subject.workload, subject.draws, subject.framework
    if partial is None or w.softcap is not None or w.q_len * w.kv_len * w.group > GRADIENT_PAIRS:
        return ()
    (forward, backward), (q, k, v, dout) = partial, draws.inputs("bshd")[0]
    rng = np.random.default_rng([draws.seed, 18])
    batch, index = at = draws.sample.heads[int(rng.integers(len(draws.sample.heads)))]
    members, rows = slice(index * w.group, (index + 1) * w.group), np.arange(w.q_len)
    q1, k1, v1, dout1 = (
        fw.numpy(by_head(x, "bshd", n, (at,))).astype(np.float64)[0]
        for x, n in ((q, w.group), (k, 1), (v, 1), (dout, w.group))
    )
    head = reference.Head(q1, k1[0], v1[0], batch, index)
    right = reference.forward_rows(w, head, rows, np, np.float64)
    out, lse = forward(q, k, v)
    mine, mine_lse = (fw.numpy(x).astype(np.float64) for x in (out, lse))
    off = relative_error([mine[batch, :, members].transpose(1, 0, 2)], [right.out])
    if not off <= SLACK * relative:
        raise Wrong(f"its partial form: out is off by {off:.1e}, {SLACK * relative:.1e} allowed (head {index})")
    plain = reference.forward_rows(w, head._replace(q=q1.astype("f4"), k=k1[0].astype("f4")), rows, np, np.float32)
    if fault := compare_lse([mine_lse[batch, members]], [right.lse], [plain.lse]).fault:
        raise Wrong(f"its partial form: {fault}")
    if not w.needs_gradients:
        return ("partial form",)
    # The rest of the whole: keys elsewhere, of which only their weight and their mean value are known.
    share = rng.uniform(LEAST_SHARE, 1.0, lse.shape).astype(np.float32)
    mean = rng.standard_normal(mine.shape).astype(np.float32)
    own = share.transpose(0, 2, 1)[..., None]
    sees = np.isfinite(mine_lse).transpose(0, 2, 1)[..., None]
    out = fw.array(np.where(sees, own * mine + (1 - own) * mean, 0.0), w.dtype, subject.device)
    lse = fw.array(mine_lse - np.log(share), str(lse.dtype).rpartition(".")[2], subject.device)
    found = [fw.numpy(x).astype(np.float64) for x in backward(q, k, v, out, lse, dout)]
    whole = fw.numpy(out).astype(np.float64)[batch, :, members].transpose(1, 0, 2)
    lives = np.isfinite(right.lse)
    ratio = np.where(lives, np.exp(np.where(lives, right.lse - fw.numpy(lse)[batch, members], 0.0)), 0.0)[..., None]
    exact = _gradients(subject, head, dout1, whole, ratio)
    parts = (members, slice(index, index + 1), slice(index, index + 1))
    for name, array, want, part in zip(("dq", "dk", "dv"), found, exact, parts):
        off = relative_error([array[batch, :, part].transpose(1, 0, 2)], [want])
        if not off <= (allowed := GRADIENT_OFF[DTYPE_BYTES[w.dtype]]):
            raise Wrong(f"its partial form with a larger whole: {name} is off by {off:.1e}, {allowed:.1e} allowed")
    return ("partial form",)


def _gradients(
    subject: Subject, head: reference.Head, dout: np.ndarray, whole: np.ndarray, ratio: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dv of a head [heads, tokens, width] if its weights are this share of a whole's, whose output is
    `whole`: dS is P (dO V - dO out). By linearity, the gradients of the part alone with dO times its share, and those
    of an LSE whose gradient is what the products dO out differ by."""
    w, rows = subject.workload, np.arange(subject.workload.q_len)
    own = reference.forward_rows(w, head, rows, np, np.float64).out
    part = reference.backward_rows(w, head, dout * ratio, rows, np, np.float64)
    weight = w.softmax_scale * (ratio * ((own - whole) * dout).sum(-1, keepdims=True))
    keys = head._replace(v=head.k)
    dq = part.dq + weight * reference.forward_rows(w, keys, rows, np, np.float64).out
    dk = part.dk + reference.backward_rows(w, keys, weight * head.q, rows, np, np.float64).dv
    return dq, dk[None], part.dv[None]
