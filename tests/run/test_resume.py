"""What a run was asked for and did not come to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from page_factory import source, timed
from record_factory import workload

from attnbench.run.launch import Request
from attnbench.run.recorder import describe_unreached, store_request, unreached

pytest.importorskip("altair")
from attnbench.report.html.page import compose, render
from attnbench.results.run_file import NamedRun


def asked(*lengths: int, held: tuple[int, ...], request: object = None, name: str = "run.jsonl") -> NamedRun:
    """A run that was asked for some lengths and holds others."""
    found = source(*(timed("torch.sdpa", 1e6, n) for n in held), name=name)
    workloads = [msgspec.to_builtins(workload(n)) for n in lengths] if request is None else request
    header = msgspec.structs.replace(found.run.header, request={"workloads": workloads})
    return NamedRun(name, msgspec.structs.replace(found.run, header=header))


def test_what_was_asked_for_and_is_not_there():
    run = asked(128, 256, 512, held=(256,)).run
    assert unreached(run) == [workload(128).id, workload(512).id]
    assert unreached(run, {workload(512).id}) == [workload(128).id]


def test_the_sentence_says_how_to_go_on():
    sentence = describe_unreached("a.jsonl", asked(*range(64, 72), held=(64,)).run)
    assert sentence is not None
    assert sentence.startswith("a.jsonl ended before 7 of its 8 shapes")
    assert "and 4 more" in sentence
    assert "attnbench run --resume a.jsonl" in sentence


def test_a_whole_run_says_nothing():
    assert describe_unreached("a.jsonl", asked(128, held=(128,)).run) is None
    assert describe_unreached("a.jsonl", source(timed("torch.sdpa", 1e6)).run) is None


@pytest.mark.parametrize("request_", ["words", [{"kind": "attention", "batch": -1}], [3]])
def test_a_header_that_cannot_be_read_asks_for_nothing(request_: object):
    assert unreached(asked(held=(128,), request=request_).run) == []


def test_the_page_tells_it_once_and_not_of_what_another_run_holds():
    parts = [asked(128, 256, held=(128,), name="first.jsonl"), asked(128, 256, 512, held=(256,), name="second.jsonl")]
    page = compose(parts)
    assert len(page.left) == 1
    assert page.left[0].startswith("second.jsonl ended before 1 of its 3 shapes")
    assert "second.jsonl ended before" in render(page)


def test_only_what_a_header_can_hold_is_stored(tmp_path: Path):
    request = Request(workloads=(workload(128),), implementations=("torch.sdpa",), trace=tmp_path)
    assert store_request(request)["trace"] == str(tmp_path)
    with pytest.raises(TypeError):
        store_request(msgspec.structs.replace(request, implementations=(max,)))
