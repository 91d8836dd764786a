"""Truths that workers share: computed once, never taken for other inputs, never half written."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from attnbench.verifying.truths import SharedResults, Truth

PROOF = np.arange(4.0)


def truth(value, gradients=True):
    out, lse = np.full((2, 3, 4), value), np.full((2, 3), value)
    grads = (out, out[0] + 1, out[0] + 2) if gradients else None
    return Truth(out, lse, out + 0.5, lse + 0.5, grads, grads)


def refuse():
    raise AssertionError("computed again")


@pytest.mark.parametrize("gradients", [True, False])
def test_the_second_reads_what_the_first_computed(tmp_path, gradients):
    first = SharedResults(tmp_path).get("a", PROOF, lambda: [truth(1.0, gradients), truth(2.0, gradients)])
    second = SharedResults(tmp_path).get("a", PROOF, refuse)
    assert len(second) == len(first) == 2
    for mine, theirs in zip(first, second):
        assert (mine.grads is None) == (theirs.grads is None) == (not gradients)
        pairs = zip((*mine[:4], *(mine.grads or ())), (*theirs[:4], *(theirs.grads or ())))
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_other_inputs_have_other_truths(tmp_path):
    SharedResults(tmp_path).get("a", PROOF, lambda: [truth(1.0)])
    [found] = SharedResults(tmp_path).get("a", PROOF + 1, lambda: [truth(3.0)])
    assert found.out[0, 0, 0] == 3.0


def test_without_a_folder_everybody_computes():
    assert SharedResults(None).get("a", PROOF, list) == []


def test_one_that_fails_leaves_the_work_to_the_next(tmp_path):
    with pytest.raises(MemoryError):
        SharedResults(tmp_path).get("a", PROOF, lambda: (_ for _ in ()).throw(MemoryError()))
    [found] = SharedResults(tmp_path).get("a", PROOF, lambda: [truth(4.0)])
    assert found.out[0, 0, 0] == 4.0


def test_the_others_wait_for_the_first(tmp_path):
    started, release, seen = threading.Event(), threading.Event(), []

    def slow():
        started.set()
        release.wait(10)
        return [truth(5.0)]

    first = threading.Thread(target=lambda: SharedResults(tmp_path).get("a", PROOF, slow))
    second = threading.Thread(target=lambda: seen.extend(SharedResults(tmp_path).get("a", PROOF, refuse)))
    first.start()
    started.wait(10)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    release.set()
    first.join(10)
    second.join(10)
    assert seen[0].out[0, 0, 0] == 5.0
