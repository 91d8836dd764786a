"""The GitHub Action and our own workflow: well formed, nothing foreign reaches a shell as code, codes get through."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gate_factory import case, report

from attnbench.comparing.gate_text import MARKER, markdown

ROOT = Path(__file__).parents[1]
ACTION, WORKFLOW = ROOT / "action.yml", ROOT / ".github" / "workflows" / "attnbench.yml"
SHELL = shutil.which("bash")


def load(path: Path) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load(path.read_text())


def blocks(text: str) -> list[str]:
    """Every `run:` and `script:` with the lines that belong to it, without a YAML parser."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        if match := re.match(r"( *)(- )?(run|script):(.*)", line):
            depth = len(match[1]) + len(match[2] or "")
            inner = []
            for later in lines[number + 1 :]:
                if later.strip() and len(later) - len(later.lstrip()) <= depth:
                    break
                inner.append(later)
            found.append("\n".join([match[4], *inner]))
    return found


@pytest.mark.parametrize("path", [ACTION, WORKFLOW], ids=lambda path: path.name)
def test_nothing_is_pasted_into_a_shell_or_script(path: Path):
    found = blocks(path.read_text())
    assert found
    for block in found:
        assert "${{" not in block


SAMPLE = """
steps:
  - run: echo ${{ inputs.a }}
  - name: x
    run: |
      one

      ${{ two }}
    env:
      B: ${{ b }}
"""


def test_the_search_for_blocks_finds_what_it_must():
    assert ["${{" in block for block in blocks(SAMPLE)] == [True, True]
    assert "B:" not in blocks(SAMPLE)[1]


def test_the_action_is_composite_and_every_shell_step_says_its_shell():
    action = load(ACTION)
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("run" in step) != ("uses" in step)
        assert step.get("shell") == ("bash" if "run" in step else None)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    assert {"baseline", "current", "suite", "args", "install", "python-version", "comment", "on-inconclusive"} <= set(
        action["inputs"]
    )
    for declared in action["inputs"].values():
        assert declared["description"]
        assert isinstance(declared["default"], str)


def test_every_input_that_is_used_is_declared():
    used = set(re.findall(r"inputs\.([a-z-]+)", ACTION.read_text()))
    assert used == set(load(ACTION)["inputs"])


@pytest.mark.parametrize("job, suite", [("gate", "quick"), ("regression", "regression")])
def test_our_workflow_uses_the_action_with_inputs_it_has(job: str, suite: str):
    workflow = load(WORKFLOW)
    steps = workflow["jobs"][job]["steps"]
    gate = next(step for step in steps if step.get("uses") == "./")
    assert gate["with"]["suite"] == suite
    assert ("==" in workflow["jobs"][job]["if"]) == (job == "gate"), "pull requests have the quick one alone"
    assert set(gate["with"]) <= set(load(ACTION)["inputs"])
    assert gate["continue-on-error"] is True
    assert next(step for step in steps if "checkout" in step.get("uses", ""))["with"]["fetch-depth"] == 0
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}


def run_step(name: str, folder: Path, inputs: dict[str, str], code: int = 0) -> tuple[int, list[str], str]:
    """Run a step as GitHub would, with fake commands that write down their arguments: (code, arguments, outputs)."""
    step = next(step for step in load(ACTION)["runs"]["steps"] if step.get("name") == name)
    for command in ("attnbench", "python", "git"):
        fake = folder / "bin" / command
        fake.parent.mkdir(exist_ok=True)
        answer = "echo abc123" if command == "git" else ":"
        fake.write_text(f'#!/bin/sh\nprintf "%s\\n" {command} "$@" >> "$CALLS"\n{answer}\nexit {code}\n')
        fake.chmod(0o755)
    calls, output = folder / "calls", folder / "output"
    environ = {**dict.fromkeys(step["env"], ""), **inputs, "GITHUB_OUTPUT": str(output), "CALLS": str(calls)}
    environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [SHELL, "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=20)
    said = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, said, output.read_text() if output.exists() else ""


needs_bash = pytest.mark.skipif(SHELL is None, reason="bash is not installed")
EVIL = '"; touch pwned; $(touch pwned) `touch pwned` *'


@needs_bash
def test_inputs_arrive_as_they_are(tmp_path):
    inputs = {"BASELINE": EVIL, "CURRENT": EVIL, "SUITE": EVIL, "FOLDER": EVIL, "ON_INCONCLUSIVE": "pass"}
    code, said, output = run_step("Gate", tmp_path, {**inputs, "ARGS": "--budget 5 $(touch pwned) *"})
    assert (code, output) == (0, "exit-code=0\n")
    expected = [f"--baseline={EVIL}", f"--current={EVIL}", f"--suite={EVIL}", "--on-inconclusive=pass", f"--ci={EVIL}"]
    assert said == ["attnbench", "gate", *expected, "--budget", "5", "$(touch", "pwned)", "*"]
    assert not (tmp_path / "pwned").exists()


@needs_bash
@pytest.mark.parametrize("code", [1, 2, 3, 4, 5])
def test_the_verdict_is_kept_for_the_last_step(tmp_path, code: int):
    assert run_step("Gate", tmp_path, {"BASELINE": "main"}, code)[::2] == (0, f"exit-code={code}\n")
    assert run_step("Verdict", tmp_path, {"CODE": str(code)})[0] == code


@needs_bash
def test_a_gate_that_never_ran_is_no_pass(tmp_path):
    assert run_step("Verdict", tmp_path, {})[0] == 2


@needs_bash
def test_without_a_baseline_it_is_the_merge_base_or_the_parent(tmp_path):
    said = run_step("Gate", tmp_path, {"TARGET": "main"})[1]
    assert said[:4] == ["git", "merge-base", "HEAD", "refs/remotes/origin/main"]
    assert "--baseline=abc123" in said
    (tmp_path / "calls").unlink()
    assert "--baseline=HEAD^" in run_step("Gate", tmp_path, {})[1]


@needs_bash
def test_a_shallow_clone_says_what_to_do(tmp_path):
    code, said, output = run_step("Gate", tmp_path, {"TARGET": "main"}, code=1)
    assert (code, output) == (0, "exit-code=2\n")
    assert "attnbench" not in said


@needs_bash
@pytest.mark.parametrize("target", ["", "main"])
def test_files_of_an_earlier_gate_are_gone(tmp_path, target: str):
    folder = tmp_path / "of a gate"
    folder.mkdir()
    for name in ("gate.json", "gate.md", "gate.xml", "other.txt"):
        (folder / name).write_text("stale")
    run_step("Gate", tmp_path, {"TARGET": target, "FOLDER": folder.name}, code=2)
    assert [file.name for file in folder.iterdir()] == ["other.txt"]


@needs_bash
def test_what_to_install_is_split_at_blanks_only(tmp_path):
    said = run_step("Install", tmp_path, {"INSTALL": "-c constraints.txt\n-e .[torch] $(touch pwned)\n"})[1]
    assert said[5:] == ["-c", "constraints.txt", "-e", ".[torch]", "$(touch", "pwned)"]
    assert not (tmp_path / "pwned").exists()


HARNESS = """
const calls = [];
const comments = JSON.parse(process.env.COMMENTS);
const say = (name) => async (asked) => { calls.push([name, asked.comment_id ?? null, asked.issue_number]); };
const refuse = async () => { throw new Error('Resource not accessible'); };
const issues = process.env.REFUSED
  ? { updateComment: refuse, createComment: refuse }
  : { updateComment: say('update'), createComment: say('create') };
const github = { paginate: async () => comments, rest: { issues } };
const context = { repo: { owner: 'o', repo: 'r' }, issue: { number: 7 } };
const core = { warning: (text) => calls.push(['warning', text]) };
const AsyncFunction = Object.getPrototypeOf(async function () {}).constructor;
const run = new AsyncFunction('github', 'context', 'core', 'require', process.env.SCRIPT);
run(github, context, core, require).then(() => console.log(JSON.stringify(calls)));
"""


def comment(folder: Path, comments: list[dict[str, Any]], **environ: str) -> list[Any]:
    """What the comment step does in an issue with these comments."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    step = next(step for step in load(ACTION)["runs"]["steps"] if step.get("name") == "Comment")
    variables = {"SCRIPT": step["with"]["script"], "COMMENTS": json.dumps(comments), "FOLDER": str(folder), **environ}
    done = subprocess.run([node, "-e", HARNESS], env=variables, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_comment_is_written_once_and_then_updated(tmp_path):
    (tmp_path / "gate.md").write_text(markdown(report(case())))
    other = {"id": 1, "user": {"type": "User"}, "body": f"{MARKER} somebody quotes it"}
    mine = {"id": 2, "user": {"type": "Bot"}, "body": f"{MARKER}\nold"}
    assert comment(tmp_path, [other]) == [["create", None, 7]]
    assert comment(tmp_path, [other, mine]) == [["update", 2, 7]]


def test_a_comment_that_is_not_allowed_is_a_warning(tmp_path):
    (tmp_path / "gate.md").write_text(markdown(report(case())))
    [[kind, text]] = comment(tmp_path, [], REFUSED="yes")
    assert kind == "warning"
    assert "Resource not accessible" in text


def test_without_a_page_there_is_no_comment(tmp_path):
    assert comment(tmp_path, []) == []
