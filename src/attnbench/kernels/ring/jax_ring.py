"""jax.ring and jax.all-gather: attention over a sequence sharded over the devices of this process; see docs/ring.md.

Arrays are brought into slot order and onto the devices before the clock starts, and back after it has stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Self

from attnbench.errors import UsageError
from attnbench.frameworks.base import OUTPUTS, Clock, Inputs, OwnClock, Peak, Program, Programs, Stopwatch
from attnbench.frameworks.jax.framework import Compiler, JaxFramework, import_jax, precision_of
from attnbench.impls import WithLse
from attnbench.impls.conditions import first_reason, needs_dtype
from attnbench.impls.partial.jax_passes import Rule
from attnbench.kernels.ring import schedule
from attnbench.spec import Array, Call, Config, Environment, Pass, Ranks, Workload

if TYPE_CHECKING:
    from attnbench.kernels.ring.jax_engine import Sharded

FORCE = "XLA_FLAGS=--xla_force_host_platform_device_count=8"


class MeshCall:
    """`(q, k, v) -> out`, or (out, lse), of whole arrays; `make(kind)` shards the problem over devices of a kind."""

    def __init__(self, workload: Workload, make: Callable[[str], Sharded], with_lse: bool) -> None:
        self.workload, self._make, self._with_lse = workload, make, with_lse
        self._made: dict[str, Sharded] = {}

    def on(self, array: Array) -> Sharded:
        """Return the problem over the devices of the array's kind; over the default kind while it is traced."""
        import jax

        traced = isinstance(array, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]
        kind = jax.default_backend() if traced else next(iter(array.devices())).platform
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def place(self, inputs: Inputs) -> Inputs:
        """Put the inputs in slot order on the devices."""
        import jax
        from jax.sharding import NamedSharding

        sharded = self.on(inputs.q)
        where = NamedSharding(sharded.mesh, sharded.specs[0])
        sides = (sharded.q_slots, sharded.kv_slots, sharded.kv_slots, sharded.q_slots)
        return Inputs(*(jax.device_put(slots.spread(x), where) for slots, x in zip(sides, inputs)))

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        sharded = self.on(q)
        placed = self.place(Inputs(q, k, v, q))
        out, lse = sharded.compiled(placed.q, placed.k, placed.v)
        out = sharded.q_slots.gathered(out)
        return (out, sharded.q_slots.gathered(lse, axis=2).astype("float32")) if self._with_lse else out


ONE_PROGRAM = "XLA compiles computation and communication into one program, so their times are not known"


class MeshApparatus(JaxFramework):
    """JaxFramework for one cell over a mesh: arrays are in place before the clock starts."""

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self._calls: dict[int, MeshCall] = {}
        self._temp: dict[int, int | None] = {}

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        if not isinstance(call, MeshCall):
            return Programs(Program(run=lambda x: (_whole(call, x),)), 0)
        with precision_of(example.q.dtype):
            placed = call.place(example)
        inner = Compiler(call.on(example.q).call(), placed).programs(pass_)
        parts = {name: self._timed(call, part, name) for name, part in inner.parts.items()}
        main = self._timed(call, inner.main, pass_)
        self._calls[id(main)], self._temp[id(main)] = call, inner.temp_bytes
        return Programs(main, inner.compile_ns, parts, inner.temp_bytes)

    def _timed(self, call: MeshCall, inner: Program, pass_: Any) -> Program:
        def run(state: Any) -> tuple[Array, ...]:
            start = perf_counter_ns()
            results = inner.run(state[0])
            self.wait(results)
            self._stopwatch.ns += perf_counter_ns() - start
            return tuple(put(array) for put, array in zip(_homeward(call, state[1], pass_), results))

        def prepare(inputs: Inputs) -> Any:
            with precision_of(inputs.q.dtype):
                return inner.prepare(call.place(inputs.settled())), inputs.q

        return Program(run=run, prepare=prepare)

    def clocks(self, device: str) -> tuple[str, ...]:
        return (OwnClock.name,)

    def clock(self, name: str, device: str) -> Clock:
        if name != OwnClock.name:
            raise UsageError(f'a mesh has no clock "{name}", only "{OwnClock.name}".')
        return OwnClock(self, self._stopwatch)

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        if temp_bytes is None:
            return Peak(None, "the compiler does not report how much temporary memory the program needs")
        world = self._calls[id(program)].on(inputs.q).problem.world
        results = sum(leaf.nbytes for leaf in program.run(program.prepare(inputs)))
        return Peak(temp_bytes + results // world, method=f"xla compiled temp + outputs, of one of {world} devices")

    def ranks(self, program: Program, inputs: Inputs, device: str) -> Ranks | None:
        call = self._calls[id(program)]
        sharded = call.on(inputs.q)
        peak, work = self.peak(program, inputs, device, self._temp[id(program)]), schedule.pairs(sharded.problem)
        return Ranks(
            world=sharded.problem.world,
            how="devices of one process",
            layout=sharded.problem.layout,
            devices=1 if device == "cpu" else sharded.problem.world,
            tokens=sharded.problem.q_sizes(),
            pairs=work,
            shard_bytes=schedule.shard_bytes(call.workload, sharded.problem),
            peak_bytes=None if peak.bytes is None else (peak.bytes,) * sharded.problem.world,
            balance=schedule.balance(work),
            reason=ONE_PROGRAM,
        )


def _whole(call: Call, x: Inputs) -> Array:
    with precision_of(x.q.dtype):
        return call(x.q, x.k, x.v)


def _homeward(call: MeshCall, like: Array, pass_: Pass) -> list[Callable[[Array], Array]]:
    """Return, for each result of a pass, a function that orders its tokens and moves it to the inputs' device."""
    sharded, device = call.on(like), next(iter(like.devices()))

    def home(slots: Any) -> Callable[[Array], Array]:
        def put(array: Array) -> Array:
            with precision_of(array.dtype):
                return import_jax().device_put(slots.gathered(array), device)

        return put

    queries, keys = home(sharded.q_slots), home(sharded.kv_slots)
    return [keys if name in ("dk", "dv") else queries for name in OUTPUTS[pass_]]


class OverMesh(WithLse):
    """Sequence split over devices of a JAX mesh, `jax.ring[world=4,layout=striped]`; world 0 means every device."""

    framework = "jax"
    over_devices = "alone"
    materialises_scores = False
    tunables = {"world": 0, "layout": "zigzag"}
    untested = ("cuda", "rocm", "tpu")
    by_name_only = schedule.BY_NAME_ONLY

    def __init__(self, name: str, travels: bool) -> None:
        self.name, self._travels = name, travels
        way = "keys sent around a ring" if travels else "keys gathered on every device"
        self.description = f"Sequence split over devices of a JAX mesh, {way}: `{name}[world=4,layout=striped]`."

    def configured(self, config: Config) -> Self:
        self._settings(config)
        return self

    def available(self, environment: Environment) -> str | None:
        count = environment.devices
        hint = f"; on a CPU, {FORCE} simulates several" if environment.device == "cpu" else ""
        return f"needs at least two devices in one process, not {count}{hint}" if count < 2 else None

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(
            self.available(environment),
            schedule.needs_dense_mask(workload),
            needs_dtype(workload, "float64", "float32", "bfloat16"),
        )

    def apparatus(self, framework: Any, config: Config) -> Any:
        return MeshApparatus()

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        asked, layout = self._settings(config)
        rule = Rule(workload.softmax_scale, workload.softcap)

        def make(kind: str) -> Sharded:
            jax = import_jax()
            from attnbench.kernels.ring.jax_engine import Gather, Sharded, Travel, mesh_of

            try:
                devices = jax.devices(kind)
            except RuntimeError:  # JAX has no devices of this kind
                devices = []
            world = asked or len(devices)
            if world > len(devices):
                raise UsageError(
                    f"world {world} is more than the {len(devices)} devices of this process; world=0 takes all."
                )
            movement = (Travel if self._travels else Gather)(world)
            return Sharded(schedule.problem_of(workload, world, layout), rule, mesh_of(devices[:world]), movement)

        return MeshCall(workload, make, with_lse)

    def _settings(self, config: Config) -> tuple[int, str]:
        """Read world and layout; raise UsageError for impossible values."""
        settings = {**self.tunables, **config}
        layout, world = str(settings["layout"]), settings["world"]
        schedule.check_layout(layout)
        if not isinstance(world, int) or world < 0:
            raise UsageError(f"world must be a whole number (0 means every device), not {world!r}.")
        return world, layout


RING = OverMesh("jax.ring", travels=True)
ALL_GATHER = OverMesh("jax.all-gather", travels=False)
