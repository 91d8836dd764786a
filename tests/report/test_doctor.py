from __future__ import annotations

import io

import msgspec
from record_factory import CPU
from rich.console import Console

from attnbench.report.environment import diagnosis_verdict, print_diagnosis, remark
from attnbench.run.environment import Diagnosis, ImplementationState
from attnbench.spec import Library


def state(name: str, reason: str | None = None, **fields) -> ImplementationState:
    made = {
        "name": name, "framework": name.partition(".")[0], "origin": "attnbench", "approximate": False,
        "reason": reason, "timed": True, "note": "", "untested": (),
    }  # fmt: skip
    return ImplementationState(**(made | fields))


def test_doctor_tells_device_libraries_and_reasons():
    cudnn = Library("cudnn", "9.19", "/wheel/libcudnn.so", ("/usr/lib/libcudnn.so 9.14",))
    environment = msgspec.structs.replace(CPU, libraries=(cudnn,), memory_bytes=8 * 10**9)
    states = [
        state("torch.eager"),
        state("torch.fa3", "needs cuda, this is cpu"),
        state("jax.splash", timed=False, note="interpreted on CPU"),
    ]
    diagnosis = Diagnosis(
        environments={"torch": environment}, frameworks={"torch": None, "jax": "not installed"}, implementations=states
    )
    stream = io.StringIO()
    print_diagnosis(Console(file=stream, width=180), diagnosis)
    text = stream.getvalue()
    for expected in (
        "Test CPU 9000 (cpu)", "8.00 GB", "torch 2.13.0",
        "cudnn 9.19 from /wheel/libcudnn.so; hides /usr/lib/libcudnn.so 9.14",
        "not usable: not installed", "needs cuda, this is cpu", "verify only", "interpreted on CPU",
        "2 of 3 implementations run here",
    ):  # fmt: skip
        assert expected in text


def test_remarks_gather_what_to_know():
    told = remark(
        state(
            "torch.sage",
            "not installed: pip install sageattention",
            approximate=True,
            untested=("rocm",),
            origin="other",
        )
    )
    for expected in ("pip install sageattention", "approximate", "untested on rocm", "from other"):
        assert expected in told


def test_verdict_without_any():
    assert "pip install" in diagnosis_verdict([state("torch.eager", "torch is not installed")])
