"""Ceilings measured once per device, framework and dtype, kept in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from attnbench.measuring.rates import Ceilings
from attnbench.reading import decode_json
from attnbench.spec import Environment


def cache_folder() -> Path:
    """Where the package keeps what can be measured again."""
    base = os.environ.get("ATTNBENCH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attnbench"


def _file(environment: Environment, dtype: str) -> Path:
    return cache_folder() / f"ceilings-{environment.framework}-{environment.fingerprint}-{dtype}.json"


def load_ceilings(environment: Environment, dtype: str) -> Ceilings | None:
    """What was measured before, or None."""
    try:
        return decode_json(_file(environment, dtype).read_bytes(), Ceilings)
    except (OSError, msgspec.DecodeError):
        return None


def store_ceilings(environment: Environment, dtype: str, ceilings: Ceilings) -> None:
    """Keep them; a cache that cannot be written costs a second in the next run and nothing else."""
    file = _file(environment, dtype)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(ceilings))
    except OSError:
        return
