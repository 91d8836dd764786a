"""What a benchmark found: printed, and kept where a file was named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def publish(found: Mapping[str, Any], out: Path | None) -> None:
    text = json.dumps(found, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    print(text)
