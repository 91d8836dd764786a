"""What the choices of a policy had to keep to."""

from __future__ import annotations

from msgspec import Struct


class Constraints(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a choice must keep to; as it stands in a policy file."""

    max_memory: int | None = None
    """Peak extra bytes of a call."""
    deterministic: bool = False
    """The same bits every time."""
    max_error: float | None = None
    """Relative error against float64, of the output and of the gradients."""
    only: tuple[str, ...] = ()
    """Names, families or frameworks; none: all."""
    forbid: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Constraints()

    def __str__(self) -> str:
        told = [
            f"at most {self.max_memory:,} extra bytes" if self.max_memory is not None else "",
            "deterministic" if self.deterministic else "",
            f"error up to {self.max_error:g}" if self.max_error is not None else "",
            f"only {', '.join(self.only)}" if self.only else "",
            f"without {', '.join(self.forbid)}" if self.forbid else "",
        ]
        return "; ".join(one for one in told if one)
