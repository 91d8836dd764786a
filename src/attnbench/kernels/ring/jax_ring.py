"""jax.ring and jax.all-gather: attention over a sequence sharded over the devices of this process; see docs/ring.md.

Arrays are brought into slot order and onto the devices before the clock starts, and back after it has stopped.
"""

from __future__ import annotations

from typing import Any, Self

from attnbench.errors import UsageError
from attnbench.impls.conditions import first_reason, needs_dtype
from attnbench.impls.partial.jax_passes import Rule
from attnbench.kernels.ring.jax_movement import AXIS, Gather, Travel
from attnbench.kernels.ring.layouts import check_layout
from attnbench.kernels.ring.settings import BY_NAME_ONLY, needs_dense_mask, problem_of
from attnbench.spec import Call, Config, Environment, Implementation, Workload

FORCE = "XLA_FLAGS=--xla_force_host_platform_device_count=8"


class OverMesh(Implementation):
    """`jax.ring[world=4,layout=striped]`; world 0 means every device."""

    framework = "jax"
    materialises_scores = False
    tunables = {"world": 0, "layout": "zigzag"}
    untested = ("cuda", "rocm", "tpu")
    by_name_only = BY_NAME_ONLY

    def __init__(self, name: str, movement: type[Travel] | type[Gather]) -> None:
        self.name, self._movement = name, movement

    def configured(self, config: Config) -> Self:
        self._settings(config)
        return self

    def available(self, environment: Environment) -> str | None:
        count = environment.devices
        hint = f"; a CPU can be made several: {FORCE}" if environment.device == "cpu" else ""
        return f"needs two or more devices in one process, this one has {count}{hint}" if count < 2 else None

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(
            self.available(environment),
            needs_dense_mask(workload),
            needs_dtype(workload, "float64", "float32", "bfloat16"),
        )

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=True)

    def apparatus(self, framework: Any, config: Config) -> Any:
        from attnbench.kernels.ring.jax_apparatus import MeshApparatus

        return MeshApparatus()

    def _call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.kernels.ring.jax_call import MeshCall

        asked, layout = self._settings(config)
        rule = Rule(workload.softmax_scale, workload.softcap)

        def make(kind: str) -> Any:
            found = _devices(kind)
            world = asked or len(found)
            if world > len(found):
                raise UsageError(f"world {world} is more than the {len(found)} devices of this process.")
            return problem_of(workload, world, layout), rule, mesh_of(found[:world]), self._movement(world)

        return MeshCall(workload, make, with_lse)

    def _settings(self, config: Config) -> tuple[int, str]:
        """World and layout; raises for what cannot be."""
        settings = {**self.tunables, **config}
        layout, world = str(settings["layout"]), settings["world"]
        check_layout(layout)
        if not isinstance(world, int) or world < 0:
            raise UsageError(f"world must be a whole number, 0 for every device, not {world!r}.")
        return world, layout


def _devices(kind: str) -> list[Any]:
    from attnbench.frameworks.jax.framework import import_jax

    try:
        return import_jax().devices(kind)
    except RuntimeError:
        return []


def mesh_of(devices: list[Any]) -> Any:
    """A line of devices; axes are Auto, since shard_map takes inputs from anywhere only then."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


RING = OverMesh("jax.ring", Travel)
ALL_GATHER = OverMesh("jax.all-gather", Gather)
