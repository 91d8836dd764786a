"""torch.pair and jax.pair: the forward pass of one library followed by the backward pass of another; see docs/pairs.md.

Every flash-type library keeps (q, k, v, out, lse) for its backward pass: with the LSE in one convention (natural log,
float32), the two passes may come from different libraries. The LSE has a gradient too.

In torch, arrays have the layout of the library of a named backward pass, since that pass is the longer one; without
names, bshd. Few libraries expose both passes in JAX: cuDNN through JAX's private module, plain passes, tokamax's Mosaic
kernel the forward pass only; anything that returns an exact LSE can be the forward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, Self

from msgspec.structs import replace

from attnbench import registry
from attnbench.errors import Unsupported, UsageError
from attnbench.frameworks import environment_of
from attnbench.frameworks.jax.plain import kind_of_device
from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls import AlwaysLse, WithLse
from attnbench.impls.conditions import needs_device
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Pass, Workload

Role = Literal["forward", "backward"]
ROLES: tuple[Role, Role] = ("forward", "backward")
AUTO = "auto"
CONTENDERS = 3
"""Number of implementations of each pass that are tried in pairs."""
MISSING = {
    "forward": "returns no LSE for this workload",
    "backward": "has no backward pass that can be called alone for this workload",
}


class Pairing(WithLse):
    """Forward pass of one implementation followed by the backward pass of another, both in layout bshd."""

    process = "pair"
    tunables = {"forward": AUTO, "backward": AUTO}
    every_config = True
    lse_gradient = True

    def __init__(self, forward: str = AUTO, backward: str = AUTO) -> None:
        self.names: dict[Role, str] = {"forward": forward, "backward": backward}
        named = {role: registry.get(name) for role, name in self.names.items() if name != AUTO}
        self.materialises_scores = any(part.materialises_scores for part in named.values())
        self.forbids = tuple(pattern for part in named.values() for pattern in part.forbids)
        self.switches = tuple(flag for part in named.values() for flag in part.switches)
        self.not_deterministic = tuple(role for role, part in named.items() if role in part.not_deterministic)

    @abstractmethod
    def order(self, role: Role, workload: Workload) -> Sequence[str]:
        """Return the implementations that may run a pass, the fastest first."""

    def lse_call(self, part: Implementation, workload: Workload) -> Callable[..., tuple[Any, Any]] | None:
        """Return `build_lse` of a part as a forward pass in bshd; None if it returns no LSE."""
        call = part.build_lse(workload, {})
        if call is None or part.layout == "bshd":
            return call

        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = call(*(x.swapaxes(1, 2) for x in (q, k, v)))
            return out.swapaxes(1, 2), lse

        return forward

    def configured(self, config: Config) -> Self:
        unknown = sorted(set(config) - set(self.tunables))
        if unknown:
            raise UsageError(f"{self.name} has no setting {', '.join(unknown)}; it has forward and backward.")
        names = {role: str(config.get(role, name)) for role, name in self.names.items()}
        return self if names == self.names else type(self)(**names)

    def proofs(self, pass_: Pass) -> tuple[tuple[str, ...], ...]:
        """Return the proofs of each named library; the forward library's proofs only if its pass runs."""
        roles = ("backward",) if pass_ == "backward" else ROLES
        named = [self.names[role] for role in roles if self.names[role] != AUTO]
        return tuple(proof for name in named for proof in registry.get(name).proofs(pass_))

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu", "cuda")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return self.available(environment) or self._hindrance(workload, environment)

    def computes_hidden(self, workload: Workload, environment: Environment) -> bool:
        named = [name for name in self.names.values() if name != AUTO]
        return any(registry.get(name).computes_hidden(workload, environment) for name in named)

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return all known pairs, whether installed or not."""
        return _pairs(*(self._candidates(role, workload) for role in ROLES))

    def configs_here(self, workload: Workload, environment: Environment) -> Sequence[Config]:
        """Return pairs of the first few implementations that can run each pass."""
        if not workload.needs_gradients:
            return ()
        refusals = (self._refusals(role, workload, environment) for role in ROLES)
        return _pairs(*([name for name, reason in of.items() if reason is None][:CONTENDERS] for of in refusals))

    def chosen(self, workload: Workload, environment: Environment) -> Partial:
        """Return the two functions; raise Unsupported with the reason of each part that cannot run."""
        hindrance = self._hindrance(workload, environment)
        reasons: list[str] = [] if hindrance is None else [hindrance]
        asked = replace(workload, pass_="forward")
        for pair in () if hindrance else self.configs_here(workload, environment):
            first, second = (registry.get(str(pair[role])) for role in ROLES)
            forward = first.passes(asked, {})[0] or self.lse_call(first, asked)
            backward = second.passes(replace(workload, pass_="backward"), {})[1]
            if forward is not None and backward is not None:
                return forward, backward
            role: Role = "backward" if backward is None else "forward"
            reasons.append(_refusal_text(role, str(pair[role]), MISSING[role]))
        raise Unsupported(f"{self.name} cannot run {workload.title}: {'; '.join(dict.fromkeys(reasons))}.")

    def _candidates(self, role: Role, workload: Workload) -> Sequence[str]:
        return self.order(role, workload) if self.names[role] == AUTO else (self.names[role],)

    def _hindrance(self, workload: Workload, environment: Environment) -> str | None:
        if not workload.needs_gradients:
            return "is for training only: without a backward pass there is no second library"
        if has_large_bias(workload.visible_mask):
            return "passes the LSE from one library to the other, which would be rounded away next to such a large bias"
        forward, backward = self.names.values()
        if forward == backward != AUTO:
            return f"both passes are {forward}: ask for {forward} itself"
        if self.configs_here(workload, environment):
            return None
        able: set[str] = set()
        for role in ROLES:
            refusals = self._refusals(role, workload, environment)
            fine = {name for name, reason in refusals.items() if reason is None}
            if not fine:
                return "; ".join(_refusal_text(role, name, str(reason)) for name, reason in refusals.items())
            able |= fine
        return f"needs two libraries, and only {' or '.join(sorted(able))} can run this here"

    def _refusals(self, role: Role, workload: Workload, environment: Environment) -> dict[str, str | None]:
        """Return why each candidate cannot run a pass; None for one that can."""
        workload = replace(workload, pass_=role)
        return {name: self._refusal(role, name, workload, environment) for name in self._candidates(role, workload)}

    def _refusal(self, role: Role, name: str, workload: Workload, environment: Environment) -> str | None:
        part = registry.get(name)
        kind = type(part)
        own = kind.partial is not Implementation.partial or kind.passes is not Implementation.passes
        fit = own or (role == "forward" and kind.build_lse is not Implementation.build_lse)
        if part.framework != self.framework:
            return f"is not a {self.framework} implementation"
        if isinstance(part, Pairing):
            return "is a pair itself: name the library of the pass"
        if part.approximate:
            return "is approximate: the backward pass of another library is not the gradient of its output"
        return part.available(environment) or part.supports(workload, environment) or (None if fit else MISSING[role])


def _pairs(forwards: Sequence[str], backwards: Sequence[str]) -> list[Config]:
    """Return all pairs of two different names, ordered by the sum of their places."""
    places = [(n, m) for n in range(len(forwards)) for m in range(len(backwards)) if forwards[n] != backwards[m]]
    places.sort(key=lambda place: (sum(place), place))
    return [{"forward": forwards[n], "backward": backwards[m]} for n, m in places]


def _refusal_text(role: Role, name: str, reason: str) -> str:
    return f"{name} as the {role} pass: {reason}"


TORCH_FORWARDS = (
    "torch.fa3", "torch.fa4", "torch.sdpa-cudnn", "torch.flash-attn", "torch.sdpa-flash", "torch.sdpa-efficient",
    "torch.eager",
)  # fmt: skip
TORCH_BACKWARDS = ("torch.fa4", "torch.sdpa-cudnn", "torch.fa3", *TORCH_FORWARDS[3:])
TORCH_BACKWARDS_OF_WIDE_HEADS = ("torch.sdpa-cudnn", "torch.fa4", "torch.fa3", *TORCH_FORWARDS[3:])
"""Order of a first measurement on an H200; `benchmarks/pairs.py` measures again."""
WIDE = 128


class TorchPair(Pairing, AlwaysLse):
    """Forward pass of one library, backward of another: `[forward=torch.fa3,backward=torch.fa4]`; by default the first
    that run."""

    name = "torch.pair"
    framework = "torch"

    def __init__(self, forward: str = AUTO, backward: str = AUTO) -> None:
        super().__init__(forward, backward)
        if backward != AUTO:
            self.layout = registry.get(backward).layout

    def order(self, role: Role, workload: Workload) -> Sequence[str]:
        if role == "forward":
            return TORCH_FORWARDS
        return TORCH_BACKWARDS_OF_WIDE_HEADS if workload.head_dim > WIDE else TORCH_BACKWARDS

    def lse_call(self, part: Implementation, workload: Workload) -> Callable[..., tuple[Array, Array]] | None:
        import torch

        call = super().lse_call(part, workload)
        return None if call is None else torch.no_grad()(call)

    def both(self, workload: Workload, config: Config) -> Call:
        from attnbench.impls.partial.torch_autograd import differentiable, turned

        pair = self.configured(config)

        def made(device: Any) -> Call:
            passes = pair.chosen(workload, environment_of("torch", device.type))
            return differentiable(turned(passes) if self.layout == "bhsd" else passes, self.layout)

        calls = once_per_device(made)
        return lambda q, k, v: calls(q.device)(q, k, v)

    def partial(self, workload: Workload, config: Config) -> Partial:
        """Return both passes in bshd without autograd, for graphs of torch.compile."""
        pair = self.configured(config)
        passes = once_per_device(lambda device: pair.chosen(workload, environment_of("torch", device.type)))

        return lambda q, *rest: passes(q.device)[0](q, *rest), lambda q, *rest: passes(q.device)[1](q, *rest)


TORCH_PAIR = TorchPair()


JAX_FORWARDS = ("jax.tokamax-mosaic", "jax.cudnn", "jax.xla", "jax.einsum")
JAX_BACKWARDS = ("jax.cudnn", "jax.einsum")


class JaxPair(Pairing):
    """Forward pass of one JAX library, backward of another: `[forward=jax.tokamax-mosaic,backward=jax.cudnn]`; by
    default the first that run."""

    name = "jax.pair"
    framework = "jax"

    def order(self, role: Role, workload: Workload) -> Sequence[str]:
        return JAX_FORWARDS if role == "forward" else JAX_BACKWARDS

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.impls.partial.jax_passes import differentiable

        pair = self.configured(config)
        calls = lru_cache(lambda device: differentiable(pair.chosen(workload, environment_of("jax", device)), with_lse))

        def run(q: Array, k: Array, v: Array) -> Any:
            result = calls(kind_of_device(q))(q, k, v)
            return (result[0], result[1].astype("float32")) if with_lse else result

        return run


JAX_PAIR = JaxPair()
