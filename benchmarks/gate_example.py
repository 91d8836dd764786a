"""The gate on a little repository whose last commit is slower: `python benchmarks/gate_example.py [-o FOLDER]`.

The commit makes an attention compute an eighth of its rows twice. Prints what `attnbench gate` prints; FOLDER gets that
text and the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ATTENTION = '''"""Plain attention."""

import torch


def attend(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
{extra}    return out.transpose(1, 2)
'''
MORE = "    torch.nn.functional.scaled_dot_product_attention(q[:, :, : q.shape[2] // 8], k, v)\n"
SUITE = """description = "one shape"

[[workload]]
q_len = 512
batch = 1
heads = 8
head_dim = 64
dtype = "float32"
"""
GATE = ["gate", "--baseline", "HEAD~1", "--current", "HEAD", "--suite", "own.toml", "--threads", "1"]


def repository(folder: Path) -> None:
    """Two commits: the attention, and the same with an eighth more work."""

    def git(*words: str) -> None:
        identity = ["-c", "user.name=attnbench", "-c", "user.email=attnbench@localhost"]
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (folder / "own.toml").write_text(SUITE)
    (folder / "attnbench.toml").write_text('implementations = ["fast:attend"]\nframework = "torch"\n')
    for extra, message in (("", "attention"), (MORE, "an eighth more work")):
        (folder / "fast.py").write_text(ATTENTION.format(extra=extra))
        git("add", "-A")
        git("commit", "-q", "-m", message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        repository(Path(name))
        variables = os.environ | {"COLUMNS": "200"}
        command = [sys.executable, "-m", "attnbench", *GATE, "--ci", "out"]
        done = subprocess.run(command, cwd=name, env=variables, check=False, capture_output=True, text=True)
        print(done.stdout)
        if done.returncode not in (0, 1, 4, 5):
            sys.exit(done.stderr)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gate_example.txt").write_text(f"$ attnbench {' '.join(GATE)}\n{done.stdout}")
            report = json.loads(Path(name, "out", "gate.json").read_text())
            (options.out / "gate_example.json").write_text(json.dumps(report, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
