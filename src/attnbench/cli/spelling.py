"""A workload back as the options that make it, for a command that we suggest."""

from __future__ import annotations

import re

from attnbench.cli.options import Choice, Shape, spell
from attnbench.cli.selection import select_workloads
from attnbench.errors import UsageError
from attnbench.spec import Workload


def spell_workload(workload: Workload) -> list[str] | None:
    """Options that make exactly this workload; None where none do (a mask that is an array)."""
    heads = f"{workload.heads}" if workload.heads == workload.kv_heads else f"{workload.heads}:{workload.kv_heads}"
    shape = Shape(
        seq_len=(workload.q_len,),
        kv_len=(workload.kv_len,) if workload.kv_len != workload.q_len else (),
        batch=(workload.batch,),
        heads=(heads,),
        head_dim=(workload.head_dim,),
        v_head_dim=(workload.value_dim,) if workload.value_dim != workload.head_dim else (),
        dtype=(workload.dtype,),
        mask=(_mask_text(workload.visible_mask.id),),
        pass_=(workload.pass_,),
        scale=() if workload.scale is None else (workload.scale,),
        softcap=() if workload.softcap is None else (workload.softcap,),
    )
    try:
        _, made = select_workloads(None, False, shape, Choice())
    except UsageError:
        return None
    return spell(shape) if [one.id for one in made] == [workload.id] else None


def _mask_text(mask_id: str) -> str:
    """window128:0-topleft -> window:128:0:top-left."""
    parts = [re.sub(r"^(window|prefix|dilated)(?=\d|all)", r"\1:", part) for part in mask_id.split("&")]
    return "&".join(part.replace("-topleft", ":top-left").replace("-group", ":group") for part in parts)
