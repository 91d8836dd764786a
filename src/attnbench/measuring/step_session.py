"""A cell whose workload is a training or inference step around attention: drawn, checked and timed as its kind says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnbench.frameworks import Framework, Programs
from attnbench.measuring.session import Options, Session, stage
from attnbench.spec import Array, Cell, Environment, Errors, Ok, VerifiedAt, Workload
from attnbench.steps import StepImplementation, Values, kind_of
from attnbench.verifying.draws import SETS, Draws
from attnbench.verifying.input_transforms import Transform, Transforms
from attnbench.verifying.subject import Findings, Wrong, run
from attnbench.verifying.tolerance import BACKWARD_FACTOR, FORWARD_FACTOR, Compared, Limits, compare

NOTHING = np.ones(1, np.float32)


class Unchanged(Transforms):
    """Transforms that leave inputs as they were drawn, since the result of a step on other inputs is not known."""

    def fresh(self) -> Transform:
        return Transform(NOTHING, NOTHING, NOTHING, NOTHING, known=True)

    known = fresh

    def apply(self, inputs: Any, transform: Transform) -> Any:
        del transform
        return inputs

    def undo(self, name: str, array: Array, transform: Transform) -> Array:
        del name, transform
        return array


class StepSession(Session):
    """An open cell of a step."""

    def __init__(
        self,
        framework: Framework,
        environment: Environment,
        implementation: StepImplementation,
        cell: Cell,
        options: Options,
    ) -> None:
        super().__init__(framework, environment, implementation, cell, options)
        self._maker, self._kind = implementation, kind_of(cell.workload.step)
        self._transforms = Unchanged(framework, self._device, cell.workload, implementation.layout, self._rng)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self._kind.outputs(self.cell.workload)

    @property
    def _inputs(self) -> list[Any]:
        return self._states

    def open(self, draws: Draws | None = None) -> Ok:
        """Build, check and profile the cell, and return its record without times.

        Raises Unsupported, Wrong, FellBack, or whatever the implementation raises.
        """
        del draws
        spent_ns: dict[str, int] = {}
        workload = self.cell.workload
        with stage("build", spent_ns):
            values = [self._kind.draw(workload, SETS * self._options.seed + n) for n in range(SETS)]
            self._states = [self._state(workload, one) for one in values]
            self.programs = self._programs(workload, self._state(workload, values[0]))
            first_call_ns, _ = self._time_first_call(self._state(workload, values[0]))
        with stage("verify", spent_ns):
            small = self._kind.small(workload)
            if small == workload:
                errors, forward, backward = self._check(workload, values, self.programs, self._states)
            else:
                drawn = [self._kind.draw(small, SETS * self._options.seed + n) for n in range(SETS)]
                states = [self._state(small, one) for one in drawn]
                errors, forward, backward = self._check(small, drawn, self._programs(small, states[0]), states)
            good = [self._finished(self.programs, state) for state in self._states]
            again = self._finished(self.programs, self._states[0])
            deterministic = all(self._framework.same_bits(x, y) for x, y in zip(good[0], again))
            shape = {name: value for name, value in small.axes.items() if isinstance(value, int)}
            gradients = {"backward_shape": shape, "backward_share": 1.0} if small.needs_gradients else {}
            verified_at = VerifiedAt(shape=shape, share=1.0, **gradients)
            self.findings = Findings(errors, verified_at, deterministic, good, forward, backward)
        self._checks = self._checks_of_timed_calls()
        with stage("profile", spent_ns):
            kernels = self._profiled()
            memory = self._weigh()
        return self._record(verified_at, memory, first_call_ns, spent_ns, kernels, {}, None)

    def _examine_outputs_again(self) -> None:
        """Compare the step on both input sets with its verified outputs."""
        for which, state in enumerate(self._states):
            outputs = dict(zip(self.output_names, self._finished(self.programs, state)))
            self._checks.compare_whole(which, self._transforms.known(), outputs)

    def _state(self, workload: Workload, values: Values) -> Any:
        put = self._framework.array
        arrays = {
            name: put(one, workload.dtype if one.dtype.kind == "f" else "int32", self._device)
            for name, one in values.items()
        }
        return self._maker.state(workload, self.cell.config, arrays)

    def _programs(self, workload: Workload, state: Any) -> Programs:
        return self._framework.compiled(self._maker.function(workload, self.cell.config), state)

    def _finished(self, programs: Programs, state: Any) -> tuple[Array, ...]:
        """Return the outputs of one call; raises Wrong unless all are there and finite."""
        output = run(programs.main, state)
        self._framework.wait(output)
        if len(output) != len(self.output_names):
            names = ", ".join(self.output_names)
            raise Wrong(f"returned {len(output)} arrays instead of {len(self.output_names)} ({names})")
        for name, array in zip(self.output_names, output):
            if not self._framework.is_finite(array):
                raise Wrong(f"{name} holds NaN or infinite values, where the reference is finite")
        return self._framework.snapshot(output)

    def _check(
        self, workload: Workload, values: list[Values], programs: Programs, states: list[Any]
    ) -> tuple[Errors, Limits | None, Mapping[str, Limits] | None]:
        """Compare every output on every input set with the reference, and return the errors, and the limits of forward
        outputs and of gradients: a multiple of what plain rounding causes."""
        worst: dict[str, Compared] = {}
        for drawn, state in zip(values, states):
            rounded = {name: self._rounded(one, workload.dtype) for name, one in drawn.items()}
            exact = self._kind.reference(workload, rounded, lambda array: array)
            plain = self._kind.reference(workload, rounded, lambda array: self._rounded(array, workload.dtype))
            for name, array in zip(self.output_names, self._finished(programs, state)):
                compared = self._compared(name, array, exact, plain, workload.dtype)
                part = name if name.startswith("d") else "forward"
                worst[part] = compared.worse(worst.get(part))
        forward = worst.get("forward")
        gradients = {name: one for name, one in worst.items() if name != "forward"}
        backward = max(gradients.values(), key=lambda one: one.error, default=None)
        errors = Errors(
            forward=forward and forward.error,
            backward=backward and backward.error,
            forward_allowed=forward and forward.allowed,
            backward_allowed=backward and backward.allowed,
            max_abs=max(one.max_abs for one in worst.values()),
        )
        limits = {name: one.limits for name, one in gradients.items() if one.limits is not None}
        return errors, forward and forward.limits, limits or None

    def _compared(
        self, name: str, array: Array, exact: Mapping[str, np.ndarray], plain: Mapping[str, np.ndarray], dtype: str
    ) -> Compared:
        got = self._framework.numpy(array).astype(np.float64)
        if got.shape != exact[name].shape:
            raise Wrong(f"{name} has shape {got.shape} instead of {exact[name].shape}")
        rows = [np.atleast_2d(one) for one in (got, exact[name], plain[name])]
        factor = BACKWARD_FACTOR if name.startswith("d") else FORWARD_FACTOR
        result = compare(name, rows[:1], rows[1:2], rows[2:], dtype, factor)
        if result.fault:
            errors = Errors(forward=result.error, forward_allowed=result.allowed, max_abs=result.max_abs)
            raise Wrong(result.fault, errors)
        return result

    def _rounded(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return values rounded to the dtype, as float64; whole numbers, such as tokens, are returned unchanged."""
        if values.dtype.kind != "f":
            return values
        return self._framework.numpy(self._framework.array(values, dtype, self._device)).astype(np.float64)
