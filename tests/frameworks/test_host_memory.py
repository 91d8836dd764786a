"""A container's limit counts where it is less than the machine has."""

from __future__ import annotations

import psutil
import pytest

from attnbench.frameworks.host_memory import FILES, host_memory

GB = 10**9


def limited(folder, files, limit, used):
    for name, value in zip(files, (limit, used), strict=True):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{value}\n")
    return folder


def test_no_control_groups(tmp_path):
    assert host_memory(tmp_path).total == psutil.virtual_memory().total


@pytest.mark.parametrize("files, limit", [(FILES[0], "max"), (FILES[1], 2**63 - 4096)])
def test_control_groups_without_a_limit(tmp_path, files, limit):
    assert host_memory(limited(tmp_path, files, limit, GB)).total == psutil.virtual_memory().total


@pytest.mark.parametrize("files", FILES)
def test_a_limit(tmp_path, files):
    found = host_memory(limited(tmp_path, files, GB, GB // 4))
    assert found.total == GB
    assert found.available <= 3 * GB // 4
    assert host_memory(limited(tmp_path, files, GB, 2 * GB)) == (GB, 0)
