from __future__ import annotations

import json
import tracemalloc
from itertools import count
from pathlib import Path

import msgspec
import pytest

from attnbench import reading
from attnbench.errors import BrokenFile
from attnbench.reading import DEEPEST, decode_json, read_content, read_lines, read_toml
from attnbench.results.run_file import read_run

PUBLISHED = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a":"\xff"}', "not UTF-8: byte 0xff"),
        (b"\xff\xfe{\x00", "."),
        (b"[" * 100_000, "nested more than 100 levels deep"),
        (b'{"a":' * 100_000, "nested more than 100 levels deep"),
        (b'"]]]]"' + b"[" * 101, "nested more than 100 levels deep"),
        (b'{"a":9223372036854775808}', "the integer 9223372036854775808… has more than 64 bits"),
        (b'{"a":[-9223372036854775809]}', "has more than 64 bits"),
        (b"9" * 5000, "has more than 64 bits"),
        (b"1e999", "."),
        (b"NaN", "."),
        (b'"\\ud800"', "."),
        (b"", "."),
    ],
    ids=count(),
)
def test_whatever_is_wrong_is_one_kind_of_error(content: bytes, why: str):
    with pytest.raises(msgspec.DecodeError, match=why):
        decode_json(content)


def test_what_only_looks_wrong_is_read():
    text = "[" * 500 + '\\"' + "9" * 500
    document = {"text": text, "list": [[1]] * 300, "real": 0.12345678901234567, "least": -(2**63), "most": 2**63 - 1}
    content = json.dumps(document).replace("0.12345678901234568", "0.12345678901234567890123").encode()
    assert decode_json(content) == document
    depth = "[" * DEEPEST + "]" * DEEPEST
    decode_json(depth.encode())


def test_a_check_that_overflows_is_told_like_any_other():
    class Odd(msgspec.Struct):
        a: int

        def __post_init__(self) -> None:
            raise OverflowError("too large")

    with pytest.raises(msgspec.ValidationError, match="too large"):
        decode_json(b'{"a":1}', Odd)


def test_lines_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "a"
    for content in (b"", b"\n", b"a", b"a\n", b"a\n\nb", b"a\r\nb\n\n"):
        path.write_bytes(content)
        assert read_lines(path) == (content.removesuffix(b"\n").split(b"\n") if content else [])


def test_a_line_of_gigabytes_is_refused_and_not_read(tmp_path: Path):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"line":"header","schema":1,"attnbench":"0","created":"now"}\n')
        file.truncate(3 << 30)  # holes: it takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(BrokenFile, match="line 2: longer than 64 MiB"):
            read_run(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * reading.LONGEST_LINE
    finally:
        tracemalloc.stop()


def test_a_document_has_a_size(tmp_path: Path):
    path = tmp_path / "large.json"
    path.write_bytes(b" " * 2000)
    assert len(read_content(path, 2000)) == 2000
    with pytest.raises(BrokenFile, match="larger than"):
        read_content(path, 1999)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a" + ".a" * 50_000 + " = 1", "line 1: a key of more than 100 parts"),
        ("x = 1\n[" + "a . " * 300 + "a]", "line 2: a key of more than 100 parts"),
        ('x = """a""""\ny.' + '"a".' * 300 + "a = 1", "line 2: a key of more than 100 parts"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "{a = " * 5_000, "nested too deeply"),
        ("a = " + "[" * 150 + "]" * 150, "nested more than 100 levels deep"),
        ("a = 9223372036854775808", "has more than 64 bits"),
        ("a = 0x" + "f" * 300, "has more than 64 bits"),
        ("a = " + "9" * 5000, "no valid TOML"),
        ("a = 1\nb = = 2", "line 2"),
        ("a = \x00", "line 1"),
        ("a = 1\n" * 500_000, "larger than 2 MiB"),
    ],
    ids=count(),
)
def test_broken_toml(text: str, why: str, tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BrokenFile, match=why):
        read_toml(path)


def test_broken_bytes_of_toml(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_bytes(b'name = "\xff"\n')
    with pytest.raises(BrokenFile, match="cannot be read"):
        read_toml(path)


def test_dots_that_are_no_keys(tmp_path: Path):
    path = tmp_path / "a.toml"
    reals = ", ".join(["0.5"] * 300)
    path.write_text(f'a = """{"." * 300}"""\nb = [{reals}]\nc = "{"." * 300}" # {"." * 300}\nd = \'{"." * 300}\'\n')
    assert read_toml(path)[0]["b"] == [0.5] * 300


@pytest.mark.parametrize("path", sorted(PUBLISHED.rglob("*.jsonl")), ids=lambda path: path.name)
def test_published_files_stay_readable(path: Path):
    for line in read_lines(path):
        decode_json(line)
