"""Turn options into workloads and implementation names, and a workload back into options."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from attnbench.cli.options import Choice, Shape, spell
from attnbench.cli.output import warn
from attnbench.errors import UnknownName, UsageError
from attnbench.registry import is_reference
from attnbench.spec import Workload

DEFAULT_SUITE = "quick"
OWN_GRID = "own"
"""Name of the run when the shape options alone made the workloads."""
OWN_SHAPE = Shape(seq_len=(512,))
"""Shape that a bare function is checked on if no other is given."""
DEFAULTS: dict[str, Any] = {"batch": 1, "q_len": 512, "heads": "8", "head_dim": 64, "dtype": "float32"}


def select_workloads(suite: str | None, quick: bool, shape: Shape, choice: Choice) -> tuple[str, tuple[Workload, ...]]:
    """Return the name of the suite, and its workloads that the options leave."""
    axes = shape_axes(shape)
    if suite is None and axes:
        name, workloads = OWN_GRID, _grid(DEFAULTS | axes)
    else:
        name, found = load_suite(suite or DEFAULT_SUITE, quick)
        workloads = replace_axes(found, axes) if axes else list(found)
    if choice.tag:
        known = sorted({tag for workload in workloads for tag in workload.tags})
        workloads = [w for w in workloads if set(w.tags) & set(choice.tag)]
        if not workloads:
            raise UsageError(
                f"no workload of {name} is tagged {' or '.join(choice.tag)}; there are: {', '.join(known) or 'none'}."
            )
    if choice.shard is not None:
        workloads = take_shard(workloads, choice.shard)
    return name, tuple(workloads)


def load_suite(name: str, quick: bool) -> tuple[str, tuple[Workload, ...]]:
    """Return name and workloads of a suite (a name or a TOML path); `quick` caps its shapes."""
    from attnbench.workloads import suites

    suite = suites.load(name)
    suite = suites.quicken(suite) if quick else suite
    return suite.name, tuple(suite.workloads)


def shape_axes(shape: Shape) -> dict[str, Any]:
    """Return the axes that were given, by the workload's field names; each a list."""
    masks = [f"{mask}&causal" for mask in shape.mask] or ["causal"] if shape.causal else list(shape.mask)
    given = {
        "q_len": shape.seq_len,
        "kv_len": shape.kv_len,
        "batch": shape.batch,
        "heads": shape.heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "dtype": shape.dtype,
        "mask": masks,
        "pass_": shape.pass_,
        "scale": shape.scale,
        "softcap": shape.softcap,
    }
    return {name: list(values) for name, values in given.items() if values}


def replace_axes(workloads: Iterable[Workload], axes: dict[str, Any]) -> list[Workload]:
    """Return each workload with these axes in place of its own, without repeats."""
    found: dict[str, Workload] = {}
    for workload in workloads:
        found |= {changed.id: changed for changed in _grid(_fields(workload) | axes)}
    return list(found.values())


def _fields(w: Workload) -> dict[str, Any]:
    """Return a workload as axes, without those that only follow another one (kv_len = q_len)."""
    fields: dict[str, Any] = {
        "batch": w.batch,
        "q_len": w.q_len,
        "heads": (w.heads, w.kv_heads),
        "head_dim": w.head_dim,
        "dtype": w.dtype,
        "mask": w.visible_mask,
        "pass_": w.pass_,
        "scale": w.scale,
        "softcap": w.softcap,
        "inputs": w.inputs,
        "step": w.step,
        "tags": w.tags,
    }
    if w.kv_len != w.q_len:
        fields["kv_len"] = w.kv_len
    if w.value_dim != w.head_dim:
        fields["v_head_dim"] = w.value_dim
    return fields


def _grid(axes: dict[str, Any]) -> list[Workload]:
    from attnbench.workloads.suite_file import grid

    return grid(**axes)


def take_shard(workloads: Sequence[Workload], text: str) -> list[Workload]:
    """Return the part of the workloads that `i/n` names."""
    from attnbench.run.plan import shard

    part, slash, parts = text.partition("/")
    whole = slash and len(text) < 40 and part.isdecimal() and parts.isdecimal()
    if not (whole and 1 <= int(part) <= int(parts)):
        raise UsageError(f'--shard takes i/n with 1 <= i <= n, such as 1/4, not "{text}".')
    return shard(workloads, int(part), int(parts))


def select_implementations(
    choice: Choice, framework: str | None = None, steps: Collection[str] = ("",)
) -> tuple[str, ...]:
    """Return names and references to run: those asked for and their rivals; if none was asked for, all (of the
    framework) that compute one of the steps."""
    from attnbench import registry

    known = registry.names()
    asked = [name for one in choice.impl for name in expand(one, known)]
    rivals = [name for one in choice.against for name in expand(one, known)]
    only_functions = bool(asked) and all(is_reference(name) for name in asked)
    if not rivals and (not asked or only_functions):
        swept = swept_names(steps)
        rivals = [name for name in swept if asked or framework is None or name.startswith(f"{framework}.")]
        if framework is not None and not rivals:
            raise UnknownName("framework", framework, {name.partition(".")[0] for name in known}, "attnbench doctor")
    return tuple(dict.fromkeys([*asked, *rivals]))


def loadable_names() -> list[str]:
    """Return every name that loads; a warning on stderr names the others."""
    from attnbench import registry

    good, broken = registry.loadable()
    for reason in broken.values():
        warn(reason)
    return good


def swept_names(steps: Collection[str] = ("",)) -> list[str]:
    """Return the names that a sweep over everything takes: not those by name only, nor those of another step."""
    from attnbench import registry

    known = [registry.get(name) for name in loadable_names()]
    return [one.name for one in known if not one.by_name_only and one.step in steps]


def expand(wanted: str, known: Sequence[str]) -> list[str]:
    """Return the names a word means: an exact name (settings in brackets), a reference, a framework or a family."""
    if is_reference(wanted) or wanted.partition("[")[0] in known:
        return [wanted]
    found = [name for name in known if name.startswith((f"{wanted}.", f"{wanted}-"))]
    if not found:
        raise UnknownName("implementation", wanted, known, "attnbench list implementations")
    return found


def filter_words(
    words: str, workloads: Sequence[Workload], implementations: Sequence[str]
) -> tuple[tuple[Workload, ...], tuple[str, ...]]:
    """Keep what `-k "sdpa causal"` names: each word narrows the implementations, the workloads, or both."""
    for word in words.split():
        names = [name for name in implementations if word in name]
        shapes = [w for w in workloads if word in w.id]
        if not names and not shapes:
            raise UsageError(
                f'-k "{word}" occurs in no implementation name and no workload id; see `attnbench run --list`.'
            )
        implementations, workloads = names or implementations, shapes or workloads
    return tuple(workloads), tuple(implementations)


def spell_workload(workload: Workload) -> list[str] | None:
    """Return the options that make exactly this workload; None if there are none (a mask that is an array)."""
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
    """Convert an id such as window128:0-topleft to the option's words, window:128:0:top-left."""
    parts = [re.sub(r"^(window|prefix|dilated)(?=\d|all)", r"\1:", part) for part in mask_id.split("&")]
    return "&".join(part.replace("-topleft", ":top-left").replace("-group", ":group") for part in parts)
