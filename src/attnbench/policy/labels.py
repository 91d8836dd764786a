"""Names of implementations with their settings, as tables and policy files have them."""

from __future__ import annotations

from msgspec import Struct

Settings = dict[str, int | float | str | bool]
"""A config of an implementation, as a file holds it."""


def label_of(implementation: str, config: Settings) -> str:
    """Return the name in tables: the implementation, and its config in brackets if it is not the default."""
    settings = ",".join(f"{k}={v}" for k, v in sorted(config.items()))
    return f"{implementation}[{settings}]" if settings else implementation


class Labelled(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An implementation with settings."""

    implementation: str
    config: Settings = {}

    @property
    def label(self) -> str:
        """Name in tables."""
        return label_of(self.implementation, self.config)
