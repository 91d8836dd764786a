"""Store the present surface, on purpose: `python tests/public_surface/write.py [NAME...]`, all files by default.

The test of the surface fails if something is removed or changed; additions pass until they are stored, and are pinned
from then on. The files under written/ are never made anew: they are what version 0.2.0 wrote (`attnbench run`,
`choose`, `baseline save`, `compare --json`, `doctor --json`, pytest's `--attnbench-json`), shortened by hand;
earlier.jsonl is a part of results/h200/earlier.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent)


def main(names: list[str]) -> None:
    """Write the files of these names."""
    from public_surface.surface import STORED

    for name in names or STORED:
        text = json.dumps(STORED[name](), indent=1, ensure_ascii=False)
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
