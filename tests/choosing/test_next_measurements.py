"""What `tune` measures next."""

from __future__ import annotations

from length_factory import along
from record_factory import named_run

from attnbench import masks
from attnbench.choosing.choose import Chosen, choose
from attnbench.choosing.next_measurements import batch, proposals
from attnbench.spec import Record

SLOW = {"name": "torch.eager", "ns": lambda n: 10.0 * n}
FAST = {"name": "torch.sdpa", "ns": lambda n: 4000.0 + 2 * n, "seed": 1}


def made(*records: list[Record]) -> Chosen:
    return choose([named_run("run", "", [one for part in records for one in part])])


def none(name: str, workload: object) -> list[str]:
    del name, workload
    return []


def test_the_middle_in_log_space_of_neighbours_that_differ():
    (one,) = proposals(made(along(**SLOW, lengths=(128, 2048)), along(**FAST, lengths=(128, 2048))), none)
    assert (one.workload.q_len, one.workload.kv_len) == (512, 512)
    assert one.labels == ("torch.eager", "torch.sdpa")
    assert one.why == "torch.eager at 128 tokens, torch.sdpa at 2,048"


def test_it_closes_in_on_the_crossing_and_stops():
    """Both take as long at 750 tokens."""
    lengths, asked = [128, 4096], []
    fast = FAST | {"ns": lambda n: 6000.0 + 2 * n}
    while found := proposals(made(along(**SLOW, lengths=lengths), along(**fast, lengths=lengths)), none):
        asked.append(found[0].workload.q_len)
        lengths = sorted({*lengths, asked[-1]})
    assert asked[0] == 704
    assert min(abs(n - 750) for n in lengths) <= 50
    assert len(asked) <= 5


def test_where_the_choice_is_one_nothing_is_proposed():
    same = along("torch.eager", lambda n: 10.0 * n), along("torch.sdpa", lambda n: 5.0 * n, seed=1)
    assert proposals(made(*same), none) == []


def test_lengths_that_no_entry_reaches_are_proposed():
    lengths = [16, 1024]

    def found():
        same = (
            along("torch.eager", lambda n: 10.0 * n, lengths),
            along("torch.sdpa", lambda n: 5.0 * n, lengths, seed=1),
        )
        return proposals(made(*same), none)

    (one,) = found()
    assert (one.workload.q_len, one.labels) == (128, ("torch.sdpa", "torch.eager"))
    assert one.why == "no entry reaches all lengths from 16 to 1,024 tokens"
    lengths.insert(1, 128)
    assert found() == []


def test_crossings_come_before_lengths_that_no_entry_reaches():
    lengths = (64, 128, 128 * 64)
    crossing = along("torch.eager", lambda n: 10.0 * n, lengths), along("torch.sdpa", lambda n: 700.0 + n, lengths)
    (one,) = proposals(made(*crossing), none)
    assert one.workload.q_len < 128


def test_the_dearest_mistake_comes_first():
    records = []
    for heads, factor in ((2, 1.0), (4, 3.0)):
        shape = {"heads": heads}
        records += along("torch.eager", lambda n: 10.0 * n, (128, 2048), shape=shape)
        records += along("torch.sdpa", lambda n, f=factor: 3000.0 * f + 2 * n, (128, 2048), seed=1, shape=shape)
    found = proposals(made(records), none)
    assert [one.workload.heads for one in found] == [4, 2]
    assert found[0].gain > found[1].gain
    assert batch(found) == found


def test_masks_that_hold_arrays_are_not_resized():
    shape = {"mask": masks.lengths([100])}
    slow, fast = along(**SLOW, lengths=(128, 2048), shape=shape), along(**FAST, lengths=(128, 2048), shape=shape)
    assert proposals(made(slow, fast), none) == []


def test_then_configs_of_whoever_might_lead():
    def configs(name: str, workload: object) -> list[str]:
        del workload
        return [f"{name}[block=64]"] if name != "torch.eager" else []

    near = along("torch.flex", lambda n: 6.0 * n, (512,)), along("torch.sdpa", lambda n: 5.0 * n, (512,), seed=1)
    far = along("torch.far", lambda n: 50.0 * n, (512,)), along("torch.eager", lambda n: 7.0 * n, (512,))
    (one,) = proposals(made(*near, *far), configs)
    assert one.labels == ("torch.sdpa", "torch.flex", "torch.eager", "torch.sdpa[block=64]", "torch.flex[block=64]")
    assert one.why == "configs of torch.sdpa, torch.flex"
