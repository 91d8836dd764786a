"""The nouns: Workload (the problem), Implementation (a way to compute it), Record (the outcome), Environment (the
place).

Everything here is frozen data or an interface; this module imports no framework and measures nothing.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, isqrt
from numbers import Real
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from attnbench.errors import InvalidWorkload
from attnbench.masks import AnyMask, Full, Mask, MaskShape
from attnbench.masks.base import whole_number
from attnbench.masks.device import MaskForm

Pass = Literal["forward", "backward", "train"]
Layout = Literal["bshd", "bhsd"]
Config = Mapping[str, int | float | str | bool]
Array = Any
Call = Callable[[Array, Array, Array], Any]
"""Function of q, k, v in the implementation's layout that returns out, or (out, lse) if the LSE was asked for."""
CacheCall = Callable[[Array, Array, Array, Array, Array | None], tuple[Array, Array]]
"""Function `(q, k, v, lengths, block_table) -> (out, lse)`; see Implementation.decode."""
ValuesCall = Callable[..., Any]
"""Function of q, k, v and the values of a mask that returns what a Call returns; see `build_values`."""
Partial = tuple[Callable[..., tuple[Array, Array]], Callable[..., tuple[Array, Array, Array]]]
"""Functions `forward(q, k, v) -> (out, lse)` and `backward(q, k, v, out, lse, dout) -> (dq, dk, dv)`; see
Implementation.partial."""
Passes = tuple[Callable[..., tuple[Array, Array]] | None, Callable[..., tuple[Array, Array, Array]] | None]
"""The functions of a Partial, either of which may be missing; see Implementation.passes."""

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PASSES: tuple[Pass, ...] = ("forward", "backward", "train")
SIZES = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "v_head_dim")
INPUTS = ("normal", "sincostan", "structured")
SAME = -(1 << 62)
"""Value that stands for "not given": kv_len as q_len, kv_heads as heads."""


class Workload(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="attention"):
    """One attention problem. `kv_len` and `kv_heads` default to `q_len` and `heads`, `v_head_dim` to `head_dim`."""

    batch: int
    q_len: int
    heads: int
    head_dim: int
    kv_len: int = SAME
    kv_heads: int = SAME
    v_head_dim: int | None = None
    dtype: str = "float32"
    mask: AnyMask | None = None
    pass_: Pass = field(default="forward", name="pass")
    scale: float | None = None
    softcap: float | None = None
    inputs: str = "normal"
    """How Q, K and V are drawn: "normal" (independent normals), "sincostan" (ramps of sines, cosines and tangents) or
    "structured" (with the patterns that attention has in trained models)."""
    step: str = ""
    """Step that the attention is a part of (attnbench.workloads.steps); empty for attention alone."""
    source: str = ""
    """Origin of the shape; not a part of the identity."""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        defaults = {"kv_len": self.q_len, "kv_heads": self.heads, "v_head_dim": self.head_dim, "mask": Full()}
        for name, value in defaults.items():
            given = getattr(self, name)
            if given is None or (isinstance(given, int) and given == SAME):
                msgspec.structs.force_setattr(self, name, value)
        if not isinstance(self.mask, Mask):
            raise InvalidWorkload(
                f"mask must be one of attnbench.masks (wrap an array in masks.dense), not {type(self.mask).__name__}."
            )
        _check_shape(self)
        self.visible_mask.check(self.mask_shape)

    @property
    def visible_mask(self) -> AnyMask:
        """The mask, never None (the field accepts None as a spelling of `full()`)."""
        assert self.mask is not None
        return self.mask

    @property
    def value_dim(self) -> int:
        """Width of V and of the output."""
        assert self.v_head_dim is not None
        return self.v_head_dim

    @property
    def mask_shape(self) -> MaskShape:
        """The four sizes over which the mask is evaluated."""
        return MaskShape(self.batch, self.heads, self.q_len, self.kv_len)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def softmax_scale(self) -> float:
        """The scale that is applied: the given one, or head_dim ** -0.5."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def needs_gradients(self) -> bool:
        """Whether the workload includes the backward pass."""
        return self.pass_ != "forward"

    @property
    def axes(self) -> dict[str, int | str]:
        """Name and value of everything that identifies the problem, for tables, charts and grouping."""
        axes = {name: getattr(self, name) for name in (*SIZES, "dtype")}
        return axes | {"mask": self.visible_mask.id, "pass": self.pass_} | self.extras

    @property
    def extras(self) -> dict[str, str]:
        """Axes that most problems leave at their defaults: scale, softcap, inputs and step, if they differ."""
        numbers = {"scale": self.scale, "softcap": self.softcap}
        extras = {name: repr(float(value)).removesuffix(".0") for name, value in numbers.items() if value is not None}
        extras |= {} if self.inputs == "normal" else {"inputs": self.inputs}
        return extras | ({"step": self.step} if self.step else {})

    def _sizes(self, by: str) -> list[str]:
        """Return tokens, heads and dims as text: one number if a pair is equal, else two and what is between them."""
        pairs = (self.q_len, by, self.kv_len), (self.heads, ":", self.kv_heads), (self.head_dim, "/", self.value_dim)
        return [f"{a}" if a == b else f"{a}{between}{b}" for a, between, b in pairs]

    @property
    def id(self) -> str:
        """Stable, readable text; the same from live arrays, a suite and a file."""
        tokens, heads, dims = self._sizes("x")
        parts = [f"b{self.batch}", f"t{tokens}", f"h{heads}", f"d{dims}", self.visible_mask.id, self.dtype, self.pass_]
        parts += [f"{name}={value}" for name, value in self.extras.items()]
        return "-".join(parts)

    @property
    def title(self) -> str:
        """A single line for people."""
        tokens, heads, dims = self._sizes(" x ")
        extras = [f"{name} {value}" for name, value in self.extras.items()]
        sizes = f"{self.batch} x {tokens} tokens", f"{heads} heads of {dims}"
        return " · ".join([*sizes, self.visible_mask.title, self.dtype, self.pass_, *extras])


def _check_shape(w: Workload) -> None:
    for name in SIZES:
        msgspec.structs.force_setattr(w, name, whole_number(getattr(w, name), name, least=1))
    if w.heads % w.kv_heads:
        small = [d for d in range(1, isqrt(w.heads) + 1) if w.heads % d == 0]
        *others, last = sorted({*small, *(w.heads // d for d in small)})
        choices = f"{', '.join(map(str, others))} or {last}" if others else f"{last}"
        raise InvalidWorkload(
            f"{w.heads} query heads cannot share {w.kv_heads} key/value heads: "
            f"the second must divide the first ({choices})."
        )
    if w.dtype not in DTYPE_BYTES:
        raise InvalidWorkload(f'dtype "{w.dtype}" is not one of {", ".join(DTYPE_BYTES)}.')
    if w.pass_ not in PASSES:
        raise InvalidWorkload(f'pass "{w.pass_}" is not one of {", ".join(PASSES)}.')
    if w.inputs not in INPUTS:
        raise InvalidWorkload(f'inputs "{w.inputs}" is not one of {", ".join(INPUTS)}.')
    for name in ("scale", "softcap"):
        value = getattr(w, name)
        if isinstance(value, Real) and type(value) not in (bool, int, float):  # NumPy's numbers become Python's
            value = float(value)
            msgspec.structs.force_setattr(w, name, value)
        try:
            usable = value is None or (type(value) in (int, float) and isfinite(value))
        except OverflowError:
            usable = False
        if not usable:
            raise InvalidWorkload(f"{name} must be a finite number, not {value!r}.")
    if w.softcap is not None and not w.softcap > 0:
        raise InvalidWorkload(f"softcap must be positive, not {w.softcap:g}.")


class Library(Struct, frozen=True, omit_defaults=True):
    """A shared library or package that was really loaded, and others of the same name that it hides."""

    name: str
    version: str
    path: str
    shadowed: tuple[str, ...] = ()


def other_versions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the packages that both have in different versions."""
    return sorted(name for name, version in mine.items() if theirs.get(name, version) != version)


DIRTY = "+dirty"


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine and software that a cell runs on; `differing` decides whether two absolute times may be compared."""

    device: str
    """Kind of device: cpu, cuda, rocm, xpu, mps or tpu."""
    device_name: str
    framework: str = ""
    devices: int = 1
    """Number of devices of this kind in one process."""
    memory_bytes: int | None = None
    """Total memory of the device."""
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    cpu: str = ""
    processor: str = ""
    """Kind of the processor, whatever a virtual machine names it: vendor, family, model and vector instructions; older
    records lack it."""
    cores: int = 0
    threads: int = 0
    python: str = ""
    system: str = ""
    driver: str = ""
    packages: dict[str, str] = {}
    """Version of each distribution that affects attention, by name."""
    libraries: tuple[Library, ...] = ()
    clocks: dict[str, float] = {}
    """Facts at the start that may change: clocks in MHz, temperature, power limit, load."""
    variables: dict[str, str] = {}
    """Environment variables that change results."""
    harness: str = ""
    """Version of attnbench and of its definition of a time (sampling.ESTIMATOR); older records lack the latter or
    both."""
    commit: str = ""
    """Commit of the code that was measured, followed by `DIRTY` if there were uncommitted changes."""

    @property
    def is_dirty(self) -> bool:
        """Whether the measured code had uncommitted changes."""
        return self.commit.endswith(DIRTY)

    @property
    def hard_key(self) -> Mapping[str, object]:
        """Facts that every record has and that may not differ between two runs whose times are compared."""
        machine = ("device", "device_name", "capability", "cpu", "cores", "threads")
        names = (*machine, "python", "system", "driver", "harness")
        return {name: getattr(self, name) for name in names} | {"packages": dict(sorted(self.packages.items()))}

    def differing(self, other: Environment) -> list[str]:
        """Return the names of the facts that keep times of two environments from being compared: those of `hard_key`,
        and the kind of the processor if both know it."""
        mine, theirs = self.hard_key, other.hard_key
        kinds = {self.processor, other.processor} - {""}
        return [name for name in mine if mine[name] != theirs[name]] + ["processor"] * (len(kinds) > 1)

    def agrees(self, other: Environment) -> bool:
        """Return whether nothing in `differing` does, apart from packages that only one of the two environments has."""
        return set(self.differing(other)) <= {"packages"} and not other_versions(self.packages, other.packages)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits over `hard_key`."""
        return hashlib.sha256(msgspec.json.encode(self.hard_key, order="sorted")).hexdigest()[:12]

    @property
    def storage_key(self) -> str:
        """Fingerprint, and six digits over the kind of the processor if it is known, for the names of stored files."""
        digits = hashlib.sha256(self.processor.encode()).hexdigest()[:6]
        return f"{self.fingerprint}-{digits}" if self.processor else self.fingerprint


class Implementation(ABC):
    """One way to compute attention. A subclass is usually one small file; CONTRIBUTING.md says how to add it."""

    name: str
    """Name of the form framework.family[-variant]."""
    description: str = ""
    """One line for `attnbench list implementations`; empty: the first paragraph of the class's docstring."""
    framework: str
    """Framework of the arrays: numpy, torch or jax."""
    layout: Layout = "bshd"
    approximate: bool = False
    """Whether results have an error by design (`declared_error`, relative Frobenius); never ranked among exact ones."""
    declared_error: float = 0.0
    declared_recall: float | None = None
    """Least share of attention mass that an implementation finds if it selects the keys it attends to."""
    verify_only: str = ""
    """Reason why the implementation may be checked but not timed (an interpreter, say); empty if it may be timed."""
    by_name_only: str = ""
    """Reason why sweeps over all implementations leave this one out unless it is named; empty if they include it."""
    materialises_scores: bool = False
    """Whether q_len x kv_len logits are stored, so that the plan can tell what will not fit in memory."""
    step: str = ""
    """Step that is computed (attnbench.steps); empty for attention alone."""
    process: str = ""
    """Name of the worker, shared by cells of one (framework, process); a library that affects its process sets it."""
    expects: tuple[str, ...] = ()
    """Regular expressions of operators or kernels, one of which must appear in a profile as proof of the path."""
    forbids: tuple[str, ...] = ()
    """Regular expressions of operators or kernels that mean a silent fall-back."""
    untested: tuple[str, ...] = ()
    """Device kinds that this adapter should run on but was never run on."""
    traceable: bool = False
    """Whether torch.compile may trace the calls; if not, each call is one opaque operator."""
    any_kv_len: bool = False
    """Whether a call that was built for a full mask computes any number of keys; believed of ours alone."""
    lse_gradient: bool = False
    """Whether the LSE of `build_lse` is differentiable; if not, asking for its gradient is an error."""
    over_devices: Literal["partitioned", "separate", "alone"] = "separate"
    """How it runs on JAX arrays that are sharded over devices: partitioned by XLA, on each device's own shards of batch
    and heads only, or not at all."""
    compiles_each_plan: bool = False
    """Whether every build compiles for seconds, which is too long for a plan that serves one call."""
    not_deterministic: tuple[str, ...] = ()
    """Passes ("forward", "backward") whose results may differ from run to run; `auto` obeys torch's setting."""
    switches: tuple[str, ...] = ()
    """Backends of torch's SDPA (`torch.backends.cuda.enable_*_sdp`) that are run; `auto` obeys the user's switches."""
    tunables: Config = {}
    """Settings that may be given in brackets, `torch.ring[world=4]`, with their defaults."""
    every_config: bool = False
    """Whether a run without given settings measures all configs, because none of them is a natural default."""

    def available(self, environment: Environment) -> str | None:
        """Return None if the implementation can run on this machine; else why not and what would make it run."""
        return None

    @abstractmethod
    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Return None, or the reason why this workload cannot be computed exactly as asked.

        Must be cheap and import no framework.
        """

    def computes_hidden(self, workload: Workload, environment: Environment) -> bool:
        """Return whether query-key pairs that the mask hides are computed all the same: scores are stored, or the mask
        is read as an array. Must be cheap and import no framework."""
        return self.materialises_scores

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return the settings worth trying, the default first."""
        return ({},)

    def configs_here(self, workload: Workload, environment: Environment) -> Sequence[Config]:
        """Return those of `configs` that can run in this environment. Must be cheap and import no framework."""
        return self.configs(workload)

    def configured(self, config: Config) -> Implementation:
        """Return the implementation with these settings, a new object if they change support, memory or proofs."""
        return self

    def proofs(self, pass_: Pass) -> tuple[tuple[str, ...], ...]:
        """Return sets of patterns; a profile of the pass must contain one pattern of each set as proof of the path."""
        return (self.expects,) if self.expects else ()

    @abstractmethod
    def build(self, workload: Workload, config: Config) -> Call:
        """Plan, compile if needed, and return the call that is timed.

        The call is differentiable unless `supports` refuses gradients.
        """

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Return a call that returns (out, lse), lse [b, h, q_len] in natural log; None without LSE.

        The LSE is float32; of float64 inputs it should be float64, which attention sinks need.
        """
        return None

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        """Return None, or the reason why a mask whose values are arguments of the call cannot be computed exactly.

        The workload's mask is a stand-in of the form's kinds. If sequences are packed, the workload is a batch of their
        mean length with the mask inside of each. Must be cheap and import no framework.
        """
        return "does not take a mask as an argument of the call"

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall | None:
        """Return a call (q, k, v, *values) that returns out, or (out, lse), and reads no value; None without LSE.

        Arrays are in the implementation's layout; if sequences are packed, [tokens, heads, dim] with any number of
        tokens, and the LSE is [heads, tokens]. A row that sees no key has output 0 and LSE -inf. The values are the
        arrays of the form's parts in order, then their limits.
        """
        raise NotImplementedError(f"{self.name} takes no mask as an argument")

    def partial_values(self, workload: Workload, form: MaskForm, config: Config) -> Partial | None:
        """Return (forward, backward) like `partial`, both with the values as last arguments; None if there are none."""
        return None

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        """Return (forward, backward) for a part of a larger whole, without autograd; None if they are not available.

        Arrays are bshd whatever `layout` says, and may be strided views; LSE is [b, h, q_len], natural log, float32
        (float64 for float64 inputs); a row that sees no key has output 0 and LSE -inf. The backward's `out` and `lse`
        may be those of the whole: gradients of parts with the whole's out and lse add up to the whole's gradients. None
        for a mask with a large bias (attnbench.masks.large_bias), which would leave no precision in the LSE.
        """
        return None

    def passes(self, workload: Workload, config: Config) -> Passes:
        """Return (forward, backward) like `partial`, but for this workload alone; one of the two may be missing."""
        return self.partial(workload, config) or (None, None)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a function `(q, k, v, lengths, block_table) -> (out, lse)` over a KV cache, or the reason for none.

        q is [b, n, h, d]; k and v are [b, capacity, kv_heads, d], or, with a page size, [pages, page_size, kv_heads, d]
        with a block_table [b, pages of a sequence]; lengths and block_table are int32 and on the device. The last axis
        of all is dense. Query i is token lengths - n + i of its sequence and sees the keys up to itself, within the
        workload's window; a row that sees no key gives 0 and LSE -inf (LSE [b, h, n], natural log, float32).

        One function serves every capacity (the workload's kv_len is the first one, rounded up to a power of two) and
        all lengths; it may not read these on the host of an accelerator, and whatever lies behind the end of a sequence
        (NaN, entries of the table that are no page) must not reach the result. `supports` was asked before.
        """
        return "reads no KV caches"

    def quality(self, workload: Workload, config: Config) -> Callable[[Array, Array, Array], dict[str, float]] | None:
        """Return a function `(q, k, v) -> figures` of the keys that are selected for these inputs: `sparsity`, `work`
        (see Ok).

        None for implementations that select nothing.
        """
        return None

    def apparatus(self, framework: Any, config: Config) -> Any:
        """Return the Framework that builds, times and weighs the calls; another one if the work is done elsewhere."""
        return framework

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Cell(Struct, frozen=True, omit_defaults=True):
    """One implementation on one workload: the unit that a worker computes."""

    implementation: str
    workload: Workload
    config: dict[str, int | float | str | bool] = {}

    @property
    def id(self) -> str:
        """Text that is stable over runs, for --resume, --shard and merge."""
        config = ",".join(f"{k}={v}" for k, v in sorted(self.config.items()))
        name = f"{self.implementation}[{config}]" if config else self.implementation
        return f"{name}/{self.workload.id}"


class Time(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Samples of a steady-state call in nanoseconds, without any dropped."""

    samples_ns: tuple[float, ...]
    median_ns: float
    ci95_ns: tuple[float, float] | None
    """Interval of the median over rounds; null if there was only one round."""
    min_ns: float
    max_ns: float
    p50_ns: float
    p95_ns: float
    p99_ns: float
    mean_ns: float
    std_ns: float
    outliers: int
    """Samples outside Tukey's fences: flagged and kept."""
    clock: str = "wall"
    """Clock that was read: wall, cpu, events, graph or kernel."""
    calls_per_sample: int = 1
    rounds: tuple[int, ...] = ()
    """Number of samples in each interleaving round, so that neighbours can be paired."""
    waited: float | None = None
    """Share of the time in which threads waited for a core that other programs had, in the median round: without that
    the call may have been shorter by as much. Null if it was not counted."""
    sitting: str = ""
    """Start of the session in which the cells of the workload took turns, and behind a `+` the turn if the cell had its
    own.

    Times of different sittings are not compared, and rounds are paired only if this field is equal.
    """

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval as a share of the median; None without an interval."""
        return None if self.ci95_ns is None else (self.ci95_ns[1] - self.ci95_ns[0]) / 2 / self.median_ns


class Memory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Peak extra bytes of one call beyond its inputs."""

    peak_bytes: int | None
    reason: str | None = None
    """Reason why peak_bytes is null."""
    theory_bytes: int = 0
    """Bytes of the output, the gradients and, if the implementation stores them, the scores."""
    scores_bytes: int = 0
    kv_cache_bytes: int = 0
    reserved_bytes: int | None = None
    fragmentation: float | None = None
    method: str = ""


class Cost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Operations and bytes that the workload needs, and the rates that were reached; rates are null before timing."""

    flops: int
    bytes: int
    tflops: float | None = None
    gb_per_s: float | None = None
    roofline: float | None = None
    """Share of the binding measured ceiling (compute or memory)."""
    bound: str = ""
    reason: str | None = None
    """Reason why roofline is null."""


class Throughput(Struct, frozen=True, kw_only=True):
    """The measured time as rates."""

    tokens_per_s: float
    calls_per_s: float
    samples_per_s: float


class Errors(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Relative Frobenius errors against float64, the errors that are allowed, and the results of the other checks."""

    forward: float | None = None
    """Error of the output; null if the pass returns no output (backward alone)."""
    backward: float | None = None
    lse: float | None = None
    forward_allowed: float | None = None
    backward_allowed: float | None = None
    max_abs: float | None = None
    stability: str = ""
    """Input scales that were tried."""
    properties: tuple[str, ...] = ()
    """Properties that were checked and held."""
    hidden_nan: str = ""
    """Either "contained" or "leaks"; empty if the mask hides nothing."""


class VerifiedAt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape and the share of output rows that were compared with the reference."""

    shape: dict[str, int]
    share: float
    backward_shape: dict[str, int] | None = None
    backward_share: float | None = None


class Ranks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of each rank of a cell that runs on several; tuples are in order of rank, null with the reason."""

    world: int
    how: str
    """How the ranks run: processes over gloo, processes over nccl, virtual, or devices of one process."""
    layout: str
    inner: tuple[str, ...] = ()
    """Kernels that compute the tiles."""
    devices: int = 1
    """Devices that share the work."""
    tokens: tuple[int, ...]
    """Number of queries held."""
    pairs: tuple[int, ...]
    """Number of visible pairs computed."""
    shard_bytes: tuple[int, ...]
    """Bytes of inputs held."""
    peak_bytes: tuple[int, ...] | None = None
    """Extra memory at the peak, beyond the inputs held."""
    compute_ns: tuple[float, ...] | None = None
    waiting_ns: tuple[float, ...] | None = None
    """Time of communication that computation did not hide."""
    communication_ns: tuple[float, ...] | None = None
    """Time of all communication, done without computation."""
    balance: float
    """Mean over largest of the ranks' compute times, or of their visible pairs if no time is known."""
    reason: str | None = None
    """Reason why a figure is null, and other limits of the figures."""


class _Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="status"):
    implementation: str
    workload: Workload
    config: dict[str, int | float | str | bool] = {}
    environment: Environment | None = None
    isolation: str = "worker"
    """Process of the cell: worker, or in-process if a function could not be sent to a worker."""

    @property
    def status(self) -> str:
        """Tag of the outcome: ok, unsupported, incorrect, out_of_memory, failed or timeout."""
        return str(type(self).__struct_config__.tag)

    @property
    def cell(self) -> Cell:
        """The implementation and workload that were asked for."""
        return Cell(self.implementation, self.workload, self.config)


class Ok(_Outcome, frozen=True, kw_only=True, omit_defaults=True, tag="ok"):
    """A verified outcome, timed unless only verification was asked for."""

    errors: Errors
    verified_at: VerifiedAt
    deterministic: bool
    memory: Memory
    cost: Cost
    time: Time | None = None
    compile_ns: int | None = None
    first_call_ns: int | None = None
    throughput: Throughput | None = None
    also: dict[str, Time] = {}
    """Other clocks and passes of the same cell: forward, backward, wall, kernel."""
    kernels: tuple[str, ...] | None = None
    kernels_reason: str | None = None
    approximate: bool = False
    quality: dict[str, float] = {}
    """Figures of sparse attention: achieved `sparsity`, `recall` of dense attention's mass, `output_error` against
    dense, and `work`, the share of the products that was computed if the implementation selects keys."""
    ranks: Ranks | None = None
    """Figures of a cell that ran on several ranks."""
    notes: tuple[str, ...] = ()
    """Warnings, such as unstable samples."""
    spent_ns: dict[str, int] = {}
    """Wall time of each stage of this cell: build, verify, profile, warm_up, sample."""

    reason = None
    """An ok record has no reason."""


class _NotOk(_Outcome, frozen=True, kw_only=True, omit_defaults=True):
    reason: str
    detail: str = ""
    """A traceback, or the end of the worker's stderr."""

    # A record that is not ok has no speed: these read as None and cannot be written.
    time = memory = cost = throughput = compile_ns = kernels = deterministic = verified_at = errors = None


class Unsupported(_NotOk, frozen=True, kw_only=True, tag="unsupported"):
    """The implementation cannot compute this workload, by its own account."""


class Incorrect(_NotOk, frozen=True, kw_only=True, tag="incorrect"):
    """The implementation computed something else."""

    errors: Errors | None = None


ONLY_TIMED = "a timed call returned a wrong"
"""Beginning of the reason of an Incorrect that was found during timing, so that a check without timing does not find
it."""


class OutOfMemory(_NotOk, frozen=True, kw_only=True, tag="out_of_memory"):
    """The device's memory was not sufficient."""


class Failed(_NotOk, frozen=True, kw_only=True, tag="failed"):
    """The cell raised, crashed, fell back silently, or gave an implausible figure."""

    unstarted: bool = False
    """Whether no process could be started, so that nothing is known of the cell and `--resume` tries again."""


class Timeout(_NotOk, frozen=True, kw_only=True, tag="timeout"):
    """The cell did not finish in time."""


Record = Ok | Unsupported | Incorrect | OutOfMemory | Failed | Timeout
