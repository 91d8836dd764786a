from __future__ import annotations

import pytest

OPTION = "jax_disable_most_optimizations"


@pytest.fixture(autouse=True)
def quick_to_compile(request):
    """These programs are tiny: without XLA's optimisations they compile in half the time. A GPU's kernels need them."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    jax = pytest.importorskip("jax")
    before = jax.config.read(OPTION)
    jax.config.update(OPTION, True)
    yield
    jax.config.update(OPTION, before)
