"""NumPy as a framework: what it says of the machine."""

from __future__ import annotations

import pytest

from attnbench.frameworks.numpy import FRAMEWORK, cpu_facts


@pytest.mark.parametrize(
    "value, threads", [("3", 3), ("2,1", 2), (" 5 , 2", 5), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_threads_as_openmp_reads_them(value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert FRAMEWORK.environment("cpu").threads == (threads or cpu_facts()["cores"])
