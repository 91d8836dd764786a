"""One cell, from build to samples: open (build, compile, verify, list kernels, measure memory), warm up, then sample.

A worker holds several sessions of one workload open at once, so that its parent can interleave them.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from attnbench.comparison import Block
from attnbench.frameworks import OUTPUTS, Clock, Framework, Inputs
from attnbench.frameworks.base import Peak
from attnbench.frameworks.host_memory import resident_growth
from attnbench.measuring.rates import cost_of
from attnbench.measuring.sampling import take_block
from attnbench.registry import HERE, origin
from attnbench.spec import (
    Array,
    Call,
    Cell,
    Environment,
    Implementation,
    Memory,
    Ok,
    Partial,
    Ranks,
    VerifiedAt,
    Workload,
)
from attnbench.verifying.checks import examine, examine_after, examine_again
from attnbench.verifying.draws import Draws
from attnbench.verifying.input_transforms import CallInputs, Transforms
from attnbench.verifying.invariants import require_result_kept
from attnbench.verifying.lse_and_partial import quality_of
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.timed_calls import Boxes, TimedCalls, TimedChecks
from attnbench.workloads.cost import demand
from attnbench.workloads.suites import shrink

SHORT_NS = 1e6
"""Time of a call below which kernel time is published: events also count the gaps around and between kernels, a few us
for one kernel and up to a tenth of an eager chain (results/h200/agreement.json)."""
WARM_UP_S = {"cpu": 0.05}
WARM_UP_GPU_S = 0.1
WARM_UP_LIMIT_S = 2.0
RECHECKS, SLOW_NS = 4, 1e9
SAMPLES_PER_KNOWN = 8
"""Samples of a visit from which on every second visit has one of a known result; shorter visits have it less often."""
SEEN_BEFORE = "taken in the first launch"
ONLY_LATER = "right when checked, wrong after"
UNSEEN_SHARE, UNSEEN_BYTES = 0.25, 1 << 24
"""Growth of the process beyond a counted peak (share of the peak, bytes) above which the peak is not published; the
bytes are also the least growth that counts as kept between calls."""
LEAST_KEPT = 1 << 20
"""Least bytes that count as kept between calls on an accelerator, whose allocator counts exactly."""
PARTS = {"forward": OUTPUTS["forward"], "backward": OUTPUTS["backward"]}
"""Outputs of the halves of a training step."""


class FellBack(Exception):
    """Another path ran than the one that was asked for."""


@dataclass(frozen=True)
class Options:
    """Options for opening a cell."""

    thorough: bool = False
    measure: bool = True
    clock: str | None = None
    seed: int = 0
    again: bool = False
    """Whether another process has examined the cell, so that only its outputs are checked here."""


@contextmanager
def stage(name: str, spent_ns: dict[str, int]) -> Iterator[None]:
    """Add a block's wall time to the stage of that name."""
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        spent_ns[name] = spent_ns.get(name, 0) + time.perf_counter_ns() - start


class Session:
    """An open cell: one implementation on one workload, on one device."""

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
        given, framework = framework, implementation.apparatus(framework, cell.config)
        self._own_apparatus = framework is not given
        self._framework, self._environment, self._device = framework, environment, environment.device
        self._implementation, self.cell, self._options = implementation, cell, options
        self._rng = np.random.default_rng([options.seed, 1])
        self._transforms = Transforms(framework, self._device, cell.workload, implementation.layout, self._rng)
        self._compared_whole: set[str] = set()
        """Parts of which a timed call has been compared as a whole."""
        self._held_result: tuple[Array, ...] = ()
        self._held_bits: list[bytes] = []
        """Digests of a result that no later call may change, if the framework's arrays can be changed."""
        self._kept_bytes = 0
        """Bytes that the implementation holds between calls: the growth of the process since before it was built."""
        self._calls = 0
        """Number of calls with inputs of their own."""
        self.clock_ns = 0
        """Time that the clock took for the last samples."""
        self.check_ns = 0
        """Time that checking some of the last samples' calls took."""
        self.waited: float | None = None
        """Share of the last samples that threads may have waited for a core."""

    def open(self, draws: Draws) -> Ok:
        """Build, check and profile the cell, and return its record without times.

        Raises Unsupported, Wrong, FellBack, or whatever the implementation raises.
        """
        self._draws = draws
        spent_ns: dict[str, int] = {}
        with stage("build", spent_ns):
            before = self._held()
            subject = self._examined = self._subject(self.cell.workload, draws)
            self.programs = subject.programs
            copied = self._copied(self._inputs[0])
            first_call_ns, of_first_call = self._time_first_call(copied)
            if copied is not self._inputs[0] and not all(map(self._framework.same_bits, copied, self._inputs[0])):
                raise Wrong("changed its inputs")
            del copied
            gc.collect()
            after = self._framework.held(self._device)
            kept = 0 if before is None or after is None else after - before - self._held_by_copies(of_first_call)
            self._kept_bytes = kept if kept >= (UNSEEN_BYTES if self._device == "cpu" else LEAST_KEPT) else 0
        again = self._options.again
        with stage("verify", spent_ns), self._framework.precision(self.cell.workload.dtype):
            if again:
                self.findings = examine_again(subject)
            else:
                self.findings = examine(subject, self._options.thorough, self._call_for, self._partial)
            verified_at = self.findings.verified_at if again else self._verify_gradients_smaller()
            figures = {} if again else quality_of(subject, self._implementation, self.cell.config, self.findings.errors)
            for program in (self.programs.main, *self.programs.parts.values()):
                require_result_kept(subject, program)
        with stage("profile", spent_ns):
            kernels = (None, SEEN_BEFORE) if again else self._profiled()
            memory = Memory(peak_bytes=None, reason=SEEN_BEFORE) if again else self._weigh()
            ranks = None if again else self._framework.ranks(self.programs.main, self._inputs[0], self._device)
        if not draws.intact(self._implementation.layout):
            raise Wrong("changed its inputs")
        self._checks = self._checks_of_timed_calls()
        with stage("verify", spent_ns):
            self._checks.compare_first(dict(zip(self.output_names, of_first_call)))
            del of_first_call
            self._hold_a_result()
        return self._record(verified_at, memory, first_call_ns, spent_ns, kernels, figures, ranks)

    def _record(
        self,
        verified_at: VerifiedAt,
        memory: Memory,
        first_call_ns: int,
        spent_ns: dict[str, int],
        kernels: tuple[list[str] | None, str | None],
        figures: dict[str, float],
        ranks: Ranks | None,
    ) -> Ok:
        why = self._implementation.verify_only
        notes = (*self.findings.notes, *([f"verified, not timed: {why}"] if why else ()))
        return Ok(
            **structs.asdict(self.cell),
            environment=self._environment,
            errors=self.findings.errors,
            verified_at=verified_at,
            deterministic=self.findings.deterministic,
            memory=memory,
            cost=cost_of(self.cell.workload, None, None, figures.get("work", 1.0)),
            compile_ns=self.programs.compile_ns,
            first_call_ns=first_call_ns,
            kernels=None if kernels[0] is None else tuple(kernels[0]),
            kernels_reason=kernels[1],
            approximate=self._implementation.approximate,
            quality=figures,
            ranks=ranks,
            notes=notes if ranks is None or ranks.reason is None else (*notes, ranks.reason),
            spent_ns=spent_ns,
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        return OUTPUTS[self.cell.workload.pass_]

    @property
    def timed(self) -> bool:
        return self._options.measure and not self._implementation.verify_only

    @property
    def repeats(self) -> bool:
        """Whether every call that was compared as a whole gave the same bits so far."""
        return self._checks.repeats

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Return samples of one part, and check that timed calls drawn at random computed the right results."""
        return self._visit(self._clock, part, count, calls)

    def sample_other(self, clock: str, count: int) -> list[float]:
        """Return samples of the main program by another clock than the published one."""
        return self._visit(self._framework.clock(clock, self._device), "main", count, 1)

    def _visit(self, clock: Clock, part: str, count: int, calls: int) -> list[float]:
        """Return the samples of a visit and check some of its calls.

        Some visits have an extra sample at a random place, whose calls have a known result and are compared as a whole.
        It is left out of the returned samples, since an implementation could know that result too.
        """
        start = time.perf_counter_ns()
        program, names = self.programs.main, self.output_names
        if part != "main":
            program, names = self.programs.parts[part], PARTS[part]
        known = self._wants_known(part, count)
        samples = count + (known and not clock.repeats_inputs)
        inputs, at = self._call_inputs(samples * calls), int(self._rng.integers(samples))
        if known:
            inputs.known = range(samples * calls) if clock.repeats_inputs else range(at * calls, (at + 1) * calls)
        watch = self._watch(names, inputs, samples, several=not clock.repeats_inputs)
        ns, self.waited = clock.sample(program, inputs, samples, calls, watch)
        self.clock_ns = time.perf_counter_ns() - start
        self._checks.judge(watch, part == "main")
        self.check_ns = time.perf_counter_ns() - start - self.clock_ns
        return ns[:at] + ns[at + 1 :] if samples > count else ns

    def _wants_known(self, part: str, count: int) -> bool:
        """Return whether a visit has calls of a known result: the first visit of each part, and then few enough for
        their cost."""
        first = part not in self._compared_whole
        self._compared_whole.add(part)
        return first or self._rng.random() < min(0.5, count / SAMPLES_PER_KNOWN)

    def _checks_of_timed_calls(self) -> TimedChecks:
        boxes = Boxes(self._framework, self.cell.workload, self._implementation.layout)
        return TimedChecks(boxes, self._device, self._inputs, self.findings, self.output_names, self._transforms)

    def _call_inputs(self, calls: int) -> CallInputs:
        self._calls += calls
        return CallInputs(self._inputs, self._transforms, calls, int(self._rng.integers(len(self._inputs))))

    def _watch(self, names: tuple[str, ...], inputs: CallInputs, samples: int, several: bool = True) -> TimedCalls:
        return TimedCalls(self._checks.boxes, names, inputs, samples, several, self._rng)

    def block(self, calls: int) -> Block:
        """Return one turn in a comparison: a number of calls by every metric, checked like samples.

        A call of a known result comes before or after the turn, at random.
        """
        known, first = self._wants_known("main", calls), self._rng.random() < 0.5
        if known and first:
            self._compare_known()
        inputs = self._call_inputs(calls)
        samples = calls if self._clock.name != "wall" and self._device != "cpu" else 1
        watch = self._watch(self.output_names, inputs, samples, several=not self._clock.repeats_inputs)
        block = take_block(self._framework, self._device, self._clock, self.programs.main, inputs, calls, watch)
        if known and not first:
            self._compare_known()
        self._checks.judge(watch)
        return block

    def examine_after(self) -> None:
        """Check the verified properties again after the last sample; raises Wrong.

        A kernel may change its path after some calls (by calibration or tuning), and timed calls are only held to a
        multiple of what is allowed here.
        """
        try:
            with self._framework.precision(self.cell.workload.dtype):
                self._examine_outputs_again()
        except Wrong as wrong:
            raise Wrong(f"{ONLY_LATER} {self._calls} calls: {wrong}", wrong.errors, wrong.detail) from wrong

    def _hold_a_result(self) -> None:
        """Keep the result of a call until the last sample: a ring of output buffers would write over it at last."""
        framework = self._framework
        if framework.overwrites:
            self._held_result = run(self.programs.main, self._inputs[0])
            framework.wait(self._held_result)
            self._held_bits = [framework.checksum(array) for array in self._held_result]

    def _examine_outputs_again(self) -> None:
        if self._held_bits != [self._framework.checksum(array) for array in self._held_result]:
            raise Wrong("overwrites the result of an earlier call")
        examine_after(self._examined)

    def trace(self, folder: Path) -> Path:
        """Write a trace of one call with the framework's profiler, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]+", "_", self.cell.id)
        inputs = self._call_inputs(1)[0]
        return self._framework.trace(self.programs.main, inputs, folder / f"{name}.json", self._device)

    @property
    def clock_name(self) -> str:
        return self._clock.name

    @property
    def other_clocks(self) -> tuple[str, ...]:
        """Clocks whose times are shown beside the published one."""
        names = self._framework.clocks(self._device)
        return tuple(name for name in names if name not in (self._clock.name, "graph"))

    @property
    def _inputs(self) -> list[Inputs]:
        return self._draws.inputs(self._implementation.layout)

    def _subject(self, workload: Workload, draws: Draws) -> Subject:
        """Build the implementation's call for a workload, and compile its programs."""
        mine, config = self._implementation, self.cell.config
        call = mine.build(workload, config)
        programs = self._framework.programs(call, workload.pass_, self._copied(draws.inputs(mine.layout)[0]))
        lse = None if workload.pass_ == "backward" else mine.build_lse(workload, config)
        declared = mine.declared_error if mine.approximate else None
        facts = (programs, draws, lse, declared, mine.lse_gradient)
        return Subject(self._framework, self._device, workload, mine.layout, *facts)

    def _call_for(self, workload: Workload) -> Call | None:
        """Return the implementation's call for another workload; None if it does not claim to support that one.

        A function that is being tried out need not support other workloads than the one it was given, so it has none.
        """
        if origin(self.cell.implementation) == HERE or self._implementation.approximate:
            return None
        if refusal(self._implementation, workload, self._environment) is not None:
            return None
        return self._implementation.build(workload, self.cell.config)

    def _partial(self) -> Partial | None:
        """Return the partial form of an exact implementation, if it has one."""
        approximate = self._implementation.approximate
        return None if approximate else self._implementation.partial(self.cell.workload, self.cell.config)

    def _copied(self, inputs: Inputs) -> Inputs:
        """Return copies of inputs, for calls that are not watched and could change them, such as the first."""
        return Inputs(*self._framework.snapshot(tuple(inputs))) if self._framework.overwrites else inputs

    def _time_first_call(self, inputs: Any) -> tuple[int, tuple[Any, ...]]:
        """Return the time of the first call and a copy of its outputs, which later calls cannot correct."""
        prepared = self.programs.main.prepare(inputs)
        self._framework.wait(prepared)
        start = time.perf_counter_ns()
        output = self.programs.main.run(prepared)
        self._framework.wait(output)
        spent_ns = time.perf_counter_ns() - start
        # What is no array of the framework is refused later, with a reason.
        arrays = isinstance(output, tuple) and all(map(self._framework.owns, output))
        return spent_ns, self._framework.snapshot(output) if arrays else output

    def _held_by_copies(self, arrays: tuple[Any, ...]) -> int:
        """Return by how much copies of such arrays make grow what the process holds."""
        if not isinstance(arrays, tuple) or not all(map(self._framework.owns, arrays)):
            return 0
        before = self._framework.held(self._device)
        copies = self._framework.snapshot(arrays)
        self._framework.wait(copies)
        after = self._framework.held(self._device)
        return 0 if before is None or after is None else after - before

    def _profiled(self) -> tuple[list[str] | None, str | None]:
        kernels, reason = self._framework.kernels(self.programs.main, self._inputs[0], self._device)
        self._prove_path(kernels)
        return kernels, reason

    def _verify_gradients_smaller(self) -> VerifiedAt:
        """Return the verified shape; if no head's gradients fit the reference's budget, check them on a smaller
        shape."""
        workload, verified_at = self.cell.workload, self.findings.verified_at
        if not workload.needs_gradients or self._draws.gradient_heads:
            return verified_at
        small = shrink(workload)
        draws = Draws(self._framework, self._device, small, self._options.seed + 1000)
        found = examine(self._subject(small, draws), self._options.thorough)
        of_gradients = {"backward": found.errors.backward, "backward_allowed": found.errors.backward_allowed}
        errors = structs.replace(self.findings.errors, **of_gradients)
        self.findings = replace(self.findings, errors=errors, backward=found.backward)
        share = found.verified_at.backward_share
        return structs.replace(verified_at, backward_shape=found.verified_at.shape, backward_share=share)

    def _prove_path(self, kernels: list[str] | None) -> None:
        if kernels is None:
            return
        for pattern in self._implementation.forbids:
            if hit := next((name for name in kernels if re.search(pattern, name)), None):
                raise FellBack(f"fell back: {hit} ran, which is not {self._implementation.name}")
        for wanted in self._implementation.proofs(self.cell.workload.pass_):
            if not any(re.search(pattern, name) for pattern in wanted for name in kernels):
                raise FellBack(f"fell back: no kernel like {' or '.join(wanted)} ran, only {'; '.join(kernels[:8])}")

    def _held(self) -> int | None:
        """Return the bytes that the process holds after the inputs are drawn and libraries have made their
        workspaces."""
        self._framework.wait(tuple(self._inputs[0]))
        if self._device != "cpu" and self._framework.held(self._device) is not None:
            product = self._framework.matmul(64, self.cell.workload.dtype, self._device)
            self._framework.wait(run(product, self._inputs[0]))
        gc.collect()
        return self._framework.held(self._device)

    def _peak(self) -> Peak:
        """Return the peak memory of one call, including what is kept between calls.

        On a CPU the figure is compared with the growth of the process, which covers the memory of every library: if the
        figure is known to be too small, none is returned.
        """
        program, inputs = self.programs.main, self._inputs[0]
        peak = self._framework.peak(program, inputs, self._device, self.programs.temp_bytes)
        if peak.bytes is None:
            return peak
        if self._device == "cpu" and not self._own_apparatus:
            prepared = program.prepare(inputs)
            self._framework.wait(prepared)
            grown = resident_growth(lambda: self._framework.wait(program.run(prepared)))
            if grown is not None and grown > (1 + UNSEEN_SHARE) * peak.bytes + UNSEEN_BYTES:
                name, counted = self._framework.name, f"{peak.bytes / 1e6:.0f} MB"
                words = f"{name} counted {counted}, the process grew by at least {grown / 1e6:.0f} MB"
                return Peak(None, f"the peak is incomplete: {words}; the rest is memory that {name} does not count")
        if not self._kept_bytes:
            return peak
        words = f"{peak.method}, and {self._kept_bytes / 1e6:.0f} MB that it keeps between calls"
        return peak._replace(bytes=peak.bytes + self._kept_bytes, method=words)

    def _weigh(self) -> Memory:
        need = demand(self.cell.workload)
        stored = need.scores_bytes if self._implementation.materialises_scores else 0
        peak = self._peak()
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

    def warm_up(self, clock: str | None = None, brief: bool = False) -> None:
        """Call until two successive windows agree within 2 % and the device had its least time; `brief` only sets the
        clock.

        The clock is the one named, the one requested for the run, or the framework's first; short calls are timed by
        kernel time.
        """
        names = self._framework.clocks(self._device)
        chosen = clock or self._options.clock
        self._clock = self._framework.clock(chosen or names[0], self._device)
        program = self.programs.main
        least = WARM_UP_S.get(self._device, WARM_UP_GPU_S)
        start, windows = time.perf_counter(), []
        while True:
            count = 1 if not windows else max(1, min(20, int(least / 4 * 1e9 / max(windows[-1], 1))))
            windows.append(float(np.median(self._clock.sample(program, self._call_inputs(count), count).ns)))
            spent = time.perf_counter() - start
            settled = len(windows) > 2 and abs(windows[-1] / windows[-2] - 1) < 0.02
            if brief or (settled and spent >= least) or spent > WARM_UP_LIMIT_S:
                break
        self.call_ns = windows[-1]
        if chosen is None and self._clock.name == "events" and self.call_ns < SHORT_NS and "kernel" in names:
            self._clock = self._framework.clock("kernel", self._device)
        if not brief:  # the inputs lie where the last ones lay, so that a result stored by address is found
            for _ in range(RECHECKS if self.call_ns < SLOW_NS else 1):
                self._compare_known()
        self.slow_clock = self._clock.name in ("kernel", "graph")
        self.parts = ("main", *self.programs.parts)

    def _compare_known(self) -> None:
        """Make one untimed call with a known result and compare its whole output."""
        inputs = self._call_inputs(1)
        inputs.known = range(1)
        output = run(self.programs.main, inputs[0])
        self._framework.wait(output)
        self._checks.compare_whole(*inputs.used[0], dict(zip(self.output_names, output)))


def refusal(implementation: Implementation, workload: Workload, environment: Environment) -> str | None:
    """Return why a cell will not run here (another step, not available, not supported), or None."""
    if workload.step != implementation.step:
        mine = f"the step {implementation.step}" if implementation.step else "attention alone"
        return f"computes {mine}, not {f'the step {workload.step}' if workload.step else 'attention alone'}"
    if workload.step and workload.pass_ == "backward":
        return "a step is run forward or as a whole training step: its backward pass alone is not timed"
    return implementation.available(environment) or implementation.supports(workload, environment)
