"""A regression gate: may the last commit be merged, or did it make attention slower?

    python examples/regression_gate.py --quick

Makes a small git repository whose second commit computes everything twice, and lets `attnbench gate` judge it as it
would judge a pull request: in fresh processes of both commits, in turn, beside two controls.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

KERNEL = """from torch.nn.functional import scaled_dot_product_attention

def attend(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    for _ in range(TIMES):
        out = scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2)
"""
SETTINGS = 'implementations = ["kernel.py:attend"]\nthreads = 1\n'
SUITE = "[[workload]]\nbatch = 1\nq_len = LENGTH\nheads = 8\nhead_dim = 64\n"


def git(folder: Path, *words: str) -> None:
    """Run git with a name and an address for its commits."""
    who = ["-c", "user.name=Example", "-c", "user.email=example@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def main(quick: bool) -> None:
    """Two commits, one gate, one sentence."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        git(folder, "init", "--quiet")
        (folder / "attnbench.toml").write_text(SETTINGS)
        (folder / "suite.toml").write_text(SUITE.replace("LENGTH", "64" if quick else "1024"))
        for message, times in {"attention": "1", "attend twice, to be sure": "2"}.items():
            (folder / "kernel.py").write_text(KERNEL.replace("TIMES", times))
            git(folder, "add", "--all")
            git(folder, "commit", "--quiet", "--message", message)
        words = ["gate", "--baseline", "HEAD~1", "--current", "HEAD", "--suite", "suite.toml", "--json"]
        words += ["--budget", "6" if quick else "60"]
        done = subprocess.run([sys.executable, "-m", "attnbench", *words], cwd=folder, stdout=subprocess.PIPE)
    report = json.loads(done.stdout)
    for control in report["controls"]:
        print(f"control {control['name']:5} {'passed' if control['passed'] else 'failed'}")
    for case in report["cases"]:
        print(f"{case['implementation']}: {case['status']}, {case['reason']}")
    answer = {"pass": "yes", "fail": "no"}.get(report["outcome"], f"it cannot tell, {report['outcome']}")
    print(f"May it be merged? The gate says {answer} (exit code {done.returncode}).")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape and short comparisons")
    main(parser.parse_args().quick)
