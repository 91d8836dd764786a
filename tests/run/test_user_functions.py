"""Functions of the user: their names, and how they reach a worker."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

import attnbench as ab
from attnbench import registry
from attnbench.comparing.compare import IN_PROCESS
from attnbench.errors import UsageError
from attnbench.results.run_file import Header, Run
from attnbench.run import user_functions
from attnbench.run.launch import Listener, Request, launch, plan_only
from attnbench.run.user_functions import CannotSend, from_object, from_reference, name_references, told_apart
from attnbench.spec import Implementation, Record, Unsupported, Workload

SMALL = Workload(batch=1, q_len=8, heads=2, head_dim=4)


def attend(q, k, v):
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v).astype(q.dtype)


def by_helper(q, k, v):
    return attend(q, k, v)


class Registered(Implementation):
    name, framework = "numpy.registered", "numpy"

    def __init__(self):
        self.lock = threading.Lock()

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return attend


def verify(*what, **options):
    records = []
    request = Request(workloads=(SMALL,), implementations=what, framework="numpy", measure=False, **options)
    launch(request, records.extend, Listener())
    return records


def test_by_value_from_a_test_module_and_as_a_closure():
    def closure(q, k, v):
        return by_helper(q, k, v)

    records = verify(by_helper, closure, lambda q, k, v: closure(q, k, v) * 1)
    assert [(record.status, record.isolation) for record in records] == [("ok", "worker")] * 3
    assert [record.implementation for record in records] == ["by_helper", "closure", "<lambda>"]


def test_names_that_are_taken_get_a_number():
    records = verify(lambda q, k, v: attend(q, k, v), lambda q, k, v: 2 * attend(q, k, v))
    assert [(record.implementation, record.status) for record in records] == [
        ("<lambda>", "ok"),
        ("<lambda>-2", "incorrect"),
    ]


class Deprecated:
    """Warns whenever somebody asks what it is, as torch.distributed.reduce_op does."""

    @property
    def __class__(self):
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return type(self)


def test_what_warns_when_it_is_looked_at_travels_all_the_same():
    old = Deprecated()

    def mine(q, k, v):
        return attend(q, k, v) if old else None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_object(mine, "numpy", set()) is not None


def test_what_holds_a_lock_cannot_travel():
    lock = threading.Lock()

    def locked(q, k, v):
        with lock:
            return attend(q, k, v)

    assert from_object(locked, "numpy", set()) is None
    with pytest.raises(CannotSend, match="'locked' cannot be sent"):
        verify(locked)
    records = verify(locked, lambda q, k, v: locked(q, k, v), lambda q, k, v: 2 * locked(q, k, v), in_process=True)
    assert [record.status for record in records] == ["ok", "ok", "incorrect"]
    assert {record.isolation for record in records} == {"in-process"}
    assert len({record.implementation for record in records}) == 3


def test_one_registered_by_hand_is_known_to_workers_or_stays_here(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(Registered())
    with pytest.raises(CannotSend):
        verify("numpy.registered")
    (record,) = verify("numpy.registered", in_process=True)
    assert (record.implementation, record.status, record.isolation) == ("numpy.registered", "ok", "in-process")
    registry.get("numpy.registered").lock = None
    (record,) = verify("numpy.registered")
    assert (record.implementation, record.status, record.isolation) == ("numpy.registered", "ok", "worker")


MODULE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from traps import attend

def mine(q, k, v):
    return attend(q, k, v, causal=False)

constant = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fast.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("reference", ["kernels/fast.py:mine", "kernels.fast:mine"])
def test_by_reference_to_a_file_or_a_module_of_the_working_folder(folder, reference):
    (record,) = verify(reference)
    assert (record.implementation, record.status) == ("mine", "ok")
    assert "kernels.fast" not in sys.modules


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("nowhere.py:mine", "there is no file nowhere.py"),
        ("kernels/fast.py:", "names no function: write file.py:function"),
        (":mine", '":mine" names no file or module: write file.py:function'),
        ("kernels/fast.py:mein", r'no function in .*fast.py called "mein". Near: mine'),
        ("kernels/fast.py:constant", "is a int, not a function of"),
        ("kernels.slow:mine", r"kernels.slow:mine.* could not be imported: ModuleNotFoundError"),
        ("broken.py:mine", "could not be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("deadly.py:mine", "deadly.py:mine could not be loaded: the process ended with code 3"),
    ],
)
def test_a_bad_reference_is_a_clear_usage_error(folder, reference, told):
    with pytest.raises(UsageError, match=told):
        plan_only(Request(workloads=(SMALL,), implementations=(reference,), framework="numpy"), Listener())


def test_a_reference_keeps_its_file_when_the_worker_is_elsewhere(folder):
    user_function = from_reference("kernels/fast.py:mine", "numpy", {"mine"})
    assert user_function.name == "mine-2"
    assert user_function.reference == f"{folder.resolve()}/kernels/fast.py:mine"


SCRIPT = """
import numpy as np
import attnbench as ab

def mine(q, k, v):
    return helper(q, k, v)

def helper(q, k, v):
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v).astype(q.dtype)

record = ab.verify(mine, ab.Workload(batch=1, q_len=8, heads=2, head_dim=4), framework="numpy")
print(record.status, record.isolation)
"""


def test_by_value_from_a_script_without_a_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["ok", "worker"], done.stderr


HELPERS = """
REPEAT = 1

def factor():
    return REPEAT
"""
USING = """
import functools
import numpy as np
import helpers
from helpers import factor
from traps import attend as plain

FACTOR = 1

def by_module(q, k, v):
    return plain(q, k, v, causal=False) * helpers.REPEAT

def by_name(q, k, v):
    return plain(q, k, v, causal=False) * factor()

def by_own(q, k, v):
    return plain(q, k, v, causal=False) * FACTOR

class Holder:
    def attend(self, q, k, v):
        return by_module(q, k, v)

    def __call__(self, q, k, v):
        return by_name(q, k, v)

HELD = Holder()
"""


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Modules of the user whose values this process has changed since it imported them: all results are thrice."""
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "using.py").write_text(USING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name in ("helpers", "using"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    using, helpers = importlib.import_module("using"), importlib.import_module("helpers")
    helpers.REPEAT = using.FACTOR = 3
    yield using
    for name in ("helpers", "using"):
        sys.modules.pop(name, None)


def test_a_function_is_measured_as_this_process_has_it(patched):
    ways = [patched.by_module, patched.by_name, patched.by_own, patched.HELD, patched.HELD.attend]
    ways += [functools.partial(patched.by_module), lambda q, k, v: patched.by_name(q, k, v)]
    for way in ways:
        (record,) = verify(way)
        assert (record.status, record.isolation) == ("incorrect", "worker"), way
    patched.helpers.REPEAT = patched.FACTOR = 1
    assert [verify(way)[0].status for way in ways] == ["ok"] * len(ways)


@pytest.mark.torch
def test_settings_of_the_library_that_stay_behind_are_noted():
    torch = pytest.importorskip("torch")
    switches = torch.backends.cuda

    def own(q, k, v):
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    before = switches.flash_sdp_enabled()
    try:
        switches.enable_flash_sdp(True)
        assert ab.verify(own, SMALL).notes == ()
        switches.enable_flash_sdp(False)
        note = "measured with torch's flash SDPA switch as True, which the calling process has set to False"
        assert ab.verify(own, SMALL).notes == (note,)
        found = ab.compare(own, own, SMALL, framework="torch", budget_s=0.01)
        assert (note in found.record_a.notes, note in found.record_b.notes) == (True, True)
    finally:
        switches.enable_flash_sdp(before)


def test_what_its_modules_hold_may_keep_it_here(patched):
    patched.helpers.LOCK = threading.Lock()
    assert from_object(patched.by_module, "numpy", set()) is None
    assert from_object(patched.by_name, "numpy", set()) is not None, "it uses one function of the module"
    found = ab.compare(patched.by_own, patched.by_module, SMALL, framework="numpy", budget_s=0.01)
    assert found.record_b.status == "incorrect"
    assert IN_PROCESS in found.notes


def test_what_importing_a_module_registers_is_there(patched, tmp_path):
    (tmp_path / "registers.py").write_text(
        "import builtins\nbuiltins.registered_by_import = True\ndef used(x): return x\n"
    )
    import registers

    def mine(q, k, v):
        assert registered_by_import  # noqa: F821
        return registers.used(attend(q, k, v))

    try:
        assert verify(mine)[0].status == "ok"
    finally:
        sys.modules.pop("registers")


@pytest.mark.parametrize(
    ("references", "names"),
    [
        (["a.py:f"], ["f"]),
        (["a.py:f", "b.py:g"], ["f", "g"]),
        (["a.py:f", "b.py:f", "a.py:g"], ["a:f", "b:f", "g"]),
        (["new/a.py:f", "old/a.py:f", "b.py:f"], ["new/a:f", "old/a:f", "b:f"]),
        (["a.py:f", "./a.py:f"], ["f", "f-2"]),
        (["a.py:f", "./a.py:f", "b.py:f"], ["a:f", "a:f-2", "b:f"]),
        (["kernels.fast:f", "kernels.slow:f"], ["fast:f", "slow:f"]),
        (["old.fast:f", "new.fast:f", "fast:f"], ["old.fast:f", "new.fast:f", "fast:f"]),
        (["a.py:f", "kernels.fast:f"], ["a:f", "fast:f"]),
    ],
)
def test_the_file_is_named_where_functions_share_a_name(
    references: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert name_references(references) == dict(zip(references, names))


def test_what_is_no_reference_is_left_alone_and_its_name_is_not_given_twice():
    assert name_references(["torch.sdpa", len, "a.py:f"], {"f"}) == {"a.py:f": "f-2"}


def test_a_module_in_any_site_packages_is_installed(tmp_path, monkeypatch):
    for folder, own in (("site-packages", False), ("project", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"in_{folder.partition('-')[0]}.py").write_text("VALUE = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        module = importlib.import_module(f"in_{folder.partition('-')[0]}")
        assert user_functions._is_own(module) is own


def run_of(*references: str, names: tuple[str, ...] = ("attend", "torch.sdpa")) -> Run:
    """A run of these functions, with records of these names."""
    header = Header(
        schema=1, attnbench="0", created="2026-01-01T00:00:00+00:00", request={"implementations": references}
    )
    records: list[Record] = [Unsupported(implementation=name, workload=SMALL, reason="not here") for name in names]
    return Run(header, {}, tuple(records))


def names_in(runs: dict[Path, Run]) -> list[list[str]]:
    return [[record.implementation for record in run.records] for run in runs.values()]


def test_functions_of_one_name_in_several_runs_are_told_apart():
    runs = {
        Path("1"): run_of("x/fast.py:attend"),
        Path("2"): run_of("y/slow.py:attend"),
        Path("3"): run_of("torch.sdpa"),
    }
    told, places = told_apart(runs)
    assert names_in(told) == [["fast:attend", "torch.sdpa"], ["slow:attend", "torch.sdpa"], ["attend", "torch.sdpa"]]
    assert places == {"fast:attend": "x/fast.py", "slow:attend": "y/slow.py"}


@pytest.mark.parametrize(
    "runs",
    [
        [run_of("kern.py:attend"), run_of("/home/me/kern.py:attend"), run_of("pkg.kern:attend")],
        [run_of("x/fast.py:attend", "y/slow.py:attend", names=("fast:attend", "slow:attend"))],
        [run_of("kern.py:attend"), run_of("other.py:another", names=("another",))],
    ],
    ids=["one file", "told apart already", "two names"],
)
def test_other_names_stay_as_they_are(runs: list[Run]):
    given = {Path(str(number)): run for number, run in enumerate(runs)}
    assert told_apart(given) == (given, {})


def test_a_run_of_both_keeps_its_names_beside_a_run_of_one():
    both = run_of("x/fast.py:attend", "y/slow.py:attend", names=("fast:attend", "slow:attend"))
    told, places = told_apart({Path("1"): both, Path("2"): run_of("x/fast.py:attend")})
    assert names_in(told) == [["fast:attend", "slow:attend"], ["fast:attend", "torch.sdpa"]]
    assert places == {"fast:attend": "x/fast.py"}
