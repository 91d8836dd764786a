"""`ab.attention` from many threads at once: right answers, one warning, and torch's SDPA flags as they were."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from dispatch_problem import assert_close, entry, here, problem, to_framework

import attnbench as ab
from attnbench.dispatch.plan import PLANS
from attnbench.errors import PolicyWarning

pytestmark = pytest.mark.torch
THREADS = 8
MASKS = [None, ab.masks.causal(), ab.masks.window(5), ab.masks.lengths([0, 17]), ab.masks.prefix(4)]


@pytest.fixture(autouse=True)
def _many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work):
    """Run work(number) in all threads, started at once; the first exception is raised."""
    barrier = Barrier(THREADS)

    def run(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_a_race_of_first_calls_gives_right_answers_everywhere():
    known = [problem(kv_heads=2, mask=mask) for mask in MASKS]

    def work(number):
        for step in range(40):
            index = (number + step) % len(MASKS)
            _, drawn, (out, lse) = known[index]
            arrays = to_framework("torch", *drawn[:3])
            got, got_lse = ab.attention(*arrays, mask=MASKS[index], return_lse=True)
            assert_close(got, out)
            assert_close(got_lse, lse)
            if step % 10 == number:
                PLANS.clear()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        together(work)
    assert sum(issubclass(one.category, PolicyWarning) for one in seen) == 1


def test_pinned_backends_do_not_disturb_each_other_or_stay():
    import torch

    names = ("flash", "mem_efficient", "math", "cudnn")
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names]
    _, drawn, (out, _) = problem(mask=ab.masks.causal())
    arrays = to_framework("torch", *drawn[:3])
    impls = ("torch.sdpa-flash", "torch.sdpa-math", "torch.sdpa")

    def work(number):
        for step in range(60):
            impl = impls[(number + step) % len(impls)]
            assert_close(ab.attention(*arrays, mask=ab.masks.causal(), impl=impl), out)

    together(work)
    assert [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names] == before


def test_a_failure_inside_a_pin_gives_it_back():
    import torch

    from attnbench.impls.torch._sdpa_pins import Pinned

    def fail():
        with Pinned("flash"):
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert torch.backends.cuda.math_sdp_enabled()
    together(lambda number: [_turn(Pinned("math" if number % 2 else "flash")) for _ in range(50)])
    assert torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def _turn(pin):
    import torch

    with pin:
        assert torch.backends.cuda.math_sdp_enabled() != torch.backends.cuda.flash_sdp_enabled()


def test_a_policy_holds_for_its_own_thread_only():
    arrays = to_framework("torch", *[x[:1, :, :] for x in problem()[1][:3]])
    mask = ab.masks.causal()
    chosen = here(entry("torch.eager", tokens=24))

    def work(number):
        picks = []
        for _ in range(20):
            if number % 2:
                with ab.use_policy(chosen):
                    picks.append(ab.explain(*arrays, mask=mask).pick)
                    ab.attention(*arrays, mask=mask)
            else:
                picks.append(ab.explain(*arrays, mask=mask).pick)
        return set(picks)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = together(work)
    assert found == [{"torch.eager"} if number % 2 else {"torch.sdpa-flash"} for number in range(THREADS)]
