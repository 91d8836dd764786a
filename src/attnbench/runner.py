"""Python functions of the lab: `ab.verify`, `ab.measure`, `ab.BenchmarkRunner`, `ab.compare_implementations`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, SupportsIndex, get_args, overload

from msgspec import structs

from attnbench import frameworks, masks, registry
from attnbench.errors import InvalidWorkload, UnknownName, UsageError
from attnbench.masks.text import parse_mask
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.results.records import label
from attnbench.run.launch import Listener, Request, check_seconds, launch
from attnbench.run.machine import LIBRARY_PATIENCE_S
from attnbench.run.pool import Pool
from attnbench.run.user_functions import CannotSend
from attnbench.spec import Implementation, Record, Workload

Subject = str | Callable[..., Any] | Implementation
BenchmarkType = Literal["inference", "training", "memory", "accuracy", "scaling"]
METRICS = ("latency", "memory", "throughput")
DEFAULTS = {"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64}
WORDS = {
    "batch_size": "batch",
    "sequence_length": "q_len",
    "seq_len": "q_len",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "pass": "pass_",
}
"""Common names of settings -> fields of a workload."""


class Results(list[Record]):
    """Records in order; `results["torch.ring[world=4]"]` finds the first of that name in tables, and a name alone also
    finds the only setting of an implementation."""

    @overload
    def __getitem__(self, key: SupportsIndex) -> Record: ...
    @overload
    def __getitem__(self, key: slice) -> list[Record]: ...
    @overload
    def __getitem__(self, key: str) -> Record: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> Record | list[Record]:
        if not isinstance(key, str):
            return super().__getitem__(key)
        by_label = {label(record): record for record in reversed(self)}
        if key in by_label:
            return by_label[key]
        settings = [record for record in by_label.values() if record.implementation == key]
        if len(settings) == 1:
            return settings[0]
        raise KeyError(f"no record of {key}; there are {', '.join(map(label, self))}")


def verify(
    implementation_or_callable: Subject, workload: Workload, *, framework: str = "torch", device: str | None = None
) -> Record:
    """Check an implementation, or a bare function of (q, k, v) in layout bshd, against the reference; no timing."""
    return _record_of(implementation_or_callable, workload, framework, device, measure=False, thorough=True)


def measure(
    implementation_or_callable: Subject,
    workload: Workload,
    *,
    framework: str = "torch",
    device: str | None = None,
    budget_s: float = 1.0,
) -> Record:
    """Check an implementation, then time it; a record that is not ok has no time."""
    return _record_of(implementation_or_callable, workload, framework, device, budget_s=budget_s)


def _record_of(what: Subject, workload: Workload, framework: str, device: str | None, **options: Any) -> Record:
    where = {"framework": framework, "device": _device_name(device)}
    return _carry_out(Request(workloads=(workload,), implementations=(what,), **where, **options))[0]


def compare_implementations(
    implementations: Sequence[Subject],
    config: Mapping[str, Any],
    metrics: Sequence[str] = METRICS,
    *,
    framework: str = "torch",
    device: str | None = None,
    trials: int | None = None,
) -> Results:
    """Measure several implementations on one workload, interleaved."""
    for name, given in (("implementations", implementations), ("metrics", metrics)):
        if isinstance(given, str):
            raise UsageError(f'{name} must be a list, such as ["{given}"], not the text "{given}".')
    for metric in metrics:
        if metric not in METRICS:
            raise UnknownName("metric", metric, METRICS, "help(attnbench.compare_implementations)")
    settings = dict(config)
    trials = settings.pop("trials", trials)
    request = Request(
        workloads=(workload_from(settings),),
        implementations=tuple(implementations),
        framework=framework,
        device=_device_name(device),
        measure=bool({"latency", "throughput"} & set(metrics)),
        trials=trials,
    )
    return _carry_out(request)


class BenchmarkRunner:
    """Baselines and optimisations, measured side by side on what a config describes."""

    def __init__(self, device: Any = None, framework: str = "torch") -> None:
        self._device, self._framework = _device_name(device), framework
        self.baselines: list[Subject] = []
        self.optimizations: list[Subject] = []

    def register_baseline(self, implementation: Subject) -> None:
        """Add an implementation to compare with: a name, a function of (q, k, v), or an Implementation."""
        self.baselines.append(_known(implementation))

    def register_optimization(self, implementation: Subject) -> None:
        """Add an implementation to judge."""
        self.optimizations.append(_known(implementation))

    def run_benchmark(
        self, name: str, benchmark_type: BenchmarkType, config: Mapping[str, Any], trials: int | None = None
    ) -> Results:
        """Return records of every registered implementation.

        "scaling" runs at the config's length, its double and its quadruple. "memory" and "accuracy" check and measure
        memory without timing; "accuracy" runs the full set of checks.
        """
        if benchmark_type not in (known := get_args(BenchmarkType)):
            raise UnknownName("benchmark type", str(benchmark_type), known, "help(attnbench.BenchmarkRunner)")
        implementations = (*self.baselines, *self.optimizations)
        if not implementations:
            raise UsageError("nothing is registered: call register_baseline or register_optimization first.")
        settings = {"pass_": "train" if benchmark_type == "training" else "forward", **config}
        trials = settings.pop("trials", trials)
        workload = workload_from(settings, tags=(name,))
        square, multiples = workload.q_len == workload.kv_len, (1, 2, 4) if benchmark_type == "scaling" else (1,)
        lengths = [((n if square else 1) * workload.q_len, n * workload.kv_len) for n in multiples]
        workloads = [structs.replace(workload, q_len=queries, kv_len=keys) for queries, keys in lengths]
        request = Request(
            workloads=tuple(workloads),
            implementations=implementations,
            framework=self._framework,
            device=self._device,
            measure=benchmark_type not in ("memory", "accuracy"),
            thorough=benchmark_type == "accuracy",
            trials=trials,
        )
        return _carry_out(request)


def workload_from(config: Mapping[str, Any], tags: tuple[str, ...] = ()) -> Workload:
    """Return the workload of a config, in fields of Workload or in common words.

    The words are batch_size, sequence_length, d_model, num_heads and others of `WORDS`.
    """
    fields: dict[str, Any] = {}
    for word, value in config.items():
        if word in ("d_model", "causal", "is_causal"):
            continue
        field = WORDS.get(word, word)
        if field not in Workload.__struct_fields__:
            known = (*WORDS, *Workload.__struct_fields__, "d_model", "causal")
            raise UnknownName("config word", word, known, "the README")
        if fields.setdefault(field, value) != value:
            raise InvalidWorkload(f'"{word}" gives {field} a second time ({fields[field]!r} and {value!r}).')
    if "d_model" in config:
        fields.update(_heads_of(config["d_model"], fields))
    mask = fields.pop("mask", None)
    bare = Workload(**{**DEFAULTS, "tags": tags, **fields})
    mask = parse_mask(mask, bare.mask_shape) if isinstance(mask, str) else mask
    if config.get("causal") or config.get("is_causal"):
        mask = masks.causal() if mask is None else mask & masks.causal()
    return structs.replace(bare, mask=mask)


def _heads_of(d_model: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads and head_dim for a model width; a head_dim that is also given must agree."""
    heads = fields.get("heads", DEFAULTS["heads"])
    if any(isinstance(n, bool) or not isinstance(n, SupportsIndex) for n in (d_model, heads)):
        raise InvalidWorkload(f"d_model and heads must be whole numbers, not {d_model!r} and {heads!r}.")
    if heads < 1 or d_model % heads:
        raise InvalidWorkload(f"d_model {d_model} cannot be divided evenly into {heads} heads.")
    if fields.get("head_dim", d_model // heads) != d_model // heads:
        raise InvalidWorkload(
            f"d_model {d_model} is not {heads} heads of {fields['head_dim']}: give only one of d_model and head_dim."
        )
    return {"heads": heads, "head_dim": d_model // heads}


def _known(implementation: Subject) -> Subject:
    """Refuse a wrong name at once, not when the benchmark runs."""
    if isinstance(implementation, str) and ":" not in implementation:
        registry.asked(implementation)
    return implementation


def _device_name(device: Any) -> str | None:
    """Return the kind of device, such as "cuda" for "cuda:0" or a torch.device; None stays None."""
    if device is None:
        return None
    kind, _, index = str(device).partition(":")
    if index not in ("", "0"):
        raise UsageError(f"the first visible device is measured, not {device}: set CUDA_VISIBLE_DEVICES={index}.")
    return kind


def _carry_out(request: Request) -> Results:
    """Check a request from Python, run it, and return its records without the anchors."""
    check_seconds("budget_s", request.budget_s)
    if request.trials is not None and (type(request.trials) is not int or request.trials < 1):
        raise UsageError(f"trials must be a whole number of at least 1, not {request.trials!r}.")
    if not request.implementations:
        raise UsageError("no implementation was given: name at least one.")
    for workload in request.workloads:
        if not isinstance(workload, Workload):
            raise UsageError(f"a workload is an attnbench.Workload, not {type(workload).__name__}.")
    if request.framework not in frameworks.NAMES:
        raise UnknownName("framework", request.framework, frameworks.NAMES, "attnbench doctor")
    if os.environ.get("ATTNBENCH_WORKER"):
        raise UsageError("a worker cannot start a run: guard the call with `if __name__ == '__main__':`.")
    records = Results()
    try:
        launch(request, records.extend, Listener(), pool=_standing_pool(request), patience_s=LIBRARY_PATIENCE_S)
    except CannotSend:
        records.clear()
        with registry.restored():
            here = structs.replace(request, in_process=True)
            launch(here, records.extend, Listener(), patience_s=LIBRARY_PATIENCE_S)
    return Results(record for record in records if record.implementation not in ANCHORS)


def _standing_pool(request: Request) -> Pool | None:
    """Return workers kept warm between calls, for installed implementations only.

    A user's function gets its own process.
    """
    installed = all(isinstance(what, str) and ":" not in what for what in request.implementations)
    if not installed or any(registry.origin(str(what)) == registry.HERE for what in request.implementations):
        return None
    return _pool(os.getpid(), request.device)


@cache
def _pool(pid: int, device: str | None) -> Pool:
    pool = Pool((), device, None)
    atexit.register(pool.__exit__)
    return pool
