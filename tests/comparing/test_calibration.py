"""The fine print of a comparison says what was measured, and nothing that was not."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import compare_calibration
import gate_factory
import pytest
from rich.console import Console

from attnbench.comparing import text
from attnbench.comparing.text import print_comparison

RESULTS = Path(__file__).parents[2] / "results" / "cpu"
LINE = {"device": "a CPU", "cores": 2, "threads": None, "framework": "torch", "packages": {"torch": "2"}}


def lines(condition: str, effect: str, **verdicts: int) -> list[dict]:
    made = [verdict for verdict, count in verdicts.items() for _ in range(count)]
    return [LINE | {"condition": condition, "effect": effect, "verdict": verdict} for verdict in made]


def printed(verdict: str) -> str:
    console = Console(file=StringIO(), width=400)
    print_comparison(console, gate_factory.comparison(verdict, 1.06))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_the_package_cites_is_the_summary_of_what_was_measured():
    out = RESULTS / "compare_calibration.jsonl"
    assert json.loads(text.CALIBRATION.read_text()) == compare_calibration.summary(compare_calibration.read(out))
    if out.exists():
        assert out.with_suffix(".summary.json").read_text() == text.CALIBRATION.read_text()


def test_wrong_ones_are_counted_with_their_bound():
    found = [*lines("idle", "same", same=297, slower=1, inconclusive=2), *lines("busy", "+5 %", slower=9, same=1)]
    busy, idle = compare_calibration.summary([*found, LINE | {"verdict": None}])
    assert (idle["comparisons"], idle["wrong"], busy["comparisons"], busy["wrong"]) == (300, 1, 10, 1)
    assert idle["at_most"] == pytest.approx(0.0157, abs=1e-4)
    assert idle["verdicts"] == {"inconclusive": 2, "same": 297, "slower": 1}


def test_a_verdict_says_how_often_such_were_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "CALIBRATION", tmp_path / "calibration.json")
    text.CALIBRATION.write_text("[]")
    assert "has not been measured for this version" in printed("slower")
    rows = compare_calibration.summary([*lines("idle", "same", same=300), *lines("busy", "same", same=299, faster=1)])
    text.CALIBRATION.write_text(json.dumps(rows))
    told = printed("slower")
    assert "0 of 300 on an idle machine (at most 0.99 %, 95 % confidence) and in 1 of 300 beside a busy process" in told
    assert "measured on a CPU, 2 cores." in told
    assert "called slower or faster in" not in printed("same")


def test_the_next_call_goes_on_with_what_was_measured_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, asked = tmp_path / "deep" / "out.jsonl", []
    monkeypatch.setattr(text, "CALIBRATION", tmp_path / "packaged.json")
    monkeypatch.setattr(compare_calibration, "CALIBRATION", tmp_path / "packaged.json")
    monkeypatch.setattr(compare_calibration, "PUBLISHED", out)

    def compare(a: str, b: str, *given: object, **named: object):
        assert Path(a.partition(":")[0]).exists()
        asked.append(" ".join(Path(b.partition(":")[0]).with_suffix("").parts[-2:]))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return gate_factory.comparison("same")

    monkeypatch.setattr(compare_calibration, "compare", compare)
    words = ["calibrate", "--minutes", "9", "--count", "1", "--condition", "idle", "-o", str(out)]
    monkeypatch.setattr("sys.argv", words)
    compare_calibration.main()
    assert asked == ["torch same", "torch +5 %"]
    monkeypatch.setattr("sys.argv", [*words[:4], "2", *words[5:]])
    compare_calibration.main()
    assert asked == ["torch same", "torch +5 %", "numpy same"], "stopped by Ctrl-C"
    assert len(out.read_text().splitlines()) == 2
    assert json.loads((tmp_path / "packaged.json").read_text())[0]["comparisons"] == 1
    monkeypatch.setattr("sys.argv", ["calibrate", "-o", str(tmp_path / "other.jsonl")])
    compare_calibration.main()
    assert json.loads((tmp_path / "packaged.json").read_text()), "another file is not cited"
