"""Files that strangers made, broken or hostile in any way, through every command that reads them: no exit code is that
of a bug, and nothing reaches the terminal that it would obey."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile_text import HOSTILE, danger
from record_factory import incorrect, noisy, ok, timing, unsupported, workload

from attnbench.cli import execute
from attnbench.errors import BrokenFile, UsageError
from attnbench.policy import load_policy, stack
from attnbench.results.run_file import RunWriter, new_header
from attnbench.workloads.suite_file import grid, read_suite

OURS = (0, 1, 2, 3, 4, 5)
RUN, POLICY, SUITE, THRESHOLDS, SETTINGS = "run.jsonl", "policy.json", "suite.toml", "floors.toml", "attnbench.toml"
TEXTS = {
    SUITE: '[[workload]]\nbatch = [1, 2]\nq_len = 64\nheads = "4:2"\nhead_dim = 32\nmask = "causal"\ntags = ["a"]\n',
    THRESHOLDS: '[[case]]\nimplementation = "torch.*"\nfloor = 0.05\nreason = "noisy"\n',
    SETTINGS: 'runs_dir = "runs"\nthreads = 1\nbudget_s = 0.5\nimplementations = ["torch.sdpa"]\n',
}
COMMANDS = {
    RUN: (
        ["show", RUN],
        ["show", RUN, "--detail"],
        ["show", RUN, "--json"],
        ["export", RUN, "--format", "csv"],
        ["export", RUN, "--format", "sqlite", "-o", "out.sqlite"],
        ["export", RUN, "--format", "bencher"],
        ["export", RUN, "--format", "github-action-benchmark"],
        ["choose", RUN],
        ["choose", RUN, "-o", "out.json"],
        ["history", RUN],
        ["gate", "--baseline", "good.jsonl", "--current", RUN],
        ["baseline", "update", RUN, "--dir", "kept"],
        ["baseline", "list", "--dir", "kept"],
    ),
    POLICY: (["choose", "good.jsonl", "--judge", POLICY], ["choose", "good.jsonl", "-o", POLICY]),
    "baseline": (
        ["baseline", "list", "--dir", "folder"],
        ["baseline", "show", "torch.sdpa/b1-t128", "--dir", "folder"],
        ["history", "folder"],
        ["gate", "--baseline", "./folder", "--current", "good.jsonl"],
    ),
    SUITE: (["list", "workloads", SUITE], ["list", "workloads", SUITE, "--json"]),
    THRESHOLDS: (["gate", "--baseline", "good.jsonl", "--current", "good.jsonl", "--thresholds", THRESHOLDS],),
    SETTINGS: (["baseline", "list"],),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of one good file of each kind."""
    folder = tmp_path_factory.mktemp("good")
    path = folder / RUN
    shapes = [workload(128), workload(256)]
    request = {"workloads": [msgspec.to_builtins(shapes[0])], "implementations": ["torch.sdpa"], "deep": [{"a": [1]}]}
    writer = RunWriter(path, new_header("0.1", "quick", request, seed=3, against=("torch.eager",)))
    for on in shapes:
        more = {
            "also": {"forward": timing([3.0, 4.0])},
            "notes": ("noisy: x",),
            "kernels": ("k",),
            "quality": {"c": 0.9},
        }
        timed = [ok("torch.sdpa", noisy(1e6, 1), on, **more), ok("torch.eager", noisy(2e6, 2), on)]
        anchors = [ok(f"anchor.{name}", noisy(1e5, 3), on) for name in ("matmul", "copy")]
        failed = [unsupported("torch.fa3", "needs cuda", on), incorrect("mine", "wrong", on, detail="a\ntrace")]
        writer.write([*timed, *anchors, *failed])
    writer.close()
    assert execute(["choose", str(path), "-o", str(folder / POLICY)]) == 0
    assert execute(["baseline", "save", str(path), "--dir", str(folder / "kept")]) == 0
    kept = next(one for one in sorted(folder.glob("kept/*/*.json")) if "torch.sdpa" in one.name)
    found = {RUN: path.read_bytes(), POLICY: (folder / POLICY).read_bytes(), "baseline": kept.read_bytes()}
    found["place"] = str(kept.relative_to(folder / "kept")).encode()
    return found | {name: text.encode() for name, text in TEXTS.items()}


@pytest.fixture
def read(
    good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, bytes, list[str]], int]:
    """Put a file of some kind in place, run a command on it, look at what it printed; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_bytes(good[RUN])
    baseline = tmp_path / "folder" / good["place"].decode()
    baseline.parent.mkdir(parents=True)

    def read(kind: str, content: bytes, command: list[str]) -> int:
        (baseline if kind == "baseline" else tmp_path / kind).write_bytes(content)
        code = execute(command)
        out, err = capsys.readouterr()
        if "--markdown" in command:
            out = out.replace("\N{ZERO WIDTH SPACE}", "")  # ours: it keeps GitHub from seeing mentions
        assert code in OURS, f"{command} of {content[:2000]!r}: {err}"
        assert not danger(out), f"{command} of {content[:2000]!r}: stdout {danger(out)}"
        assert not danger(err), f"{command} of {content[:2000]!r}: stderr {danger(err)}"
        assert code != 2 or err.startswith(("error: ", "warning: ", "note: "))
        return code

    return read


GOOD = {"gate": 1}
"""Exit codes of commands that read good files, 0 if not named: one of their functions is wrong, which fails a gate."""


@pytest.mark.parametrize("kind", COMMANDS)
def test_good_files_are_read(kind: str, good: dict[str, bytes], read: Callable[..., int]):
    for command in COMMANDS[kind]:
        assert read(kind, good[kind], command) == GOOD.get(command[0], 0), command


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", COMMANDS)
def test_broken_files_are_told(kind: str, seed: int, good: dict[str, bytes], read: Callable[..., int]):
    draw = random.Random(seed)
    for content in damaged(good[kind], draw):
        read(kind, content, draw.choice(COMMANDS[kind]))


def damaged(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """Flipped bits, bytes of no UTF-8, cuts, parts twice, nesting, long numbers; several of each."""
    for _ in range(8):
        place = draw.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    for _ in range(4):
        place, other = sorted(draw.randrange(len(content)) for _ in range(2))
        yield content[:place]
        yield content[:place] + b"\xff\xfe\xed\xa0\x80" + content[place:]
        yield content[:other] + content[place:]
        for bomb in (b"[" * 20_000, b'{"a":' * 3_000, b"9" * 400, b'"' + HOSTILE.encode() + b'"', b"\n\x00\n"):
            yield content[:place] + bomb + content[other:]
    digits = [place for place, one in enumerate(content) if chr(one).isdigit()]
    for place in draw.sample(digits, min(4, len(digits))):
        for number in (b"9" * 19, b"9" * 400, b"-1", b"1e308", b"nan", b"inf", b"[[1]]"):
            yield content[:place] + number + content[place + 1 :]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [RUN, POLICY, "baseline"])
def test_files_with_any_value_in_any_place(kind: str, seed: int, good: dict[str, bytes], read: Callable[..., int]):
    draw = random.Random(seed)
    values: list[Any] = [
        HOSTILE, "[/x]", "[red]", "x" * 3000, "", None, True, 0, -1, 1.5, 1e308, 5e-324, 2**63 - 1, 2**64, 10**400,
        [], {}, [HOSTILE], {HOSTILE: HOSTILE}, "::error::x",
    ]  # fmt: skip
    for _ in range(25):
        lines = [json.loads(line) for line in (good[kind].splitlines() if kind == RUN else [good[kind]])]
        holder, key = draw.choice(list(places(draw.choice(lines))))
        if isinstance(holder, dict) and draw.random() < 0.15:
            holder[HOSTILE] = holder.pop(key)
        else:
            holder[key] = draw.choice(values)
        content = "\n".join(map(json.dumps, lines)).encode() + b"\n"
        read(kind, content, draw.choice(COMMANDS[kind]))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and table within a document, with each of its first keys."""
    if isinstance(value, dict | list):
        for key in list(value)[:60] if isinstance(value, dict) else range(min(len(value), 3)):
            yield value, key
            yield from places(value[key])


def test_names_and_reasons_in_every_output(
    good: dict[str, bytes], read: Callable[..., int], monkeypatch: pytest.MonkeyPatch
):
    """All free texts are hostile at once, in files that are otherwise good, so that every command prints them."""
    free = (
        "implementation",
        "reason",
        "detail",
        "device_name",
        "cpu",
        "system",
        "driver",
        "source",
        "suite",
        "attnbench",
    )
    lines = [json.loads(line) for line in good[RUN].splitlines()]
    for holder, key in [place for line in lines for place in places(line)]:
        if key in free and not str(holder[key]).startswith("anchor."):
            holder[key] = f"{holder[key]}{HOSTILE}"
        if key in ("notes", "kernels", "tags", "against"):
            holder[key] = [HOSTILE]
        if key in ("also", "packages"):
            holder[key] = {f"{name}{HOSTILE}": one for name, one in holder[key].items()}
    content = "\n".join(map(json.dumps, lines)).encode() + b"\n"
    for command in COMMANDS[RUN]:
        assert read(RUN, content, command) in (0, 1, 2, 3)  # 3: a renamed cell has nothing to be compared with
    assert read(RUN, content, ["gate", "--baseline", RUN, "--current", RUN, "--ci", "ci"]) == 1
    assert read(RUN, content, ["baseline", "show", "torch.eager", "--dir", "kept", "-k", "t128"]) == 2
    assert read(RUN, content, ["history", "kept"]) == 0
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert read(RUN, content, ["report", RUN, "-o", "out.html", "--markdown"]) == 0
    assert not danger(Path("out-summary/summary.txt").read_text())
    assert read(RUN, content, ["choose", "good.jsonl", "--judge", "out.json"]) in (0, 3)


@pytest.mark.parametrize("words", [["show"], ["run"], ["run", "--impl"], ["show", "--against"], ["--x"], []], ids=str)
def test_words_of_the_command_line_are_told_visibly(words: list[str], good: dict[str, bytes], read: Callable[..., int]):
    assert read(RUN, good[RUN], [*words, HOSTILE]) == 2


def test_a_name_that_is_not_utf8(good: dict[str, bytes], read: Callable[..., int]):
    name = "a\udcff\x1b[2J.jsonl"
    for command in COMMANDS[RUN]:
        assert read(name, good[RUN], [name if word == RUN else word for word in command]) in (0, 1, 2)
    assert read(name, good[RUN], ["gate", "--baseline", name, "--current", name, "--json"]) == 2
    assert read(name, good[RUN], ["baseline", "update", name, "--dir", "kept", "--note", "\udcff"]) == 2


@pytest.mark.parametrize(
    "field",
    [f'heads = "{"9" * 5000}"', f'heads = "4:{"9" * 5000}"', f'mask = "window:{"9" * 5000}"', 'mask = "causal&"', *(
        f'mask = "{"&".join([mask] * 5000)}"' for mask in ("causal", "window:8:0", "lengths:1")
    ), f'mask = {{kind = "window", left = {"9" * 18}}}', "mask = [[]]", "scale = nan", "softcap = inf", "batch = 1e3"],
    ids=count(),
)  # fmt: skip
def test_fields_of_a_suite_have_limits(field: str, read: Callable[..., int]):
    fields = {"batch": "batch = 1", "q_len": "q_len = 8", "heads": "heads = 4", "head_dim": "head_dim = 8"}
    fields[field.partition(" ")[0]] = field
    assert read(SUITE, "\n".join(["[[workload]]", *fields.values()]).encode(), ["list", "workloads", SUITE]) == 2


@pytest.mark.parametrize(
    "options", [["--shard", f"1/{'9' * 5000}"], ["--heads", "9" * 5000], ["--mask", "causal&" * 99]]
)
def test_options_have_limits(options: list[str], good: dict[str, bytes], read: Callable[..., int]):
    assert read(RUN, good[RUN], ["run", "--seq-len", "8", "--list", *options]) == 2


def test_a_long_reason_is_cut_in_tables_and_whole_in_json(
    good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    long = "x" * 3_000_000
    for reason in ("needs cuda", "wrong"):
        Path(RUN).write_bytes(good[RUN].replace(json.dumps(reason).encode(), json.dumps(long).encode()))
        for command in (["show", RUN], ["show", RUN, "--detail"], ["gate", "--baseline", RUN, "--current", RUN]):
            assert execute(command) in (0, 1, 3)
            assert len(capsys.readouterr().out) < 100_000, command
        assert execute(["show", RUN, "--json"]) == 0
        assert long in capsys.readouterr().out
    text = good[RUN].decode()
    for word in ("needs cuda", "wrong", "noisy: x", "k"):
        text = text.replace(json.dumps(word), json.dumps(long))
    Path(RUN).write_text(text)
    assert execute(["report", RUN, "-o", "out.html"]) == 0
    assert long[:10_000] not in Path("out.html").read_text()


def test_a_suite_has_a_limit_that_is_known_before_it_is_made(read: Callable[..., int], tmp_path: Path):
    many = ", ".join(map(str, range(1, 401)))
    text = f"[[workload]]\nbatch = [{many}]\nq_len = [{many}]\nhead_dim = [{many}]\nheads = 1\n"
    assert read(SUITE, text.encode(), ["list", "workloads", SUITE]) == 2
    with pytest.raises(UsageError, match=r"64,000,000 workloads; a suite holds 100,000 at most"):
        read_suite(tmp_path / SUITE)


def test_a_grid_has_the_same_limit():
    lengths = list(range(1, 1001))
    with pytest.raises(UsageError, match=r"1,000,000 combinations of q_len, kv_len; 100,000 at most"):
        grid(batch=1, q_len=lengths, kv_len=lengths, heads=1, head_dim=8)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-nan", "1.0", "1e400", "9" * 400])
def test_a_floor_is_a_share(text: str, read: Callable[..., int]):
    content = f'[[case]]\nfloor = {text}\nreason = "x"\n'.encode()
    assert read(THRESHOLDS, content, COMMANDS[THRESHOLDS][0]) == 2


@pytest.mark.parametrize("name", ["threads", "budget_s", "timeout_s", "seed"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "9" * 400, "[1]", "1979-05-27"])
def test_settings_are_finite(name: str, value: str, read: Callable[..., int]):
    assert read(SETTINGS, f"{name} = {value}\n".encode(), ["baseline", "list"]) == 2


@pytest.mark.parametrize("text", ["tool = 5", "[tool]\nattnbench = 5", "[tool.attnbench]\nthreads = [1]", "[[tool]]"])
def test_a_project_file_of_another_form(text: str, read: Callable[..., int]):
    expected = 2 if "attnbench" in text else 0
    assert read("pyproject.toml", text.encode(), ["baseline", "list"]) == expected


@pytest.mark.parametrize(
    "options",
    [["--max-error", "nan"], ["--max-error", "inf"], ["--max-memory", "9" * 400], ["--max-memory", "nan"]],
    ids=str,
)
def test_constraints_are_finite(options: list[str], good: dict[str, bytes], read: Callable[..., int]):
    assert read(RUN, good[RUN], ["choose", RUN, "-o", "out.json", *options]) == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"kind": "policy",\n"x": "\xff"}', r"policy.json, line 2: this is not a policy file \(not UTF-8"),
        (b"[" * 100_000, "nested more than 100 levels"),
        (b'{"kind": "policy", "schema": ' + b"9" * 30 + b"}", "more than 64 bits"),
        (b'{"kind": "policy", "places": 5}', "this policy is broken"),
        (b"\x00\xff", "this is not a policy file"),
    ],
    ids=count(),
)
def test_a_broken_policy_is_named_wherever_it_is_asked(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import numpy as np

    import attnbench as ab

    path = tmp_path / POLICY
    path.write_bytes(content)
    with pytest.raises(BrokenFile, match=why) as caught:
        load_policy(path)
    assert "`attnbench choose RUN -o" in str(caught.value)
    monkeypatch.setenv("ATTNBENCH_POLICY", str(path))
    stack.forget()
    try:
        q = np.zeros((1, 4, 2, 8), np.float32)
        with pytest.raises(UsageError, match=r"policy\.json"):
            ab.attention(q, q, q)
    finally:
        monkeypatch.undo()
        stack.forget()


def test_a_policy_is_not_written_through_a_link(good: dict[str, bytes], read: Callable[..., int], tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".out.json.draft").symlink_to(victim)
    assert read(RUN, good[RUN], ["choose", RUN, "-o", "out.json"]) == 0
    assert victim.read_text() == "mine"
    assert not [one.name for one in tmp_path.iterdir() if one.name.startswith(".out.json.") and not one.is_symlink()]


def test_a_pipe_in_a_folder_is_no_file(good: dict[str, bytes], read: Callable[..., int], tmp_path: Path):
    for name in ("a.jsonl", "b.json"):
        os.mkfifo(tmp_path / "folder" / name)
    for command in COMMANDS["baseline"]:
        assert read("baseline", good["baseline"], command) == GOOD.get(command[0], 0)
