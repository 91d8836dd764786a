"""Projections and the feed-forward layer with low-rank updates, as openpi has them, and their merge into the weights.

openpi's facts that a checkpoint depends on: the two products of an output projection both sum over heads, and the
feed-forward layer applies no scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from attnbench.errors import UsageError


@dataclass(frozen=True)
class LoRAConfig:
    """Rank and scale of a low-rank update; `rslora` divides by sqrt(rank). The two `axes` of the weight are
    factorised."""

    rank: int
    alpha: float = 1.0
    init_fn: nn.initializers.Initializer = nn.initializers.normal(stddev=0.01)
    rslora: bool = False
    axes: tuple[int, int] = (-2, -1)
    label: str = "L"

    @property
    def scaling_value(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Einsum(nn.Module):
    """Product of x and a weight `w` along an equation; if configured, with a low-rank update `lora_a`, `lora_b`."""

    shape: tuple[int, ...]
    init_fn: nn.initializers.Initializer = nn.initializers.zeros
    lora_config: LoRAConfig | None = None

    @nn.compact
    def __call__(self, eqn: str, x: Array) -> Array:
        """Return the product, for which weights are cast to x's dtype."""
        w = self.param("w", self.init_fn, self.shape)
        result = jnp.einsum(eqn, x, w.astype(x.dtype))
        config = self.lora_config
        if config is None:
            return result
        shape_a, shape_b = list(self.shape), list(self.shape)
        shape_a[config.axes[1]] = shape_b[config.axes[0]] = config.rank
        a = self.param("lora_a", config.init_fn, tuple(shape_a))
        b = self.param("lora_b", config.init_fn, tuple(shape_b))
        first, second = low_rank_equations(eqn, config)
        low = jnp.einsum(second, jnp.einsum(first, x, a.astype(x.dtype)), b.astype(x.dtype))
        return result + low * config.scaling_value


def project_qkv(
    x: Array, heads: tuple[int, int], inner: tuple[int, int], lora: LoRAConfig | None, end: str = ""
) -> tuple[Array, Array, Array]:
    """Return q, k and v of tokens x by the weights q_einsum and kv_einsum, or qkv_einsum if all heads are alike.

    `heads` are those of queries and of keys, `inner` the widths of a token and of a head; `end` is added to the names
    of the weights. Call inside a compact method.
    """
    lecun = nn.initializers.lecun_normal
    single, several = (lecun(in_axis=-2, out_axis=-1, batch_axis=axes) for axes in ((0,), (0, 1)))
    if heads[0] == heads[1]:
        q, k, v = Einsum((3, heads[0], *inner), several, lora, name=f"qkv_einsum{end}")("BSD,3KDH->3BSKH", x)
        return q, k, v
    q = Einsum((heads[0], *inner), single, lora, name=f"q_einsum{end}")("BTD,NDH->BTNH", x)
    k, v = Einsum((2, heads[1], *inner), several, lora, name=f"kv_einsum{end}")("BSD,2KDH->2BSKH", x)
    return q, k, v


def low_rank_equations(eqn: str, config: LoRAConfig) -> tuple[str, str]:
    """Return the equations x -> rank and rank -> out.

    An axis that neither letter names stays in both: heads of "BTNH,NHD->BTD" are summed in both.
    """
    left, arrow, out = eqn.partition("->")
    inputs, comma, weight = left.partition(",")
    if not arrow or not comma or "," in weight:
        raise UsageError(f'a low-rank update needs an equation "x,w->out", not "{eqn}".')
    if config.label in eqn:
        raise UsageError(f'the label "{config.label}" of the low-rank axis is already in "{eqn}".')
    contracted, produced = (weight[axis] for axis in config.axes)
    between = out.replace(produced, config.label)
    first = f"{inputs},{weight.replace(produced, config.label)}->{between}"
    return first, f"{between},{weight.replace(contracted, config.label)}->{out}"


class FeedForward(nn.Module):
    """Gated GELU with parameters `gating_einsum` (2, D, F) and `linear` (F, D)."""

    features: int
    hidden_dim: int
    lora_config: LoRAConfig | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return the output in x's dtype."""
        lecun = nn.initializers.lecun_normal
        gating = self.param(
            "gating_einsum", lecun(in_axis=-2, out_axis=-1, batch_axis=(0,)), (2, self.features, self.hidden_dim)
        )
        linear = self.param("linear", lecun(in_axis=-2, out_axis=-1), (self.hidden_dim, self.features))
        gating_low = linear_low = None
        if self.lora_config is not None:
            gating_low = self._low_rank("gating_einsum", (2, self.features), (self.hidden_dim,))
            linear_low = self._low_rank("linear", (self.hidden_dim,), (self.features,))
        gate, value = (
            _product(x, gating[i], None if gating_low is None else (gating_low[0][i], gating_low[1][i]))
            for i in range(2)
        )
        return _product(nn.gelu(gate) * value, linear, linear_low)

    def _low_rank(self, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Array, Array]:
        assert self.lora_config is not None
        rank, init = self.lora_config.rank, self.lora_config.init_fn
        return (
            self.param(f"{name}_lora_a", init, (*before, rank)),
            self.param(f"{name}_lora_b", init, (*before[:-1], rank, *after)),
        )


def _product(x: Array, w: Array, low: tuple[Array, Array] | None) -> Array:
    out = jnp.dot(x, w.astype(x.dtype))
    if low is None:
        return out
    a, b = (update.astype(x.dtype) for update in low)
    return out + jnp.dot(jnp.dot(x, a), b)


Configs = Mapping[str, LoRAConfig]


def merge(params: Mapping[str, Any], configs: Configs | Sequence[Configs]) -> dict[str, Any]:
    """Return the parameters of a model without LoRA that computes the same: updates are added to the weights.

    The weights are `w`, `gating_einsum` and `linear`. `configs` are `Config.lora_configs`, one per expert (or a single
    one); layers stacked by scan are merged at once.
    """
    experts = [configs] if isinstance(configs, Mapping) else list(configs)
    return {name: _merged(name, value, experts) for name, value in params.items()}


def _merged(name: str, node: Any, experts: list[Configs]) -> Any:
    if not isinstance(node, Mapping):
        return node
    if "lora_a" in node:
        config = _config(name, "attn", experts)
        a, b = jnp.asarray(node["lora_a"]), jnp.asarray(node["lora_b"])
        if name.startswith("attn_vec_einsum"):
            b = jnp.broadcast_to(b.sum(axis=-3, keepdims=True), b.shape)
        return {"w": node["w"] + (a @ b) * config.scaling_value}
    if "linear_lora_a" in node:
        return {
            weight: node[weight] + jnp.asarray(node[f"{weight}_lora_a"]) @ jnp.asarray(node[f"{weight}_lora_b"])
            for weight in ("gating_einsum", "linear")
        }
    return {child: _merged(child, value, experts) for child, value in node.items()}


def _config(name: str, part: str, experts: list[Configs]) -> LoRAConfig:
    suffix = name.rpartition("_")[2]
    expert = int(suffix) if suffix.isdigit() else 0
    if expert >= len(experts) or part not in experts[expert]:
        raise UsageError(f'{name} has a low-rank update, but expert {expert} has no "{part}" among its lora_configs.')
    config = experts[expert][part]
    if config.axes != (-2, -1):
        raise UsageError(f"only updates of the last two axes can be merged, not of {config.axes}.")
    return config
