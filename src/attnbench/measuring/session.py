"""One cell, from build to samples: open (build, compile, verify, prove the path, weigh), warm up, then sample.

A worker holds several sessions of one workload open at once, so that its parent can interleave them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from attnbench.comparison import Block
from attnbench.frameworks import OUTPUTS, Framework, Inputs, Program, Programs
from attnbench.measuring import continued
from attnbench.measuring.alike import apart, spot
from attnbench.measuring.block import take_block
from attnbench.measuring.disguise import Wardrobe
from attnbench.measuring.draws import Draws
from attnbench.measuring.quality import quality_of
from attnbench.measuring.rates import cost_of
from attnbench.measuring.subject import Subject, Wrong
from attnbench.measuring.verify import examine, examine_again
from attnbench.registry import HERE, origin
from attnbench.spec import (
    ONLY_TIMED,
    Array,
    Call,
    Cell,
    Environment,
    Implementation,
    Memory,
    Ok,
    Ranks,
    VerifiedAt,
    Workload,
)
from attnbench.workloads.cost import demand
from attnbench.workloads.shrink import shrink

SHORT_NS = 1e6
"""Calls below this are published by kernel time: events also count the gaps around and between kernels, a few us for
one kernel and up to a tenth of an eager chain (results/h200/agreement.json)."""
WARM_UP_S = {"cpu": 0.05}
WARM_UP_GPU_S = 0.1
WARM_UP_LIMIT_S = 2.0
RECHECKS, SLOW_NS = 4, 1e9
SEEN_BEFORE = "taken in the first launch"
PARTS = {"forward": OUTPUTS["forward"], "backward": OUTPUTS["backward"]}
"""What the halves of a training step return."""


class FellBack(Exception):
    """The path that was asked for is not the one that ran."""


@dataclass(frozen=True)
class Options:
    """How a cell is opened."""

    thorough: bool = False
    measure: bool = True
    clock: str | None = None
    seed: int = 0
    again: bool = False
    """Examined, weighed and profiled before, in another process: only check that its outputs are right here too."""


class Stages:
    """Wall time by stage."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add a block's wall time to its stage."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.spent_ns[stage] = self.spent_ns.get(stage, 0) + time.perf_counter_ns() - start


class Session:
    """One implementation on one workload, alive on a device."""

    slow_clock: bool
    parts: tuple[str, ...]
    call_ns: float

    def __init__(
        self,
        framework: Framework,
        environment: Environment,
        implementation: Implementation,
        cell: Cell,
        options: Options,
    ) -> None:
        framework = implementation.apparatus(framework, cell.config)
        self._framework, self._environment, self._device = framework, environment, environment.device
        self._implementation, self.cell, self._options = implementation, cell, options
        layout = implementation.layout
        self._wardrobe = Wardrobe(framework, cell.workload, layout, np.random.default_rng([options.seed, 1]))
        self.clock_ns = 0
        """What the clock took for the last samples: the part of a visit that is sampling."""
        self.check_ns = 0
        """What holding the last of them against the verified result took."""
        self.repeats = True
        """Whether every checked call so far gave the same bits."""

    def open(self, draws: Draws) -> Ok:
        """Everything before timing; raises Unsupported, Wrong, FellBack, or what the implementation raises."""
        self._draws = draws
        stages = Stages()
        with stages.timed("build"):
            self.programs, call_lse = self._build(self.cell.workload, draws)
            first_call_ns = self._time_first_call()
        with stages.timed("verify"):
            subject = self._subject(self.cell.workload, self.programs, draws, call_lse)
            again = self._options.again
            self.findings = examine_again(subject) if again else examine(subject, self._options.thorough)
            verified_at = self.findings.verified_at if again else self._verify_gradients_smaller()
            if self._options.thorough and not again:
                self._add_properties(continued.check(subject, *self._verified_output(), self._call_for))
            figures = {} if again else quality_of(subject, self._implementation, self.cell.config, self.findings.errors)
        with stages.timed("profile"):
            kernels, kernels_reason = (None, SEEN_BEFORE) if again else self._profiled()
            memory = Memory(peak_bytes=None, reason=SEEN_BEFORE) if again else self._weigh()
            ranks = None if again else self._framework.ranks(self.programs.main, self._inputs[0], self._device)
        record = Ok(
            implementation=self.cell.implementation,
            workload=self.cell.workload,
            config=self.cell.config,
            environment=self._environment,
            errors=self.findings.errors,
            verified_at=verified_at,
            deterministic=self.findings.deterministic,
            memory=memory,
            cost=cost_of(self.cell.workload, None, None, figures.get("work", 1.0)),
            compile_ns=self.programs.compile_ns,
            first_call_ns=first_call_ns,
            kernels=None if kernels is None else tuple(kernels),
            kernels_reason=kernels_reason,
            approximate=self._implementation.approximate,
            quality=figures,
            ranks=ranks,
            notes=self._notes(ranks),
        )
        return msgspec.structs.replace(record, spent_ns=stages.spent_ns)

    @property
    def output_names(self) -> tuple[str, ...]:
        """What the main program returns."""
        return OUTPUTS[self.cell.workload.pass_]

    @property
    def timed(self) -> bool:
        """Whether this cell may be timed."""
        return self._options.measure and not self._implementation.verify_only

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Samples of one part, then a check that the last call really computed its answer."""
        program = self.programs.main if part == "main" else self.programs.parts[part]
        start = time.perf_counter_ns()
        taken = self._clock.sample(self._wardrobe.disguised(program), self._inputs, count, calls)
        self.clock_ns = time.perf_counter_ns() - start
        self._check_last(taken.last, taken.last_input, part)
        self.check_ns = time.perf_counter_ns() - start - self.clock_ns
        return taken.ns

    def sample_other(self, clock: str, count: int) -> list[float]:
        """Samples of the main program by another clock, to lay beside the published one."""
        start = time.perf_counter_ns()
        program = self._wardrobe.disguised(self.programs.main)
        taken = self._framework.clock(clock, self._device).sample(program, self._inputs, count)
        self.clock_ns, self.check_ns = time.perf_counter_ns() - start, 0
        return taken.ns

    def block(self, calls: int) -> Block:
        """One turn in a comparison: so many calls by every metric, then the same check as after samples."""
        program = self._wardrobe.disguised(self.programs.main)
        block, taken = take_block(self._framework, self._device, self._clock, program, self._inputs, calls)
        self._check_last(taken.last, taken.last_input)
        return block

    def trace(self, folder: Path) -> Path:
        """Hand one call to the framework's profiler."""
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]+", "_", self.cell.id)
        return self._framework.trace(self.programs.main, self._inputs[0], folder / f"{name}.json", self._device)

    @property
    def clock_name(self) -> str:
        """Clock of the published samples."""
        return self._clock.name

    @property
    def other_clocks(self) -> tuple[str, ...]:
        """Clocks worth laying beside it."""
        names = self._framework.clocks(self._device)
        return tuple(name for name in names if name not in (self._clock.name, "graph"))

    @property
    def _inputs(self) -> list[Inputs]:
        return self._draws.inputs(self._implementation.layout)

    def _build(self, workload: Workload, draws: Draws):  # noqa: ANN202
        call = self._implementation.build(workload, self.cell.config)
        programs = self._framework.programs(call, workload.pass_, draws.inputs(self._implementation.layout)[0])
        lse = None if workload.pass_ == "backward" else self._implementation.build_lse(workload, self.cell.config)
        return programs, lse

    def _subject(self, workload: Workload, programs: Programs, draws: Draws, lse) -> Subject:  # noqa: ANN001
        declared = self._implementation.declared_error if self._implementation.approximate else None
        return Subject(
            self._framework, self._device, workload, self._implementation.layout, programs, draws, lse, declared
        )

    def _verified_output(self) -> tuple[Array, float]:
        """On the first input set, and its allowed error; of a backward pass there is none, and nothing asks for it."""
        return self.findings.good[0][0], self.findings.limits("out", self.cell.workload.dtype).relative

    def _call_for(self, workload: Workload) -> Call | None:
        """The same implementation on another workload, where it claims that one. What somebody tries out is judged by
        what it was given to do, an installed one by what it claims."""
        if origin(self.cell.implementation) == HERE or self._implementation.approximate:
            return None
        if refusal(self._implementation, workload, self._environment) is not None:
            return None
        return self._implementation.build(workload, self.cell.config)

    def _add_properties(self, held: tuple[str, ...]) -> None:
        errors = self.findings.errors
        errors = msgspec.structs.replace(errors, properties=(*errors.properties, *held))
        self.findings = replace(self.findings, errors=errors)

    def _time_first_call(self) -> int:
        prepared = self.programs.main.prepare(self._inputs[0])
        self._framework.wait(prepared)
        start = time.perf_counter_ns()
        output = self.programs.main.run(prepared)
        self._framework.wait(output)
        return time.perf_counter_ns() - start

    def _profiled(self) -> tuple[list[str] | None, str | None]:
        kernels, reason = self._framework.kernels(self.programs.main, self._inputs[0], self._device)
        self._prove_path(kernels)
        return kernels, reason

    def _verify_gradients_smaller(self) -> VerifiedAt:
        """Where no head's gradients fit the reference's budget, prove them on the same problem made small."""
        workload, verified_at = self.cell.workload, self.findings.verified_at
        if not workload.needs_gradients or self._draws.gradient_heads:
            return verified_at
        small = shrink(workload)
        draws = Draws(self._framework, self._device, small, self._options.seed + 1000)
        programs, lse = self._build(small, draws)
        found = examine(self._subject(small, programs, draws, lse), self._options.thorough)
        self.findings = replace(self.findings, errors=msgspec.structs.replace(
            self.findings.errors, backward=found.errors.backward, backward_allowed=found.errors.backward_allowed
        ), backward=found.backward)  # fmt: skip
        share = found.verified_at.backward_share
        return msgspec.structs.replace(verified_at, backward_shape=found.verified_at.shape, backward_share=share)

    def _prove_path(self, kernels: list[str] | None) -> None:
        if kernels is None:
            return
        seen = "; ".join(kernels[:8])
        for pattern in self._implementation.forbids:
            if hit := next((name for name in kernels if re.search(pattern, name)), None):
                raise FellBack(f"fell back: {hit} ran, which is not {self._implementation.name}")
        for wanted in self._implementation.proofs(self.cell.workload.pass_):
            if any(re.search(pattern, name) for pattern in wanted for name in kernels):
                continue
            raise FellBack(f"fell back: nothing like {' or '.join(wanted)} ran, but {seen}")

    def _weigh(self) -> Memory:
        need = demand(self.cell.workload)
        stored = need.scores_bytes if self._implementation.materialises_scores else 0
        peak = self._framework.peak(self.programs.main, self._inputs[0], self._device, self.programs.temp_bytes)
        return Memory(
            peak_bytes=peak.bytes,
            reason=peak.reason,
            theory_bytes=need.output_bytes + stored,
            scores_bytes=need.scores_bytes,
            kv_cache_bytes=need.kv_cache_bytes,
            reserved_bytes=peak.reserved,
            fragmentation=peak.fragmentation,
            method=peak.method,
        )

    def _notes(self, ranks: Ranks | None) -> tuple[str, ...]:
        why = self._implementation.verify_only
        notes = (f"verified, not timed: {why}",) if why else ()
        return notes if ranks is None or ranks.reason is None else (*notes, ranks.reason)

    def warm_up(self, clock: str | None = None, brief: bool = False) -> None:
        """Until two successive windows agree within 2 %, and for the least time the device needs; `brief`: it is warm,
        only the clock is another one.

        The clock is the one named, the one asked of the run, or the framework's first, kernel times for short calls.
        """
        names = self._framework.clocks(self._device)
        chosen = clock or self._options.clock
        self._clock = self._framework.clock(chosen or names[0], self._device)
        program = self._wardrobe.disguised(self.programs.main)
        least = WARM_UP_S.get(self._device, WARM_UP_GPU_S)
        start, windows = time.perf_counter(), []
        while True:
            count = 1 if not windows else max(1, min(20, int(least / 4 * 1e9 / max(windows[-1], 1))))
            windows.append(float(np.median(self._clock.sample(program, self._inputs, count).ns)))
            spent = time.perf_counter() - start
            settled = len(windows) > 2 and abs(windows[-1] / windows[-2] - 1) < 0.02
            if brief or (settled and spent >= least) or spent > WARM_UP_LIMIT_S:
                break
        self.call_ns = windows[-1]
        if chosen is None and self._clock.name == "events" and self.call_ns < SHORT_NS and "kernel" in names:
            self._clock = self._framework.clock("kernel", self._device)
        if not brief:
            self._recheck(program)
        self.slow_clock = self._clock.name in ("kernel", "graph")
        self.parts = ("main", *self.programs.parts)

    def _recheck(self, program: Program) -> None:
        """A few calls whose inputs lie where the last ones lay: an answer stored under an address is stale here."""
        for _ in range(RECHECKS if self.call_ns < SLOW_NS else 1):
            output = program.run(program.prepare(self._inputs[0]))
            self._framework.wait(output)
            self._check_last(self._framework.snapshot(output), 0)
            del output

    def _check_last(self, output: tuple[Array, ...], which: int, part: str = "main") -> None:
        """The last timed call's results, freed of their disguise, against the verified ones."""
        worn, verified = self._inputs[which], dict(zip(self.output_names, self.findings.good[which]))
        names = self.output_names if part == "main" else PARTS[part]
        for name, array in zip(names, output):
            found, good = self._wardrobe.undressed(name, array, worn), verified[name]
            if self._framework.same_bits(found + 0.0, good + 0.0):
                continue
            self.repeats = self.repeats and part != "main"
            self._require_close(name, found, good)

    def _require_close(self, name: str, found: Array, good: Array) -> None:
        """Other bits are fine when every row agrees as well as the verified error lets it."""
        dtype = self.cell.workload.dtype
        differs = apart(self._framework, found, good, self.findings.limits(name, dtype), dtype)
        if differs is not None:
            where = spot(differs, self._implementation.layout)
            raise Wrong(
                f"{ONLY_TIMED} {name}, right when checked: {where} differs by {differs.share:.1e}, "
                f"{differs.allowed:.1e} allowed"
            )


def refusal(implementation: Implementation, workload: Workload, environment: Environment) -> str | None:
    """Why a cell will not run here: another step, not available, or not supported."""
    if workload.step != implementation.step:
        mine = f"the step {implementation.step}" if implementation.step else "attention alone"
        return f"computes {mine}, not {f'the step {workload.step}' if workload.step else 'attention alone'}"
    if workload.step and workload.pass_ == "backward":
        return "a step is run forward or as a whole training step: its backward pass alone is not timed"
    return implementation.available(environment) or implementation.supports(workload, environment)
