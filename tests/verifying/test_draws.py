"""Which heads and rows are compared, what that is as a share, and gradients proved on a smaller shape."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from attnbench import frameworks, masks, registry
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload
from attnbench.verifying import draws as module
from attnbench.verifying.draws import EDGE_ROWS, MAX_HEADS, SETS, Draws
from attnbench.workloads.suites import TOKENS

SMALL = Workload(batch=2, q_len=64, heads=4, kv_heads=2, head_dim=16, mask=masks.causal())
LARGE = Workload(batch=8, q_len=8192, heads=32, kv_heads=8, head_dim=128, mask=masks.causal())


def draws_of(workload, seed=0, framework="numpy"):
    return Draws(frameworks.get(framework), "cpu", workload, seed)


def test_a_small_workload_is_compared_whole():
    sample = draws_of(SMALL).sample
    assert sample.heads == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert sample.rows.tolist() == list(range(64))
    assert sample.share == 1.0
    assert draws_of(SMALL).gradient_heads == sample.heads


def test_a_large_workload_is_sampled_within_the_budget():
    sample = draws_of(LARGE).sample
    assert len(sample.heads) == MAX_HEADS
    assert all(0 <= b < 8 and 0 <= g < 8 for b, g in sample.heads)
    assert len(set(sample.heads)) == MAX_HEADS
    rows = sample.rows
    assert len(np.unique(rows)) == len(rows)
    assert (np.diff(rows) > 0).all()
    assert sample.share == pytest.approx(len(rows) * MAX_HEADS / (8 * 8 * 8192))
    work = len(rows) * MAX_HEADS * LARGE.group * LARGE.kv_len * 4 * LARGE.head_dim
    extra = len(EDGE_ROWS) + 2
    assert work <= module.FORWARD_FLOPS["cpu"] * (1 + extra / (len(rows) - extra) + 0.01)
    assert work > 0.5 * module.FORWARD_FLOPS["cpu"], "a budget is there to be used"


@pytest.mark.parametrize("seed", range(5))
def test_the_edges_are_always_among_the_rows(seed):
    rows = set(draws_of(LARGE, seed).sample.rows.tolist())
    assert {*EDGE_ROWS, LARGE.q_len // 2, LARGE.q_len - 1} <= rows


def test_rows_and_heads_are_fresh_for_every_seed():
    samples = [draws_of(LARGE, seed).sample for seed in range(8)]
    assert len({sample.heads for sample in samples}) > 4
    assert len({tuple(sample.rows) for sample in samples}) == 8
    again = draws_of(LARGE, 3).sample
    assert again.heads == samples[3].heads
    assert (again.rows == samples[3].rows).all()


def test_even_one_huge_row_is_looked_at():
    workload = Workload(batch=1, q_len=1, kv_len=1 << 20, heads=64, kv_heads=1, head_dim=256)
    assert draws_of(workload).sample.rows.tolist() == [0]


def test_input_sets_differ_and_follow_the_seed():
    first, other = (draws_of(SMALL, seed).inputs("bshd") for seed in (1, 2))
    assert len(first) == SETS
    arrays = [inputs.q for inputs in (*first, *other)]
    assert not any((a == b).any() for n, a in enumerate(arrays) for b in arrays[:n]), "fresh normals never repeat"
    assert (draws_of(SMALL, 1).inputs("bshd")[0].v == first[0].v).all()


def test_layouts_hold_the_same_numbers():
    draws = draws_of(SMALL)
    for a, b in zip(draws.inputs("bshd")[1], draws.inputs("bhsd")[1]):
        assert b.flags.c_contiguous
        np.testing.assert_array_equal(a, b.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("which", ["pointed", "counted", "zeros", "scaled by 10", SETS])
@pytest.mark.parametrize("inputs", ["normal", "structured"])
def test_a_call_that_writes_into_its_inputs_changes_no_truth(which, inputs):
    draws = draws_of(replace(SMALL, inputs=inputs))
    given = draws.probe(which, "bshd")
    before = [array.copy() for array in given]
    for array in given:
        array[...] = 0
    for kept in (draws.probe(which, "bshd"), draws.input_set(which)):
        assert all(np.array_equal(a, b) for a, b in zip(kept, before))
    assert draws.intact("bshd")


@pytest.mark.parametrize("gradients", [False, True])
def test_a_sampled_truth_is_part_of_the_whole_truth(gradients, monkeypatch):
    whole = draws_of(SMALL)
    truths = dict(zip(whole.sample.heads, whole.truths(1, gradients)))
    monkeypatch.setitem(module.FORWARD_FLOPS, "cpu", 4e5)
    monkeypatch.setitem(module.BACKWARD_FLOPS, "cpu", 1e6 * 3)
    part = draws_of(SMALL)
    heads = part.gradient_heads if gradients else part.sample.heads
    rows = np.arange(64) if gradients else part.sample.rows
    assert len(heads) < 4 or len(rows) < 64
    for head, truth in zip(heads, part.truths(1, gradients)):
        np.testing.assert_allclose(truth.out, truths[head].out[:, rows], rtol=0, atol=1e-14)
        np.testing.assert_allclose(truth.lse, truths[head].lse[:, rows], rtol=0, atol=1e-14)
        if gradients:
            for a, b in zip(truth.grads, truths[head].grads):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    worker = Local("numpy", None)
    yield worker
    worker.kill()


def test_a_record_says_what_share_was_compared(worker, monkeypatch):
    monkeypatch.setitem(module.FORWARD_FLOPS, "cpu", 2e6)
    monkeypatch.setitem(module.WHOLE_PAIRS, "cpu", (1, 1))
    workload = Workload(batch=4, q_len=300, heads=4, head_dim=16)
    record = worker.ask(p.Open(Cell("numpy.float32", workload), False, False, None, 1), 60).record
    sample = draws_of(workload, 1).sample
    assert record.verified_at.share == sample.share == MAX_HEADS * len(sample.rows) / (4 * 4 * 300)
    assert record.verified_at.share < 0.25
    assert record.verified_at.shape["q_len"] == 300
    assert record.verified_at.backward_shape is None


def test_gradients_that_fit_in_part_are_compared_there(worker, monkeypatch):
    workload = Workload(batch=2, q_len=96, heads=4, head_dim=16, pass_="train")
    monkeypatch.setitem(module.BACKWARD_FLOPS, "cpu", 2 * 10 * 32 * 96 * 96)
    monkeypatch.setitem(module.WHOLE_PAIRS, "cpu", (1, 1))
    record = worker.ask(p.Open(Cell("numpy.float32", workload), False, False, None, 1), 60).record
    assert record.verified_at.backward_share == 2 / 8
    assert record.verified_at.backward_shape["q_len"] == 96


def test_gradients_that_do_not_fit_are_proved_on_a_smaller_shape(worker, monkeypatch):
    workload = Workload(batch=1, q_len=2 * TOKENS, heads=2, head_dim=8, mask=masks.causal(), pass_="train")
    monkeypatch.setitem(module.BACKWARD_FLOPS, "cpu", 10 * 16 * TOKENS * TOKENS * 2)
    record = worker.ask(p.Open(Cell("numpy.float32", workload), False, False, None, 1), 60).record
    assert record.status == "ok", record
    assert record.verified_at.shape["q_len"] == 2 * TOKENS
    assert record.verified_at.backward_shape["q_len"] == TOKENS
    assert record.verified_at.backward_share == 1.0
    assert 0 < record.errors.backward < record.errors.backward_allowed


def test_a_gradient_that_is_wrong_on_the_smaller_shape_is_caught(worker, monkeypatch):
    class Subject(type(registry.get("numpy.float32"))):
        def build(self, workload, config):
            call = super().build(workload, config)
            honest = call.vjp
            call.vjp = lambda *arrays: tuple(1.1 * g for g in honest(*arrays))
            return call

    registry.register(Subject("subject", np.float32, "A variant of the reference."))
    workload = Workload(batch=1, q_len=2 * TOKENS, heads=2, head_dim=8, pass_="train")
    monkeypatch.setitem(module.BACKWARD_FLOPS, "cpu", 10 * 16 * TOKENS * TOKENS * 2)
    record = worker.ask(p.Open(Cell("subject", workload), False, False, None, 1), 60).record
    assert record.status == "incorrect"
    assert "gradient of Q" in record.reason


def test_whole_outputs_are_covered_as_far_as_the_budget_goes(monkeypatch):
    draws = draws_of(SMALL)
    assert draws.covered(False) == draws.covered(True)
    assert draws.covered(False).share == 1.0
    low, high = draws.reach
    per_head = int((high - low).sum()) * SMALL.group
    monkeypatch.setitem(module.WHOLE_PAIRS, "cpu", (4 * per_head, 2 * per_head - 2))  # half of it in float64
    draws = draws_of(SMALL)
    assert len(draws.covered(False).heads) == 2
    assert draws.covered(False).share == 0.5
    assert draws.covered(True).heads == ()
    monkeypatch.setitem(module.WHOLE_PAIRS, "cpu", (per_head, 1))
    covered = draws_of(SMALL).covered(False)
    assert len(covered.rows) == 32
    assert covered.share == 0.125
    [(heads, part)] = draws_of(SMALL).whole("first", False)
    every = dict(zip(draws_of(SMALL).sample.heads, draws_of(SMALL).truths(0, False)))
    assert heads == covered.heads
    np.testing.assert_allclose(part.out[0], every[heads[0]].out[:, covered.rows], rtol=0, atol=2e-6)


@pytest.mark.parametrize("gradients", [False, True])
def test_heads_in_pieces_are_the_heads_at_once(monkeypatch, gradients):
    [(heads, at_once)] = draws_of(SMALL).whole("first", gradients)
    per_head = SMALL.q_len * SMALL.kv_len * SMALL.group
    for size in (1, 3):
        monkeypatch.setattr(module.reference, "BLOCK_PAIRS", size * per_head)
        pieces = list(draws_of(SMALL).whole("first", gradients))
        assert [len(some) for some, _ in pieces] == [size] * (len(heads) // size) + [len(heads) % size] * bool(
            len(heads) % size
        )
        assert sum((some for some, _ in pieces), ()) == heads
        out = np.concatenate([part.out for _, part in pieces])
        np.testing.assert_allclose(out, at_once.out, rtol=0, atol=2e-6)
        if gradients:
            for n in range(3):
                grads = np.concatenate([part.grads[n] for _, part in pieces])
                np.testing.assert_allclose(grads, at_once.grads[n], rtol=0, atol=2e-5)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_on_an_accelerator_the_batch_rows_are_turned_copies_of_one(framework, monkeypatch):
    fw = frameworks.get(framework)
    monkeypatch.setattr(fw, "array", lambda values, dtype, device, make=fw.array: make(values, dtype, "cpu"))
    workload = Workload(batch=3, q_len=8, heads=2, kv_heads=1, head_dim=4, pass_="train")
    inputs, again = (Draws(fw, "elsewhere", workload, 5).inputs("bshd")[0] for _ in range(2))
    for array, same, heads in zip(inputs, again, (2, 1, 1, 2)):
        values = fw.numpy(array)
        assert values.shape == (3, 8, heads, 4)
        assert np.array_equal(values, fw.numpy(same))
        assert len({row.tobytes() for row in values}) == 3
        twice = np.concatenate([values[0].ravel()] * 2)
        starts = np.lib.stride_tricks.sliding_window_view(twice, values[0].size)
        assert all((starts == row.ravel()).all(axis=1).any() for row in values)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_on_an_accelerator_a_long_sequence_is_one_stretch_again_and_again_from_other_places(framework, monkeypatch):
    fw = frameworks.get(framework)
    monkeypatch.setattr(fw, "array", lambda values, dtype, device, make=fw.array: make(values, dtype, "cpu"))
    monkeypatch.setattr(module, "HOST_VALUES", 32)
    workload = Workload(batch=2, q_len=10, heads=2, kv_heads=1, head_dim=4, pass_="train")
    for array, heads, tokens in zip(Draws(fw, "elsewhere", workload, 5).inputs("bshd")[0], (2, 1, 1, 2), (4, 8, 8, 4)):
        values = fw.numpy(array)
        assert values.shape == (2, 10, heads, 4)
        assert len(np.unique(values)) == tokens * heads * 4  # the values of one stretch, and no others
        stretches = [row[:tokens] for row in values] + [row[tokens : 2 * tokens] for row in values if tokens == 4]
        assert len({stretch.tobytes() for stretch in stretches}) == len(stretches)
        assert array.is_contiguous() if framework == "torch" else array.flags.c_contiguous
