"""openpi's parameter trees of Gemma from arrays by name, and the products' arrays from such a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.spec import Array
from attnbench.steps.gemma_weights import FEED_FORWARD, NORMS, PROJECTIONS

ONE = ("",)
"""The suffix of an expert that is alone."""


def attention_tree(arrays: Mapping[str, Array], suffixes: Sequence[str]) -> dict[str, Any]:
    """Of `gemma.Attention`."""
    return {name + end: {"w": arrays[name + end]} for end in suffixes for name in PROJECTIONS}


def block_tree(arrays: Mapping[str, Array], suffixes: Sequence[str]) -> dict[str, Any]:
    """Of `gemma.Block`; with an axis of layers, of the scan over them."""
    feed_forward = {f"mlp{end}": {name: arrays[name + end] for name in FEED_FORWARD} for end in suffixes}
    norms = {name + end: {"scale": arrays[name + end]} for end in suffixes for name in NORMS}
    return {"attn": attention_tree(arrays, suffixes), **feed_forward, **norms}


def model_tree(arrays: Mapping[str, Array], suffixes: Sequence[str]) -> dict[str, Any]:
    """Of `gemma.Module`, without its embedding."""
    norms = {f"final_norm{end}": {"scale": arrays[f"final_norm{end}"]} for end in suffixes}
    return {"layers": block_tree(arrays, suffixes), **norms}


def projections_of(tree: Mapping[str, Any], suffixes: Sequence[str]) -> tuple[Array, ...]:
    """The products of an attention's tree, expert by expert."""
    return tuple(tree[name + end]["w"] for end in suffixes for name in PROJECTIONS)


def products_of(tree: Mapping[str, Any], suffixes: Sequence[str]) -> tuple[Array, ...]:
    """The products of a block's tree, expert by expert."""
    return tuple(
        one
        for end in suffixes
        for one in (*projections_of(tree["attn"], (end,)), *(tree[f"mlp{end}"][name] for name in FEED_FORWARD))
    )
