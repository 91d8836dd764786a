"""One cell in the calling process: opened, sampled, and found out when what was checked is not what is timed."""

from __future__ import annotations

import hashlib
import time
from typing import NamedTuple

import numpy as np
import pytest

from attnbench import masks, reference, registry
from attnbench.measuring.session import FellBack, Session
from attnbench.registry import Function
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Ok, Workload

WORKLOAD = Workload(batch=2, q_len=48, heads=4, kv_heads=2, head_dim=16, mask=masks.causal())
VISITS = 12


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    worker = Local("numpy", None)
    yield worker
    worker.kill()


class Plain:
    """Honest float32 attention of a workload, with gradients, that a test can tell to turn dishonest."""

    def __init__(self, workload=WORKLOAD):
        self.workload, self.armed, self.calls = workload, False, 0

    def honest(self, q, k, v):
        return reference.attention(self.workload, q, k, v)[0]

    def __call__(self, q, k, v):
        self.calls += 1
        return self.dishonest(q, k, v) if self.armed else self.honest(q, k, v)

    def dishonest(self, q, k, v):
        return self.honest(q, k, v)

    def vjp(self, q, k, v, dout):
        return reference.attention_gradients(self.workload, q, k, v, dout)


class Zero(Plain):
    def dishonest(self, q, k, v):
        return np.zeros_like(q)


class Stored(Plain):
    """Keeps answers under a key of the inputs, from the moment it is armed."""

    def __init__(self, workload=WORKLOAD):
        super().__init__(workload)
        self.store = {}

    def dishonest(self, q, k, v):
        key = self.key(q, k, v)
        if key not in self.store:
            self.store[key] = self.honest(q, k, v)
        return self.store[key].copy()


class ByPartOfTheContent(Stored):
    def key(self, q, k, v):
        return hashlib.sha256(b"".join(abs(x).tobytes() for x in (q, k))).hexdigest()


class ByContent(Stored):
    def key(self, *arrays):
        return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


class LastRowForgotten(Plain):
    def dishonest(self, q, k, v):
        out = self.honest(q, k, v)
        out[-1, -1, -1] = 0
        return out


class StaleGradient(Plain):
    def vjp(self, q, k, v, dout):
        grads = super().vjp(q, k, v, dout)
        if self.armed:
            return self.first
        self.first = grads
        return grads


class Ready(NamedTuple):
    record: Ok
    timed: bool
    warm: p.Warm | None


def open_cell(worker, function, workload=WORKLOAD, measure=True, thorough=False, seed=3, name="subject"):
    """Opened and warmed up, or the answer that ended it."""
    registry.register(Function(function, "numpy", name))
    cell = Cell(name, workload)
    opened = worker.ask(p.Open(cell, thorough, measure, None, seed), 60)
    if isinstance(opened, p.Closed):
        return opened
    warm = worker.ask(p.WarmUp(cell.id), 60) if opened.timed else None
    return warm if isinstance(warm, p.Closed) else Ready(opened.record, opened.timed, warm)


def sample_until_closed(worker, workload=WORKLOAD, part="main"):
    for _ in range(VISITS):
        answer = worker.ask(p.TakeSample(Cell("subject", workload).id, part, 4, 1), 60)
        if isinstance(answer, p.Closed):
            return answer.record
    return None


def test_an_honest_cell_is_opened_and_sampled(worker):
    opened = open_cell(worker, Plain())
    assert isinstance(opened, Ready), opened
    record = opened.record
    assert record.status == "ok"
    assert record.verified_at.share == 1.0
    assert 0 < record.errors.forward < record.errors.forward_allowed < 1e-5
    assert record.deterministic
    assert (opened.warm.parts, opened.warm.clock, opened.warm.slow_clock) == (("main",), "wall", False)
    assert opened.warm.call_ns > 1e3
    answer = worker.ask(p.TakeSample(Cell("subject", WORKLOAD).id, "main", 7, 2), 60)
    assert len(answer.ns) == 7
    assert all(ns > 0 for ns in answer.ns)
    assert sample_until_closed(worker) is None


@pytest.mark.parametrize("trap", [Zero, ByPartOfTheContent, LastRowForgotten])
def test_right_when_checked_and_wrong_when_timed_is_caught(worker, trap):
    subject = trap()
    assert isinstance(open_cell(worker, subject), Ready), "it is honest as long as it is looked at"
    subject.armed = True
    record = sample_until_closed(worker)
    assert record is not None
    assert record.status == "incorrect"
    assert "right when checked" in record.reason
    assert record.time is None


def test_one_row_left_out_of_one_batch_row_is_caught_at_the_first_look(worker):
    class Forgetful(Plain):
        def dishonest(self, q, k, v):
            out = self.honest(q, k, v)
            out[11, -1, 1] = 0
            return out

    workload = Workload(batch=24, q_len=16, heads=2, head_dim=8, mask=masks.causal())
    subject = Forgetful(workload)
    assert isinstance(open_cell(worker, subject, workload), Ready)
    subject.armed = True
    closed = worker.ask(p.TakeSample(Cell("subject", workload).id, "main", 1, 1), 60)
    assert isinstance(closed, p.Closed)
    assert "right when checked: batch 11, head 1, row 15 differs by 1.0e+00" in closed.record.reason


@pytest.mark.parametrize("how", ["address", "identity"])
def test_a_result_stored_under_the_place_of_its_inputs_is_caught_when_they_are_overwritten(worker, how):
    class ByPlace(Stored):
        def key(self, *arrays):
            self.held = [*getattr(self, "held", ()), *arrays]  # no place is ever given to another array
            return tuple(x.ctypes.data if how == "address" else id(x) for x in arrays)

    subject = ByPlace()
    subject.armed = True
    closed = open_cell(worker, subject, measure=False)
    assert isinstance(closed, p.Closed)
    assert closed.record.status == "incorrect"
    assert "wrong out after its inputs were overwritten in place: a stored result?" in closed.record.reason


def test_zero_after_some_calls_is_caught(worker):
    class Tired(Zero):
        def __call__(self, q, k, v):
            self.armed = self.calls > 60
            return super().__call__(q, k, v)

    subject = Tired()
    opened = open_cell(worker, subject)
    record = opened.record if isinstance(opened, p.Closed) else None
    for _ in range(20):
        record = record or sample_until_closed(worker)
    assert record.status == "incorrect"


def test_a_stale_gradient_is_caught(worker):
    workload = Workload(batch=2, q_len=32, heads=2, head_dim=16, pass_="train")
    subject = StaleGradient(workload)
    opened = open_cell(worker, subject, workload)
    assert opened.warm.parts == ("main", "forward", "backward")
    for part in ("forward", "backward"):
        assert worker.ask(p.TakeSample(Cell("subject", workload).id, part, 3, 1), 60).ns
    subject.armed = True
    assert "wrong d" in sample_until_closed(worker, workload).reason


def test_looking_answers_up_by_their_whole_content_gains_nothing(worker):
    """Such a function is never wrong and only fast on inputs that it has met: no timed call has any of those."""
    workload = Workload(batch=1, q_len=256, heads=4, head_dim=32)
    subject = ByContent(workload)
    subject.armed = True
    assert isinstance(open_cell(worker, subject, workload), Ready)
    before = len(subject.store)
    taken = worker.ask(p.TakeSample(Cell("subject", workload).id, "main", 9, 2), 60)
    assert len(taken.ns) == 9
    assert len(subject.store) >= before + 18, "every timed call computed its own answer"


def test_stored_probabilities_gain_nothing(worker):
    """Q and K are new in every timed call too, so a softmax kept from the check fits none of them."""

    class ByQueriesAndKeys(Plain):
        def __init__(self, workload):
            super().__init__(workload)
            self.met = set()
            self.hits = 0

        def honest(self, q, k, v):
            key = (q.tobytes(), k.tobytes())
            self.hits += key in self.met
            self.met.add(key)
            return super().honest(q, k, v)

    workload = Workload(batch=1, q_len=32, heads=2, head_dim=16)
    subject = ByQueriesAndKeys(workload)
    assert isinstance(open_cell(worker, subject, workload), Ready)
    subject.hits = 0
    worker.ask(p.TakeSample(Cell("subject", workload).id, "main", 20, 1), 60)
    assert subject.hits == 0


def test_noise_of_its_own_is_no_lie_but_is_said(worker):
    class Noisy(Plain):
        def honest(self, q, k, v):
            return super().honest(q, k, v) * np.float32(1 + 2e-7 * np.random.default_rng().integers(0, 2))

        def dishonest(self, q, k, v):
            return super().honest(q, k, v) * np.float32(1.01)

    subject = Noisy()
    for _ in range(8):  # two equal draws in a row look deterministic
        opened = open_cell(worker, subject)
        if not opened.record.deterministic:
            break
    assert not opened.record.deterministic
    assert sample_until_closed(worker) is None
    subject.armed = True
    assert sample_until_closed(worker).status == "incorrect"


@pytest.mark.parametrize(
    "function, says",
    [
        (lambda q, k, v: q * 0, "output"),
        (lambda q, k, v: q[:, :5], "shape"),
        (lambda q, k, v: q.astype(np.float64), "float64"),
        (lambda q, k, v: [1, 2], "list"),
        (lambda q, k, v: q * np.nan, "NaN"),
    ],
    ids=["zeros", "shape", "dtype", "type", "nan"],
)
def test_what_is_plainly_wrong_has_its_reason(worker, function, says):
    closed = open_cell(worker, function)
    assert isinstance(closed, p.Closed)
    assert closed.record.status in ("incorrect", "failed")
    assert says in closed.record.reason


def test_inputs_that_were_changed_are_noticed(worker):
    class Vandal(Plain):
        def __call__(self, q, k, v):
            out = self.honest(q, k, v)
            q += 1
            return out

    assert open_cell(worker, Vandal()).record.reason == "changed its inputs"


def test_verification_alone_takes_no_samples(worker):
    opened = open_cell(worker, Plain(), measure=False, thorough=True)
    assert not opened.timed
    assert opened.record.errors.hidden_nan == "contained"
    assert set(opened.record.errors.properties) == {
        "V = 1 gives 1", "permuted batch", "permuted heads", "overwritten inputs", "an unseen key changes nothing",
        "one key more or less", "logits far below 0", "exact under powers of two", "zeros are no padding",
        "light keys count", "Q, K and V in any order of memory", "a NaN that is seen shows",
        "no memory of larger logits", "inputs in one array", "no unwritten memory is read",
        "nothing is read beyond its inputs",
    }  # fmt: skip


def test_sessions_of_one_workload_share_their_draws(worker):
    """Signs that one session gives to V must not disturb what another is checked against."""
    cells = [Cell(name, WORKLOAD) for name in ("first", "second")]
    for cell in cells:
        assert isinstance(open_cell(worker, Plain(), name=cell.implementation), Ready)
        for _ in range(3):
            answer = worker.ask(p.TakeSample(cells[0].id, "main", 3, 1), 60)
            assert isinstance(answer, p.Sampled), answer
    for n in range(6):
        assert isinstance(worker.ask(p.TakeSample(cells[n % 2].id, "main", 3, 1), 60), p.Sampled)
    assert isinstance(open_cell(worker, Plain(), name="first"), Ready)


def test_the_wrong_path_is_a_failure_with_both_names():
    class Kernels(Function):
        expects = ("flash",)
        forbids = ("math",)

    session = Session.__new__(Session)
    session._implementation = Kernels(lambda q, k, v: q, "torch", "subject")
    session.cell = Cell("subject", Workload(batch=1, q_len=1, heads=1, head_dim=1))
    session._prove_path(None)
    session._prove_path(["aten::mm", "flash_fwd"])
    with pytest.raises(FellBack, match="sdpa_math ran"):
        session._prove_path(["sdpa_math", "flash_fwd"])
    with pytest.raises(FellBack, match="no kernel like flash ran, only mm"):
        session._prove_path(["mm"])


def test_warm_up_ends_although_the_calls_never_settle(worker, monkeypatch):
    monkeypatch.setattr("attnbench.measuring.session.WARM_UP_LIMIT_S", 0.2)

    class Unsteady(Plain):
        def honest(self, q, k, v):
            time.sleep(0.002 * (self.calls % 3))
            return super().honest(q, k, v)

    start = time.perf_counter()
    assert isinstance(open_cell(worker, Unsteady()), Ready)
    assert time.perf_counter() - start < 60, "it would go on for ever"
