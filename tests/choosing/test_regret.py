"""Regret of a policy, and of one implementation for everything, on what was measured."""

from __future__ import annotations

import pytest
from length_factory import along
from policy_factory import entry, policy
from record_factory import CPU

from attnbench.choosing.candidates import Ground, Source
from attnbench.choosing.choose import choose
from attnbench.choosing.regret import fixed_losses, policy_loss

LENGTHS = (128, 512, 2048)


@pytest.fixture
def ground() -> Ground:
    eager = along("torch.eager", lambda n: 10.0 * n, LENGTHS, environment=CPU)
    sdpa = along("torch.sdpa", lambda n: 4000.0 + 2 * n, LENGTHS[1:], seed=1, environment=CPU)
    (found,) = choose([Source("run", "", [*eager, *sdpa])]).grounds
    return found


def test_one_for_everything(ground: Ground):
    eager, sdpa = fixed_losses(ground)
    assert (eager.name, sdpa.name) == ("torch.eager", "torch.sdpa")
    assert eager.regret is not None
    assert (eager.regret.shapes, eager.regret.missed) == (3, 0)
    assert eager.regret.worst == pytest.approx(20480 / 8096, rel=0.02)
    assert eager.regret.worst_at.startswith("1 x 2048 tokens")
    assert sdpa.regret is not None
    assert (sdpa.regret.shapes, sdpa.regret.missed) == (2, 1)
    assert sdpa.regret.mean == pytest.approx(1, abs=0.02)


def test_a_policy_on_shapes_it_has_not_seen(ground: Ground):
    found = policy_loss(policy(entry("torch.eager", 256), entry("torch.sdpa", 1024)), ground).regret
    assert found is not None
    assert (found.shapes, found.missed) == (3, 0)
    assert found.mean == pytest.approx(1, abs=0.02)
    wrong = policy_loss(policy(entry("torch.eager", 1024)), ground).regret
    assert wrong is not None
    assert (wrong.shapes, wrong.missed) == (2, 1)
    assert wrong.worst == pytest.approx(20480 / 8096, rel=0.02)


def test_a_policy_that_does_not_hold_there(ground: Ground):
    other = policy(entry("torch.eager", 256), device_name="Another CPU")
    assert policy_loss(other, ground).regret is None
