from __future__ import annotations

import io
import json

import pytest
from hostile_text import HOSTILE, danger
from rich.progress import Progress
from rich.status import Status
from rich.table import Table
from rich.text import Text

from attnbench.cli.output import PlainConsole, print_json
from attnbench.errors import BrokenFile, UnknownName
from attnbench.printable import printable, printable_json, printable_lines, shortened


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("torch.sdpa · 1,024 tokens – 2 µs ✓ … →", "torch.sdpa · 1,024 tokens – 2 µs ✓ … →"),
        ("中文 العربية é 🙂", "中文 العربية é 🙂"),
        ("a\x1b[2J", r"a\x1b[2J"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("\u202eabc\u2066\u200f\u200b\ufeff\u2028", r"\u202eabc\u2066\u200f\u200b\ufeff\u2028"),
        ("\U000e0041\ud800", r"\U000e0041\ud800"),
        ("::error::x", r":\x3aerror::x"),
        ("  ::stop-commands::t", r"  :\x3astop-commands::t"),
        ("a ::anything", r"a :\x3aanything"),
        ("a::ERROR file=x", r"a:\x3aERROR file=x"),
        ("void at::native::softmax<float>", "void at::native::softmax<float>"),
        ("##[group]", r"#\x23[group]"),
        (r"##\[group]", r"#\x23\[group]"),
        ("x ##vso[task.setvariable", r"x #\x23vso[task.setvariable"),
        ("##teamcity[x", r"#\x23teamcity[x"),
        ("### Title", "### Title"),
    ],
)
def test_text_is_one_visible_line(text: str, shown: str):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_lines_stay_lines():
    assert printable_lines("a\x1b\n::error\nb") == "a\\x1b\n:\\x3aerror\nb"


def test_json_means_the_same_and_can_be_seen():
    document = {"é": HOSTILE, "中": "\U000e0041 🙂"}
    text = json.dumps(document, ensure_ascii=False, indent=2)
    shown = printable_json(text)
    assert json.loads(shown) == document
    assert not danger(shown)
    assert "é" in shown
    plain = printable_json(text, "ascii")
    assert plain.isascii()
    assert json.loads(plain) == document


def test_long_text_is_cut_and_says_so():
    assert shortened("a" * 500) == "a" * 500
    assert shortened("a" * 1503) == "a" * 500 + "… (1,003 more characters; --json has all)"


def test_messages_of_errors_are_visible():
    assert not danger(str(BrokenFile(HOSTILE, 3, HOSTILE)))
    assert not danger(str(UnknownName("suite", HOSTILE, [HOSTILE], HOSTILE)))


@pytest.mark.parametrize("width", [20, 200])
@pytest.mark.parametrize("markup", [False, True])
def test_everything_a_console_prints_is_visible(width: int, markup: bool):
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=width)
    text = HOSTILE.replace("[", r"\[") if markup else HOSTILE
    console.print(text, markup=markup)
    console.print(text, markup=markup, soft_wrap=True)
    console.print("x" * (width - 1), "::error::wrapped", "y" * (width - 2) + "::error::folded", markup=False)
    console.print(Text(HOSTILE))
    table = Table(HOSTILE.replace("[", r"\["), box=None, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_row(HOSTILE.replace("[", r"\["), "::error::x " * 9)
    console.print(table)
    assert not danger(stream.getvalue())
    assert r"\x1b" in stream.getvalue()


def test_what_is_drawn_on_a_terminal_is_visible():
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=200, force_terminal=True, color_system=None)
    plain = HOSTILE.replace("\n", "").replace("[", r"\[")
    with Progress(console=console) as progress:
        progress.add_task(plain, total=1)
    with Status(plain, console=console):
        pass
    for sequence in ("\x1b]52", "\x1b[2J", "\u202e", "\x9b", "::error::"):
        assert sequence not in stream.getvalue()


def test_a_reason_of_megabytes_is_not_printed_whole():
    stream = io.StringIO()
    PlainConsole(file=stream, width=200).print("a" * 5_000_000, markup=False, soft_wrap=True)
    assert len(stream.getvalue()) < 21_000
    assert "4,980,000 more characters; --json has all" in stream.getvalue()


def test_json_on_stdout(capsys: pytest.CaptureFixture[str]):
    print_json({"name": HOSTILE})
    out = capsys.readouterr().out
    assert not danger(out)
    assert json.loads(out) == {"name": HOSTILE}
