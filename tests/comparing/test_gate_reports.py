"""What people see of comparisons and gates: terminal, Markdown, annotations, JUnit, and the files a CI job keeps."""

from __future__ import annotations

import html
import io
import re
import xml.etree.ElementTree as ET

import gate_factory
import msgspec
import pytest
from gate_factory import case, comparison, controls, report
from record_factory import workload
from rich.console import Console

from attnbench.comparing.ci_files import command, junit, workflow_commands, write_ci
from attnbench.comparing.gate_text import LIMIT, MARKER, clean, markdown, print_gate
from attnbench.comparing.text import print_comparison, sentence
from attnbench.comparison import Control, GateReport
from attnbench.errors import UsageError

EVIL = "x|y `z` <script>alert(1)</script> @octocat #12 [a](b) **c** \\ 50%\n::error::gotcha\r\x1b[31m\x00\ud800"
EVERYTHING = report(
    case("pass"),
    case("not_measured", "torch.fa4", reason="needs cuda"),
    case("improved", "torch.flex"),
    case("inconclusive", "jax.xla"),
    case("memory", "torch.fa3"),
    case("wrong", "mine", reason="gradient of K: 14 x the error allowed"),
    case("regression", "torch.dilated", culprit="3f2c1ab"),
    outcome="fail",
    warnings=("underpowered: the +5 % control was not detected",),
)


def text_of(show, *arguments, **options) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=200), *arguments, **options)
    return stream.getvalue()


# comparisons


def test_the_sentence_answers_the_question():
    told = sentence(comparison("faster", 0.704, cpu=0.71))
    assert told == (
        "torch.sdpa is 1.42x faster than torch.eager (wall 0.704, 0.694-0.714; cpu 0.710, 0.700-0.720) "
        "· 8 launches, 14.0 s, could have seen 2.6 %"
    )


def test_a_slowdown_that_only_cpu_time_shows_is_told_by_cpu_time():
    assert "torch.sdpa is 1.060x slower than torch.eager by cpu time (" in sentence(comparison("slower", 1.0, cpu=1.06))
    assert "by cpu time" not in sentence(comparison("slower", 1.06, cpu=1.06))


def test_what_was_not_timed_has_a_reason_and_no_figures():
    told = sentence(comparison(None, reason="torch.sdpa is wrong from row 7 on"))
    assert told == "torch.sdpa was not compared with torch.eager: torch.sdpa is wrong from row 7 on"
    assert "could have seen" not in text_of(print_comparison, comparison(None, reason="no"))


@pytest.mark.parametrize(
    ("verdict", "claim"),
    [("same", "torch.sdpa is as fast as torch.eager ("), ("inconclusive", "inconclusive whether torch.sdpa is slower")],
)
def test_other_verdicts(verdict: str, claim: str):
    assert sentence(comparison(verdict)).startswith(claim)


def test_two_commits_of_one_implementation_are_told_apart():
    told = sentence(comparison(a="torch.sdpa", commit_a="1" * 40, commit_b="2" * 40))
    assert told.startswith(f"torch.sdpa @ {'2' * 12} is as fast as torch.sdpa @ {'1' * 12}")
    assert "@" not in sentence(comparison(a="torch.sdpa", commit_a="1" * 40, commit_b="1" * 40))
    assert "@" not in sentence(comparison(a="torch.sdpa at main", commit_a="1" * 40, commit_b="2" * 40))


def test_a_stored_comparison_counts_no_launches():
    anchors = {name: gate_factory.estimate(name, 1.2, launches=0) for name in ("anchor.matmul", "anchor.copy")}
    stored = comparison("slower", 1.21, estimates=anchors, elapsed_s=0.0)
    assert sentence(stored).startswith("torch.sdpa is 1.21x slower than torch.eager (anchor.matmul 1.200,")
    assert sentence(stored).endswith(") · could have seen 2.6 %")


def test_an_endless_interval_is_no_promise():
    endless = gate_factory.estimate(
        "wall", 1.4, interval=(0.0, 1.7e21), t_interval=(0.0, float("inf")), detectable=5e21
    )
    told = text_of(print_comparison, comparison("inconclusive", estimates={"wall": endless}))
    assert "(wall 1.400, 0.000-1000+)" in told
    assert "000000" not in told
    assert "inf" not in told
    assert "could have seen" not in sentence(comparison("inconclusive", smallest_slowdown=float("inf")))


def test_the_terminal_shows_each_metric_and_the_sentence_last():
    lines = text_of(print_comparison, comparison("slower", 1.08, cpu=1.07, notes=("clocks [moved]",))).splitlines()
    assert any(line.split()[:2] == ["wall", "1.080"] for line in lines)
    assert any(line.split()[:2] == ["cpu", "1.070"] for line in lines)
    assert "note: clocks [moved]" in lines
    assert "1.080x slower" in lines[-1]


# the gate in the terminal


def test_the_gate_prints_the_worst_first_and_the_answer_last():
    lines = text_of(print_gate, EVERYTHING).splitlines()
    assert lines[0] == "attnbench gate · main -> HEAD · suite ci"
    assert lines[1].strip().startswith("controls: a/a same 1.000 (0.990-1.010) in 14.0 s ✓   +5 % slower 1.052")
    names = [line.split()[0] for line in lines[2:8]]
    assert names == ["torch.dilated", "mine", "torch.fa3", "jax.xla", "torch.flex", "torch.sdpa"]
    assert lines[8] == "  not measured: torch.fa4 (needs cuda)"
    assert "slower" in lines[2]
    assert "1.063 (1.053-1.073)" in lines[2]
    assert "confirmed on fresh launches; p = 0.0004 after Holm; since 3f2c1ab" in lines[2]
    assert "97.0 MB -> 112 MB (+15 %)" in lines[4]
    assert "after 8 launches, 14.0 s, could have seen 2.6 %" in lines[5]
    assert lines[-1].startswith(
        "1 regression, 1 wrong or broken, 1 case needs more memory, 1 inconclusive, 1 not measured"
    )
    assert lines[-1].endswith("in 7 cases (Holm, 1 %). Over all timed cases 1.004 (0.998-1.010). exit 1")


def test_a_clean_gate_says_so():
    text = text_of(print_gate, report(case(), case("improved")))
    assert text.splitlines()[-1].startswith("no regression, 1 improved in 2 cases (Holm, 1 %).")
    assert text.endswith("exit 0\n")


def test_an_untrusted_gate_names_the_control():
    text = text_of(print_gate, report(case(), outcome="untrusted", controls=controls(aa=False)))
    assert "a/a slower 1.040 (1.030-1.050) in 14.0 s ✗" in text
    assert "Untrusted: the a/a control failed, so no verdict here is valid" in text
    assert text.endswith("exit 5\n")


def test_nothing_measured():
    nothing = text_of(print_gate, report(case("not_measured"), outcome="nothing", geomean=None, controls=()))
    assert "Nothing could be measured" in nothing
    assert nothing.endswith("exit 3\n")


def test_untrusted_without_any_control():
    assert "Untrusted: no control could be timed" in text_of(print_gate, report(outcome="untrusted", controls=()))


def test_a_reason_that_came_with_the_case_is_not_said_twice():
    given = case("pass", first=comparison("slower", 1.05), second=comparison("same"), reason="slower once (1.05)")
    assert text_of(print_gate, report(given)).count("slower once") == 1
    assert "not confirmed" not in text_of(print_gate, report(given))


def test_what_was_not_measured_is_grouped_by_reason():
    missing = [case("not_measured", name, reason="needs cuda") for name in ("torch.fa3", "torch.fa4", "torch.fa3")]
    assert "  not measured: torch.fa3, torch.fa4 (needs cuda)\n" in text_of(print_gate, report(case(), *missing))


def test_an_unconfirmed_slowdown_is_a_pass_that_is_explained():
    unconfirmed = case("pass", first=comparison("slower", 1.05), second=comparison("same"))
    assert "slower once, not confirmed on fresh launches" in text_of(print_gate, report(unconfirmed))
    assert "not confirmed" in markdown(report(unconfirmed)).partition("<details>")[0]


def test_a_reason_cannot_start_a_line_of_the_log():
    reason = EVIL.replace("\ud800", "")
    text = text_of(print_gate, report(case("wrong", reason=reason), outcome="fail", warnings=(reason,)))
    assert not any(line.lstrip().startswith("::") for line in text.splitlines())


# Markdown


def test_markdown_starts_with_the_marker_and_the_verdict():
    lines = markdown(EVERYTHING).splitlines()
    assert lines[0] == MARKER
    assert lines[1].startswith("### ❌ attnbench: 1 regression, 1 wrong or broken")


def test_markdown_folds_the_passes_and_shows_the_rest():
    shown, _, folded = markdown(EVERYTHING).partition("<details>")
    assert [line.split("|")[2].strip() for line in shown.splitlines() if line.startswith("| **")] == [
        f"<code>{name}</code>" for name in ("torch.dilated", "mine", "torch.fa3", "jax.xla", "torch.flex")
    ]
    assert "<summary>1 passed, 1 not measured</summary>" in folded
    assert "needs cuda" in folded
    assert "Test CPU 9000 · torch 2.13.0" in folded
    for fact in ("<code>main</code> → <code>HEAD</code>", "control a/a same", "1.004 (0.998-1.010)", "underpowered"):
        assert fact in shown


def test_markdown_of_an_empty_gate_is_still_a_page():
    page = markdown(report(outcome="nothing", controls=(), geomean=None))
    assert "Nothing could be measured" in page
    assert "<details>" not in page


def test_everything_foreign_is_escaped():
    evil = report(case("wrong", EVIL, reason=EVIL, culprit=EVIL), baseline=EVIL, warnings=(EVIL,), outcome="fail")
    page = markdown(evil)
    page.encode()
    bare = page.replace(MARKER, "")
    assert not re.search(r"<(?!/?(code|sub|details|summary)>)", bare)
    assert not re.search(r"@\w|#\w|`|\[a\]|\x1b|\x00", bare.replace("&#", "&"))
    rows = [line for line in page.splitlines() if line.startswith("| **wrong**")]
    assert [row.count("|") for row in rows] == [6]


def test_escaped_text_reads_as_before():
    assert html.unescape(clean("a|b `c` <d> & *e*_f_")) == "a|b `c` <d> & *e*_f_"
    assert html.unescape(clean("ping @me")) == "ping @\u200bme"
    assert len(html.unescape(clean("long " * 1000))) == 300


@pytest.mark.parametrize("fill", ["reason ", "@|<", "\N{ROCKET}"])
def test_the_page_never_exceeds_what_a_comment_may_hold(fill: str):
    passes = [case("pass", f"torch.pass-{n}") for n in range(1500)]
    rows = [case("wrong", f"torch.wrong-{n}", reason=fill * 500) for n in range(20)]
    page = markdown(report(*passes, *rows, outcome="fail", warnings=(fill * 500,) * 40))
    assert len(page.encode("utf-16-le")) / 2 <= LIMIT
    assert "1500 passed" in page
    assert (
        page.count("**wrong**") + int((re.search(r"(\d+) more of these are not shown here", page) or [0, 0])[1]) == 20
    )
    assert "30 more warnings" in page


def test_passes_go_before_rows_and_their_number_is_said():
    passes = [case("pass", f"torch.pass-{n}") for n in range(1500)]
    page = markdown(report(*passes, case("regression"), outcome="fail"))
    kept = len(re.findall(r"torch\.pass-\d+", page))
    assert 0.9 * LIMIT < len(page) <= LIMIT
    assert f"{1500 - kept} are not shown here" in page
    assert "**slower**" in page
    many = markdown(report(case(), *[case("regression") for _ in range(1500)], outcome="fail"))
    assert "1 are not shown here" in many.partition("<details>")[2]
    assert f"{1500 - many.count('**slower**')} more of these are not shown here" in many


# annotations


def test_annotations_by_kind():
    lines = workflow_commands(EVERYTHING)
    assert [line.partition(" ")[0] for line in lines] == ["::error"] * 3 + ["::warning"] * 2 + ["::notice"]
    assert lines[0].startswith("::error title=torch.dilated%3A slower::1 x 128 tokens")
    assert not workflow_commands(report(case(), case("not_measured", reason="needs cuda")))


def test_annotations_are_escaped():
    assert command("error", "a: b, 5%", "c: d, 5%\r\ne") == "::error title=a%3A b%2C 5%25::c: d, 5%25%0D%0Ae"
    lines = workflow_commands(report(case("wrong", EVIL, reason=EVIL), outcome="fail", warnings=(EVIL,)))
    assert not any("\n" in line or "\r" in line for line in lines)


def test_no_more_annotations_than_github_shows():
    crowd = [case("regression", f"torch.r{n}") for n in range(25)] + [
        case("improved", f"torch.i{n}") for n in range(10)
    ]
    lines = workflow_commands(report(*crowd, outcome="fail"))
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == 10
    assert errors[-1].startswith("::error title=attnbench gate::16 more")
    assert len([line for line in lines if line.startswith("::notice")]) == 10


def test_an_untrusted_gate_is_annotated_once():
    lines = workflow_commands(report(case(), outcome="untrusted", controls=controls(aa=False)))
    told = workflow_commands(
        report(case(), outcome="untrusted", controls=controls(aa=False), warnings=("untrusted: x",))
    )
    assert told == ["::warning title=attnbench gate::untrusted: x"]
    assert lines == [
        "::warning title=attnbench gate::Untrusted: the a/a control failed, so no verdict here is valid "
        "(no regression in 1 case (Holm, 1 %25))"
    ]


# JUnit


def test_junit_counts_what_it_holds():
    root = ET.fromstring(junit(EVERYTHING))
    gate, checks = root.findall("testsuite")
    assert root.tag == "testsuites"
    assert [root.attrib[name] for name in ("tests", "failures", "errors", "skipped")] == ["9", "3", "0", "2"]
    assert [gate.attrib[name] for name in ("tests", "failures", "errors", "skipped")] == ["7", "3", "0", "2"]
    assert checks.attrib["tests"] == "2"
    assert float(root.attrib["time"]) == 93
    failures = {found.attrib["classname"]: found.find("failure") for found in gate if found.find("failure") is not None}
    assert {name: found.attrib["type"] for name, found in failures.items() if found is not None} == {
        "torch.fa3": "memory",
        "mine": "wrong",
        "torch.dilated": "regression",
    }
    dilated = next(found for found in gate if found.attrib["classname"] == "torch.dilated")
    assert dilated.attrib["name"] == workload().id
    assert float(dilated.attrib["time"]) == 28  # both stages
    assert "1.063x slower" in (dilated.findtext("system-out") or "")


def test_junit_of_failed_controls():
    root = ET.fromstring(junit(report(outcome="untrusted", controls=controls(aa=False, found=False))))
    assert root.attrib["errors"] == "1"
    assert root.attrib["skipped"] == "1"
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert error.attrib["message"].startswith("untrusted: a/a slower")


def test_junit_survives_characters_that_xml_does_not_know():
    text = junit(report(case("wrong", EVIL, reason=EVIL), outcome="fail"))
    found = ET.fromstring(text.encode()).find("testsuite/testcase/failure")
    assert found is not None
    assert "<script>alert(1)</script>" in found.attrib["message"]
    assert "\x1b" not in text


# files of a CI job


def test_write_ci_outside_github_writes_three_files_and_prints_nothing(tmp_path, capsys):
    write_ci(EVERYTHING, tmp_path / "deep" / "out", {})
    assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == ["gate.json", "gate.md", "gate.xml"]
    again = msgspec.json.decode((tmp_path / "deep" / "out" / "gate.json").read_bytes(), type=GateReport)
    assert again == EVERYTHING
    assert capsys.readouterr() == ("", "")


def test_write_ci_on_github_appends_to_the_summary_and_annotates(tmp_path, capsys):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    write_ci(EVERYTHING, tmp_path, {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)})
    assert summary.read_text() == "before\n" + (tmp_path / "gate.md").read_text()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == workflow_commands(EVERYTHING)


def test_write_ci_prints_no_empty_line_when_all_is_well(tmp_path, capsys):
    write_ci(report(case()), tmp_path, {"GITHUB_ACTIONS": "true"})
    assert capsys.readouterr().err == ""


def test_write_ci_says_what_to_do_when_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Give --ci another folder"):
        write_ci(report(), tmp_path / "file", {})


def test_controls_that_say_nothing_are_neither_passed_nor_failed():
    silent = tuple(
        Control(name=name, passed=False, comparison=comparison("inconclusive", 1.02)) for name in ("a/a", "+5 %")
    )
    made = report(case(), outcome="inconclusive", controls=silent)
    line = text_of(print_gate, made).splitlines()[1]
    assert line.count(" ?") == 2
    assert "✓" not in line
    tree = ET.fromstring(junit(made))
    assert [one.find("skipped") is not None for one in tree.iter("testcase") if one.get("classname") == "control"] == [
        True,
        True,
    ]
