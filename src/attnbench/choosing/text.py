"""A policy as text and JSON: a table per class, the lengths where the choice changes, and a closing sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape

from attnbench.choosing.candidates import Ground
from attnbench.choosing.choose import Chosen, Loss, Unchosen, fixed_losses
from attnbench.measuring.rates import HOST_LIMITED
from attnbench.policy import Crossing, Entry, Place, Policy, Regret, pooled
from attnbench.report.terminal import plain_table
from attnbench.report.units import DASH
from attnbench.results.advice import listed, tokens
from attnbench.results.families import FRAMEWORKS
from attnbench.results.ratios import TOO_WIDE
from attnbench.results.sentences import counted, setback_sentences
from attnbench.results.standings import Setback

SHOWN_PICKS = 4
SHOWN_FIXED = 5
SHOWN_UNCHOSEN = 8


def print_policy(console: Console, policy: Policy, unchosen: Sequence[Unchosen]) -> None:
    """Print the tables, the crossings and the workloads without a choice, but not the closing sentence."""
    for place in policy.places:
        for title, entries in groupby(place.entries, key=lambda entry: class_title(place, entry)):
            console.print()
            console.print(f"[bold]{escape(title)}[/bold]")
            console.print(plain_table([_row(entry) for entry in entries]))
        for crossing in place.crossings:
            console.print(f"  {escape(crossing_text(crossing))}", soft_wrap=True)
    for one in unchosen[:SHOWN_UNCHOSEN]:
        line = f"[yellow]not chosen:[/yellow] {escape(f'{one.framework}, {one.workload}: {one.why}')}"
        console.print(line, soft_wrap=True)
    if len(unchosen) > SHOWN_UNCHOSEN:
        rest = counted(len(unchosen) - SHOWN_UNCHOSEN, "workload")
        console.print(f"[yellow]not chosen:[/yellow] {rest} more; --json lists them")


def class_title(place: Place, entry: Entry) -> str:
    """Return the title of a table: what its entries have in common."""
    at = entry.at
    dims = f"{at.head_dim}/{at.v_head_dim}" if at.v_head_dim else f"{at.head_dim}"
    facts = [FRAMEWORKS.get(place.framework, place.framework), place.device_name, at.pass_, at.dtype, at.mask]
    return " · ".join([*facts, f"{at.layout} heads of {dims}", *["softcap"] * at.softcap])


def _row(entry: Entry) -> dict[str, str]:
    at, use = entry.at, entry.use
    next_best = use.runner_up
    return {
        "tokens": f"{at.q_len:,}" if at.q_len == at.kv_len else f"{at.q_len:,} x {at.kv_len:,}",
        "batch": str(at.batch),
        "heads": f"{at.heads}" if at.heads == at.kv_heads else f"{at.heads}:{at.kv_heads}",
        "use": use.label,
        "regret": f"{use.regret:.3f}",
        "at most": f"{use.regret_high:.3f}" if use.regret_high <= TOO_WIDE else DASH,
        "next": DASH if next_best is None else f"{next_best.label} {next_best.ratio:.2f}x",
        "of": str(use.candidates),
    }


def crossing_text(crossing: Crossing) -> str:
    """Return "torch.sdpa-flash instead of torch.eager from about 640 tokens (512-1,024): PyTorch · ..."."""
    span = f"{crossing.low:,.0f}-{crossing.high:,.0f}"
    where = f"somewhere in {span} tokens" if crossing.tokens is None else f"about {tokens(crossing.tokens)} ({span})"
    return f"{crossing.above} instead of {crossing.below} from {where}: {crossing.track}"


def print_losses(console: Console, ground: Ground, first: Sequence[Loss] = ()) -> None:
    """Print the regret of single implementations used for everything, below that of `first`."""
    losses = [*first, *fixed_losses(ground)[:SHOWN_FIXED]]
    console.print()
    title = f"{FRAMEWORKS.get(ground.place.framework, ground.place.framework)} · {ground.place.device_name}"
    what = "the policy, and of one for everything" if first else "one for everything"
    console.print(f"[bold]{escape(title)}: regret of {what}[/bold]")
    rows: list[dict[str, str]] = []
    for loss in losses:
        cells, regret = (DASH, DASH, "0", ""), loss.regret
        if regret is not None:
            shapes, worst_at = f"{regret.shapes} of {regret.shapes + regret.missed}", regret.worst_at
            cells = (f"{regret.mean:.3f}", f"{regret.worst:.2f}", shapes, worst_at if regret.worst > 1 else "")
        rows.append(dict(zip(("", "regret", "worst", "shapes", "worst at"), (loss.name, *cells))))
    console.print(plain_table(rows))


def judgement(policy: Policy, losses: Sequence[Loss], setbacks: Sequence[Setback] = ()) -> str:
    """Return the closing sentence of a policy that was evaluated on runs, after what newer runs say of older times."""
    total = pooled(one.regret for one in losses)
    before = "".join(f"{sentence} " for sentence in setback_sentences(setbacks))
    if total is None:
        return f"{before}{policy.name} has no choice for any shape in these runs."
    missed = f"; no choice for {total.missed}" if total.missed else ""
    worst = f"worst {total.worst:.2f} at {total.worst_at}"
    return f"{before}{policy.name}: regret {total.mean:.3f} over {counted(total.shapes, 'shape')} ({worst}){missed}."


def closing(chosen: Chosen) -> str:
    """Return the closing sentence: what to run, its regret on the grid and off it, and doubts about the samples; before
    it what newer runs say of older times."""
    policy, before = chosen.policy, "".join(f"{sentence} " for sentence in setback_sentences(chosen.setbacks))
    if not policy.entries:
        return f"{before}No implementation could be chosen for any workload."
    on_grid, off_grid = pooled(one.on_grid for one in policy.places), pooled(one.held_out for one in policy.places)
    picks = "; ".join(_picks_text(place) for place in policy.places)
    kept = f" Chosen within: {policy.within}." if policy.within else ""
    count, total = chosen.unstable, len(policy.entries)
    doubts = f" {count} of {total} choices rest{'s' if count == 1 else ''} on unstable samples." if count else ""
    if limited := chosen.host_limited:
        names = listed(sorted({entry.use.label for entry, _ in limited}))
        many = f"{len(limited)} of {total} choices {'is' if len(limited) == 1 else 'are'} {HOST_LIMITED}"
        most = max(ratio for _, ratio in limited)
        doubts += f" {many} ({names}): the call takes up to {most:.1f}x the kernel time that was compared."
    return f"{before}{picks}; {_regrets_text(on_grid, off_grid)}.{kept}{doubts}"


def _picks_text(place: Place) -> str:
    """Describe the choices: by length if one class was measured at several lengths, else by number of shapes."""
    entries = place.entries
    alike = {(tuple(e.at.hard.items()), e.at.heads, e.at.kv_heads, e.at.batch) for e in entries}
    if len(alike) == 1 and len({entry.at.kv_len for entry in entries}) == len(entries):
        parts = [list(group) for _, group in groupby(entries, key=lambda entry: entry.use.label)]
        return ", ".join(f"{part[0].use.label} from {part[0].at.kv_len:,} tokens" for part in parts)
    counts = Counter(entry.use.label for entry in entries).most_common()
    parts = [f"{name} on {n}" for name, n in counts[:SHOWN_PICKS]]
    rest = sum(n for _, n in counts[SHOWN_PICKS:])
    return f"{listed([*parts, *([f'others on {rest}'] if rest else [])])} of {counted(len(entries), 'shape')}"


def _regrets_text(on_grid: Regret | None, off_grid: Regret | None) -> str:
    assert on_grid is not None
    text = f"regret {on_grid.mean:.3f} on the grid"
    if off_grid is None:
        return f"{text}, unknown off it (no shape has a neighbour)"
    missed = f", {off_grid.missed} without a neighbour" if off_grid.missed else ""
    return f"{text}, {off_grid.mean:.3f} held out (worst {off_grid.worst:.2f} at {off_grid.worst_at}{missed})"


def document(chosen: Chosen, path: object) -> dict[str, object]:
    """Return the document that `choose --json` prints."""
    policy = chosen.policy
    keys = _place_keys([*policy.places, *(ground.place for ground in chosen.grounds)])
    return {
        "policy": policy,
        "on_grid": {keys[place.key]: place.on_grid for place in policy.places},
        "fixed": {keys[ground.place.key]: fixed_losses(ground) for ground in chosen.grounds},
        "unchosen": chosen.unchosen,
        "host_limited": [
            {"use": entry.use.label, "workload": entry.use.measured, "ratio": ratio}
            for entry, ratio in chosen.host_limited
        ],
        "written": path,
        "closing": closing(chosen),
    }


def judgement_document(
    policy: Policy, found: Sequence[tuple[Ground, Loss]], setbacks: Sequence[Setback] = ()
) -> dict[str, object]:
    """Return the document that `choose --judge --json` prints."""
    keys = _place_keys([ground.place for ground, _ in found])
    return {
        "judged": policy.name,
        "regret": {keys[ground.place.key]: loss.regret for ground, loss in found},
        "fixed": {keys[ground.place.key]: fixed_losses(ground) for ground, _ in found},
        "closing": judgement(policy, [loss for _, loss in found], setbacks),
    }


def _place_keys(places: Sequence[Place]) -> dict[tuple[object, ...], str]:
    """Return device and framework of each place, by its key, with a number where several share both (other versions,
    threads or processors)."""
    found = {
        place.key: f"{place.device_name}/{place.framework}" for place in sorted(places, key=lambda one: repr(one.key))
    }
    names = list(found.values())
    return {
        key: f"{name}#{names[:n].count(name) + 1}" if names.count(name) > 1 else name
        for n, (key, name) in enumerate(found.items())
    }
