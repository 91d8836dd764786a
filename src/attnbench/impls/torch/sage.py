"""SageAttention: QK in int8, PV in float16 or float8; approximate by design and forward only.

Its default layout is bhsd ("HND"); bshd is asked for by name. Causal needs as many queries as keys. Version 1 subtracts
the mean of K in place, in the caller's own array: it is handed a copy, and the copy is part of the time.
"""

from __future__ import annotations

import inspect
from importlib import import_module

from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

VERSION_2_CHIPS = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0), (12, 1))
"""Compute capabilities that version 2 has kernels for; it raises on others, 10.0 among them."""


class Sage(Implementation):
    """SageAttention, version 1 (Triton) or 2 (CUDA): QK in int8, approximate, forward only."""

    name = "torch.sageattention"
    framework = "torch"
    process = "sageattention"
    approximate = True
    # Chosen here, not published: int8 logits with one scale per block give errors of a few percent in this norm.
    declared_error = 0.05

    def available(self, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            conditions.needs_package("sageattention", "pip install sageattention==1.0.6 (2.x: build its source)"),
            conditions.needs_capability(environment, (8, 0)),
            _second_version(environment),
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        rectangular = workload.visible_mask.kinds == ("causal",) and workload.q_len != workload.kv_len
        fits = workload.head_dim in (64, 96, 128)
        return first_reason(
            conditions.needs_forward(workload),
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            conditions.needs_mask(workload, "full", "causal"),
            "has a causal mask only for q_len = kv_len" if rectangular else None,
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            conditions.needs_equal_dims(workload),
            None if fits else f"takes head_dim 64, 96 or 128, not {workload.head_dim}",
        )

    def build(self, workload: Workload, config: Config) -> Call:
        sageattn = import_module("sageattention").sageattn
        causal, scale = workload.visible_mask.kinds == ("causal",), workload.softmax_scale
        # `return_lse` came with version 2, which no longer writes to K.
        writes_to_k = "return_lse" not in inspect.signature(sageattn).parameters

        def call(q: Array, k: Array, v: Array) -> Array:
            keys = k.clone() if writes_to_k else k
            return sageattn(q, keys, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale)

        return call


def _second_version(environment: Environment) -> str | None:
    """Refuse chips for which version 2 has no kernel; version 1 is Triton, which compiles for all."""
    chip = environment.capability
    if not environment.packages.get("sageattention", "").startswith("2") or chip is None or chip in VERSION_2_CHIPS:
        return None
    return f"version 2 has no kernels for compute capability {chip[0]}.{chip[1]}: pip install sageattention==1.0.6"


SAGE = Sage()
