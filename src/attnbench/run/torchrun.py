"""`torchrun --nproc-per-node N -m attnbench.run.torchrun`: measure ring cells over the ranks that torchrun started.

Each workload is one cell over all ranks. Rank 0 checks, times and records it, in this process; the others compute.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from attnbench.errors import UsageError
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.printable import printable_json
from attnbench.run.launch import Listener, Request, launch
from attnbench.run.machine import isa_cap
from attnbench.spec import Record
from attnbench.workloads.suite_file import grid


def main() -> None:
    """Serve as a rank; rank 0 measures, prints one JSON record per line, and writes the records to --out."""
    options = _parser().parse_args()
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        raise UsageError("start this with torchrun, or run `attnbench run --impl torch.ring[world=4]` without it.")
    os.environ.update(isa_cap())
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.distributed import destroy_process_group

    from attnbench.kernels.ring import pool

    ring = pool.GroupRanks(options.device, options.timeout)
    records: list[Record] = []
    try:
        if ring.rank:
            ring.serve()
            return
        pool.adopt(ring)
        try:
            launch(_request(options, ring.world), records.extend, Listener())
        finally:
            pool.close_all()
    finally:
        destroy_process_group()  # else its threads may end with the interpreter, which then aborts
    lines = [msgspec.json.encode(record).decode() for record in records if record.implementation not in ANCHORS]
    print(printable_json("\n".join(lines)))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def _request(options: argparse.Namespace, world: int) -> Request:
    mask = "causal" if options.causal else "full"
    workloads = grid(
        batch=options.batch, q_len=options.seq_len, heads=options.heads, head_dim=options.head_dim,
        dtype=options.dtype, mask=mask, pass_=options.pass_,
    )  # fmt: skip
    settings = f"world={world},layout={options.layout},timeout_s={options.timeout}"
    return Request(
        workloads=tuple(workloads),
        implementations=(f"torch.ring[{settings}]",),
        device=options.device,
        budget_s=options.budget,
        seed=options.seed,
        in_process=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnbench.run.torchrun", description=__doc__)
    many: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--seq-len", type=int, default=[4096], **many)
    parser.add_argument("--batch", type=int, default=[1], **many)
    parser.add_argument("--heads", default=["8"], help="query heads, or query:key/value heads", **many)
    parser.add_argument("--head-dim", type=int, default=[64], **many)
    parser.add_argument("--dtype", default=["float32"], **many)
    parser.add_argument("--pass", dest="pass_", default=["forward"], **many)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--device", default="cpu", help="cpu (gloo) or cuda (NCCL, one rank per GPU)")
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("-o", "--out", type=Path)
    return parser


if __name__ == "__main__":
    main()
