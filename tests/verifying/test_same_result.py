"""Two results of one implementation: what rounding explains, and what is another result."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import frameworks
from attnbench.verifying import tolerance
from attnbench.verifying.tolerance import Apart, Limits, apart, spot

NUMPY = frameworks.get("numpy")
HALF = Limits(relative=9e-3, largest=0.02, row=0.14)
"""About what an output in bfloat16 is allowed."""


@pytest.fixture
def good():
    return np.random.default_rng(0).standard_normal((3, 40, 4, 16)).astype(np.float32)


def compared(got, good, limits=HALF):
    return apart(NUMPY, got, good, limits, "bfloat16")


@pytest.fixture(params=[1 << 24, 1000, 100], ids=["one block", "by batch row", "by tokens"], autouse=True)
def block(request, monkeypatch):
    monkeypatch.setattr(tolerance, "BLOCK_ELEMENTS", request.param)


def test_other_rounding_is_the_same_result(good):
    noise = np.random.default_rng(1).uniform(-1, 1, good.shape)
    assert compared(good * (1 + 2**-7 * noise).astype(np.float32), good) is None
    assert compared(good, good) is None


@pytest.mark.parametrize("place", [(0, 0, 0), (2, 39, 3), (1, 17, 2)])
@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_row_that_was_left_out_is_found_with_its_place(good, place, value):
    got = good.copy()
    got[place] = value
    found = compared(got, good)
    assert found is not None
    assert found.place == place
    batch, token, head = place
    assert spot(found, "bshd") == f"batch {batch}, head {head}, row {token}"
    assert spot(found, "bhsd") == f"batch {batch}, head {token}, row {head}"


def test_a_typical_row_is_missed_however_wide_the_limits_of_small_ones_are(good):
    good[:, ::2] *= 0.01
    got = good.copy()
    got[1, 7, 2] = 0
    wide = Limits(relative=0.1, largest=1.0, row=1.0)
    assert compared(got, good, wide).place == (1, 7, 2)
    got = good.copy()
    got[1, 8, 2] = 0
    assert compared(got, good, wide) is None, "as small as the rounding that these limits allow"


def test_one_element_is_found_by_its_size(good):
    good[0, 3, 1, 5] = 50
    got = good.copy()
    got[0, 3, 1, 5] = 45
    found = compared(got, good, Limits(relative=1.0, largest=0.02, row=0.1))
    assert found.place == (0, 3, 1)
    assert found.share == pytest.approx(0.1)


def test_one_batch_row_that_is_off_by_little_everywhere_is_found(good):
    got = good.copy()
    got[1] *= 1.05
    found = compared(got, good)
    assert found == Apart((1,), pytest.approx(0.05, rel=1e-3), pytest.approx(4 * HALF.relative))


def test_an_approximate_result_is_held_to_the_whole_alone(good):
    declared = Limits(0.05, float("inf"), float("inf"))
    got = good.copy()
    got[1, 7, 2] = 0
    assert compared(got, good, declared) is None
    assert compared(0 * good, good, declared) is not None


@pytest.mark.parametrize("shape", [(), (6,), (5, 6), (3, 5, 6)])
def test_arrays_of_any_rank(shape):
    good = np.full(shape, 2.0, np.float32)
    assert compared(good, good) is None
    assert compared(good * 0, good) is not None
    assert compared(good * 0, good * 0) is None
