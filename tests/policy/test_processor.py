"""A CPU policy is of a kind of processor: what a virtual machine names it may be any generation."""

from __future__ import annotations

import json
import sys

import pytest
from msgspec import structs
from policy_factory import entry, policy
from record_factory import CPU, workload

from attnbench.frameworks.numpy import FRAMEWORK, processor_kind
from attnbench.policy import load_policy, place_of, policy_text

OLD, NEW = "GenuineIntel 6-85 avx2 avx512f", "GenuineIntel 6-207 avx2 avx512f avx512_bf16 amx_bf16"
THERE, HERE = (structs.replace(CPU, processor=kind) for kind in (OLD, NEW))


def test_another_kind_of_the_same_name_is_refused():
    found = policy(entry("torch.sdpa"), at=THERE)
    assert found.choice(workload(1024), "torch", HERE) is None
    assert f"measured on Test CPU 9000 of kind {OLD}, this is {NEW}" in str(found.stale(HERE))
    same = found.choice(workload(1024), "torch", THERE)
    assert same is not None
    assert same.caveat == ""


def test_a_policy_of_before_goes_by_the_name_and_says_so(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(policy_text(policy(entry("torch.sdpa"))))
    assert "processor" not in json.loads(path.read_text())["places"][0]
    choice = load_policy(path).choice(workload(1024), "torch", HERE)
    assert choice is not None
    assert str(choice).endswith(", on a processor named Test CPU 9000 whose kind was not recorded")


def test_what_only_a_hypervisor_named_does_not_hold_where_the_kind_is_known():
    """The name of the packaged CPU policy's machine, which any KVM guest on a Xeon has."""
    guest = structs.replace(CPU, device_name="Intel(R) Xeon(R) Processor")
    old, new = policy(entry("torch.sdpa"), at=guest), structs.replace(guest, processor=NEW)
    assert old.choice(workload(1024), "torch", guest) is not None
    assert old.choice(workload(1024), "torch", new) is None
    assert f"virtual machines give to many generations; this is {NEW}" in str(old.stale(new))
    assert policy(entry("torch.sdpa"), at=new).choice(workload(1024), "torch", new) is not None


def test_where_both_hold_the_one_that_knows_its_processor_speaks():
    both = policy(entry("torch.eager"), made="2027") | policy(entry("torch.sdpa"), at=HERE, made="2026")
    assert len(both.places) == 2
    choice = both.choice(workload(1024), "torch", HERE)
    assert choice is not None
    assert (choice.implementation, choice.caveat) == ("torch.sdpa", "")


def test_it_is_written_for_cpus_alone_and_leaves_fingerprints_as_they_were():
    (place,) = json.loads(policy_text(policy(entry("torch.sdpa"), at=HERE)))["places"]
    assert place["processor"] == NEW
    assert place_of(structs.replace(HERE, device="cuda", device_name="Test GPU")).processor == ""
    assert HERE.fingerprint == CPU.fingerprint


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
stepping\t: {stepping}
flags\t\t: fpu sse2 avx avx2 amx_bf16 avx512f

processor\t: 1
vendor_id\t: Other
"""
ARM = """processor\t: 0
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (X86.format(stepping=2), "GenuineIntel 6-207 avx2 avx512f amx_bf16"),
        (X86.format(stepping=8), "GenuineIntel 6-207 avx2 avx512f amx_bf16"),
        (ARM, "0x41 8-0xd40 asimd bf16 sve"),
        ("processor : 0\nhart : 0\n", ""),
        ("", ""),
    ],
    ids=["x86", "another stepping", "arm", "unknown", "empty"],
)
def test_what_a_processor_is(text: str, kind: str):
    assert processor_kind(text) == kind


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the platform's words are taken")
def test_an_environment_records_it():
    with open("/proc/cpuinfo") as file:
        assert FRAMEWORK.environment("cpu").processor == processor_kind(file.read())
