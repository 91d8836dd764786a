from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(quick_to_compile):
    """Every test here runs JAX."""
