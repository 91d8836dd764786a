"""Files that others made are read within limits; ours are written whole or not at all, by everyone who writes one."""

from __future__ import annotations

import errno
import json
import os
import stat
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest
from gate_factory import report
from policy_factory import policy
from record_factory import ok, workload

from attnbench import files
from attnbench.comparing.baselines import update
from attnbench.comparing.ci_files import write_ci
from attnbench.errors import BrokenFile, UsageError
from attnbench.files import DEEPEST, decode_json, draft_of, read_content, read_lines, read_toml, write_texts
from attnbench.policy import save_policy
from attnbench.report.pytest_session import SessionFile, write_session
from attnbench.results.run_file import read_run
from attnbench.workloads.suite_file import write_suite

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
        assert tracemalloc.get_traced_memory()[1] < 4 * files.LONGEST_LINE
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
        ("a = " + "9" * 5000, "not valid TOML"),
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


def write_baseline(path: Path) -> None:
    records = [ok(name, [1e6, 1e6]) for name in ("torch.sdpa", "anchor.matmul", "anchor.copy")]
    update(records, path.parent)


WRITERS: dict[str, Callable[[Path], None]] = {
    "policy": lambda path: save_policy(policy(), path),
    "suite": lambda path: write_suite(path, "mine", "", [workload()]),
    "ci": lambda path: write_ci(report(), path.parent, {}),
    "session": lambda path: write_session(path, SessionFile(records=[], comparisons=[], tests={})),
    "baseline": write_baseline,
    "texts": lambda path: write_texts({path: "new"}),
}
"""What writes a file of that name, or files beside it."""


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there_and_nothing_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = WRITERS[name]
    write(tmp_path / "file")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_text("old")
    before = content(tmp_path)
    assert before

    def half(self: Path, data: str | bytes, *_: object, **__: object) -> None:
        with self.open("wb") as file:
            file.write(b"ha")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((UsageError, OSError), match="No space left"):
        write(tmp_path / "file")
    monkeypatch.undo()
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", WRITERS)
def test_no_link_is_followed(name: str, tmp_path: Path):
    """Neither one in place of a file, nor one under any name that a draft could have had before."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    WRITERS[name](folder / "file")
    victim.write_text("precious")
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        path.with_name(f".{path.name}.draft").symlink_to(victim)
        path.unlink()
        path.symlink_to(victim)
    WRITERS[name](folder / "file")
    assert victim.read_text() == "precious"
    assert any(path.is_file() and not path.is_symlink() for path in folder.rglob("*"))


def test_permissions_are_kept_and_new_files_obey_the_umask(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("1")
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_texts({old: "2", new: "2"})
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o640, 0o640]
    old.chmod(0o600)
    write_texts({old: "3"})
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_drafts_have_names_that_cannot_be_foreseen(tmp_path: Path):
    with draft_of(tmp_path / "a") as first, draft_of(tmp_path / "a") as second:
        assert first != second
        assert first.parent == second.parent == tmp_path
        assert first.is_file()
    with draft_of(tmp_path / ("x" * 250)) as draft:  # as long as names may be
        draft.write_text("1")


def test_all_or_none_are_replaced(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    for first, second in (("a", "b"), ("b", "a")):
        with pytest.raises(IsADirectoryError):
            write_texts({tmp_path / first: "new", tmp_path / second: "new"})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
        assert (tmp_path / "a").read_text() == "old"


def test_a_device_stays_one(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_texts({pipe: "hello"})
    assert os.read(reader, 100) == b"hello"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
