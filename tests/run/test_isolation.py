"""One cell's death is its own: the others are opened again, the sweep goes on, and no worker is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from cli_process import alive

from attnbench.impls.numpy import FLOAT32
from attnbench.measuring.anchors import NAMES
from attnbench.measuring.rates import Ceilings
from attnbench.measuring.sampling import Dropped
from attnbench.results.run_file import Run
from attnbench.results.standings import rank
from attnbench.run import protocol as p
from attnbench.run import remote, user_functions
from attnbench.run.launch import Listener, Request, launch
from attnbench.run.plan import Group, Planned
from attnbench.run.pool import Pool
from attnbench.run.remote import WorkerDied
from attnbench.run.worker import Worker
from attnbench.run.workload import CellDied, RemoteCell, WorkloadRun
from attnbench.spec import Cell, Environment, Failed, Implementation, Incorrect, Ok, OutOfMemory, Workload

HERE = Path(__file__).parent


class Apart(Implementation):
    """Right, in a process of its own."""

    framework = "numpy"

    def __init__(self, process):
        self.name, self.process = f"numpy.in-{process}", process

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return FLOAT32.build(workload, config)


class Hangs(Apart):
    """Never comes back."""

    def build(self, workload, config):
        return lambda q, k, v: time.sleep(600)


@pytest.fixture
def openings(monkeypatch, tmp_path):
    """The processes that `counts_its_openings` ran in."""
    log = tmp_path / "openings"
    log.touch()
    monkeypatch.setenv("TRAP_LOG", str(log))
    return lambda: log.read_text().split()


def lengths(workload, *values):
    return [msgspec.structs.replace(workload, q_len=n, kv_len=n) for n in values]


def test_those_opened_before_a_death_are_opened_again(lab, trap, openings, monkeypatch):
    monkeypatch.setattr(user_functions, "process_of", lambda name: "shared, as by attnbench's own implementations")
    seen = lab(trap("counts_its_openings"), trap("crashes"), trap("honest"))
    assert [record.status for record in seen.records] == ["ok", "failed", "ok"]
    assert len(openings()) == len(set(openings())) == 2


def test_a_verified_cell_is_not_verified_twice(lab, trap, openings):
    seen = lab(trap("counts_its_openings"), trap("crashes"), trap("honest"), measure=False)
    assert [record.status for record in seen.records] == ["ok", "failed", "ok"]
    assert all(record.time is None for record in seen.records)
    assert len(openings()) == 1
    finished = [cell for event, cell in seen.events if event == "finished"]
    assert len(finished) == len(set(finished)) == 3


def test_a_failed_cell_has_the_end_of_its_stderr(lab, trap):
    record = lab(trap("crashes"), measure=False).records[0]
    assert isinstance(record, Failed)
    assert "Segmentation fault" in record.detail
    assert "traps.py" in record.detail
    assert record.environment is not None


def test_one_with_a_process_of_its_own_needs_no_other(lab):
    seen = lab(Apart("a"), Apart("b"))
    assert [(record.implementation, record.status) for record in seen.records] == [
        ("numpy.in-a", "ok"),
        ("numpy.in-b", "ok"),
    ]


def test_each_workload_is_handed_over_before_the_next_begins(lab, trap, causal):
    first, second = lengths(causal, 16, 20)
    seen = lab(trap("honest"), trap("leaves"), trap("also_honest"), workloads=[first, second, first])
    assert len(seen.batches) == 2
    for batch in seen.batches:
        names = [record.implementation for record in batch]
        assert names == ["honest", "leaves", "also_honest", "anchor.matmul", "anchor.copy"]
    handed_over = seen.events.index(("sink", first.id))
    assert all(second.id not in cell for _, cell in seen.events[:handed_over])
    assert all(first.id not in cell for _, cell in seen.events[handed_over + 1 :])


def test_what_is_done_is_not_run_again(lab, trap, causal):
    first, second = lengths(causal, 16, 20)
    seen = lab(trap("honest"), workloads=[first, second], done=frozenset({f"honest/{first.id}"}))
    assert [record.workload.id for record in seen.records] == [second.id]


def test_an_anchor_that_dies_costs_itself_alone(lab, trap, monkeypatch):
    real = Pool.ask

    def ask(self, group, question, timeout_s):
        if isinstance(question, p.Open) and question.cell.implementation == "anchor.matmul":
            self.dismiss(group)
            raise WorkerDied("failed", "crashed")
        return real(self, group, question, timeout_s)

    monkeypatch.setattr(Pool, "ask", ask)
    seen = lab(trap("honest"), "numpy.float32")
    statuses = {record.implementation: record.status for batch in seen.batches for record in batch}
    assert statuses == {"honest": "ok", "numpy.float32": "ok", "anchor.matmul": "failed", "anchor.copy": "ok"}


def test_a_kernel_cannot_break_the_anchors(lab, trap):
    seen = lab(trap("honest"), trap("breaks_the_anchor"))
    statuses = {record.implementation: record.status for batch in seen.batches for record in batch}
    assert statuses == {"honest": "ok", "breaks_the_anchor": "failed", "anchor.matmul": "ok", "anchor.copy": "ok"}
    assert "adapter of numpy" in seen.by_name["breaks_the_anchor"].reason


def test_anchors_and_ceilings_are_asked_of_a_worker_without_user_code(lab, trap, monkeypatch):
    asked = []
    real = Pool.ask
    monkeypatch.setattr(Pool, "ask", lambda self, *words: (asked.append(words[:2]), real(self, *words))[1])
    monkeypatch.setattr("attnbench.run.pool.load_ceilings", lambda *_: None)
    monkeypatch.setattr("attnbench.run.pool.store_ceilings", lambda *_: None)
    lab(trap("honest"))
    lab("numpy.float32", in_process=True)
    groups = {
        group
        for group, question in asked
        if isinstance(question, p.MeasureCeilings)
        or (isinstance(question, p.Open) and question.cell.implementation in NAMES)
    }
    assert groups == {Group("numpy"), Group("numpy", "anchors")}
    assert Group("numpy", "user function honest") in {
        group for group, question in asked if isinstance(question, p.Open)
    }


def test_a_worker_that_dies_while_all_are_finished_leaves_one_sitting(lab, monkeypatch):
    """Whoever dies in the last figures takes the samples of that attempt along: what is paired was taken together."""
    real, died = WorkloadRun._timed_record, []

    def dies_once(self, one, series):
        if one.cell.implementation == "numpy.reference" and not died:
            died.append(1)
            self._pool.dismiss(one.group)
            raise CellDied(
                one.cell, one.group, Failed(implementation="numpy.reference", workload=one.cell.workload, reason="x")
            )
        return real(self, one, series)

    monkeypatch.setattr(WorkloadRun, "_timed_record", dies_once)
    seen = lab("numpy.float32", "numpy.reference")
    made = {record.implementation: record for batch in seen.batches for record in batch}
    assert made.pop("numpy.reference").status == "failed"
    assert {name: record.status for name, record in made.items()} == dict.fromkeys(made, "ok")
    assert {record.time.sitting[-2:] for record in made.values()} == {"+1"}


class Watched:
    """Pool.ask, with something that happens before questions are passed on."""

    def __init__(self, monkeypatch, before=lambda pool, group, question: None, after=lambda answer: answer):
        self.questions, real = [], Pool.ask

        def ask(pool, group, question, timeout_s):
            before(pool, group, question)
            self.questions.append(question)
            return after(real(pool, group, question, timeout_s))

        monkeypatch.setattr(Pool, "ask", ask)


def test_ceilings_that_are_measured_again_cost_no_cell(lab, monkeypatch):
    """Measuring them may end the worker in which cells are open, so everything that needs those comes before."""
    again = []

    def ceilings(pool, dtype, device, again_=False, **words):
        if not words.get("again", again_):
            return Ceilings(1.0, 1.0)
        pool.dismiss(pool.clean("numpy"))
        again.append(len(watched.questions))
        return Ceilings(1e15, 1e15)

    def with_another_clock(answer):
        return msgspec.structs.replace(answer, other_clocks=("wall",)) if isinstance(answer, p.Warm) else answer

    watched = Watched(monkeypatch, after=with_another_clock)
    monkeypatch.setattr(Pool, "ceilings", ceilings)
    seen = lab("numpy.float32", "numpy.reference")
    assert len(again) == 1
    assert [record.status for record in seen.records] == ["ok", "ok"]
    assert all("wall" in record.also for record in seen.records)
    assert not [one for one in watched.questions[again[0] :] if not isinstance(one, p.Release)]
    assert not any("ended between" in warning for warning in seen.warnings)


@pytest.mark.parametrize("kind", [p.WarmUp, p.TakeSample, p.SampleOther])
def test_a_worker_that_ended_between_two_questions_costs_no_cell(lab, monkeypatch, kind):
    gone = []

    def end_once(pool, group, question):
        if isinstance(question, kind) and not gone:
            gone.append(question.cell)
            pool.dismiss(group)

    def with_another_clock(answer):
        return msgspec.structs.replace(answer, other_clocks=("wall",)) if isinstance(answer, p.Warm) else answer

    Watched(monkeypatch, end_once, with_another_clock)
    seen = lab("numpy.float32", "numpy.reference")
    assert gone
    assert {r.implementation: r.status for batch in seen.batches for r in batch} == dict.fromkeys(
        ("numpy.float32", "numpy.reference", *NAMES), "ok"
    )
    told = [warning for warning in seen.warnings if "load" not in warning]
    assert told == ["a numpy worker ended while it was idle: its cells start again"]


def test_one_that_ends_its_worker_whenever_it_was_sampled_is_found_out(lab, trap, monkeypatch):
    """The others are asked next, and would be blamed."""
    poisoned = set()

    def ends_later(pool, group, question):
        if group in poisoned:
            poisoned.discard(group)
            pool.dismiss(group)
        if isinstance(question, p.TakeSample) and question.cell.startswith("numpy.reference/"):
            poisoned.add(group)

    Watched(monkeypatch, ends_later)
    seen = lab("numpy.reference", "numpy.float32", trap("honest"))
    assert {name: record.status for name, record in seen.by_name.items()} == {
        "numpy.reference": "failed", "numpy.float32": "ok", "honest": "ok",
    }  # fmt: skip
    assert "ended while it was idle" in seen.by_name["numpy.reference"].reason
    assert any("measured apart" in note for note in seen.by_name["numpy.float32"].notes)


@pytest.mark.new_workers
def test_a_worker_that_is_gone_before_it_is_asked_is_replaced(causal):
    with Pool((), None, None) as pool:
        group = Group("numpy")
        pool.start([group])
        worker = pool._workers[group]
        worker._process.kill()
        worker._process.wait()
        worker._process.poll = lambda: None  # as if it had ended a moment later
        cell = Cell("numpy.float32", causal)
        assert isinstance(pool.ask(group, p.Open(cell, False, True, None, 1), 60), p.Opened)
        refused = pool.ask(group, p.TakeSample("other", "main", 1, 1), 60)
        assert isinstance(refused, p.Refused)
        assert refused.not_open


@pytest.mark.parametrize(
    "question",
    [
        p.WarmUp("cell"),
        p.TakeSample("cell", "main", 1, 1),
        p.SampleOther("cell", "wall", 1),
        p.TakeBlock("cell", 1),
        p.Trace("cell", "folder"),
    ],
)
def test_a_worker_refuses_what_it_does_not_have_open(question):
    answer = Worker("numpy", "cpu").answer(question)
    assert answer == p.Refused("cell is not open in this process", not_open=True)
    assert p.fault(question, answer, 0, 0) is None


def test_one_that_was_wrong_when_timed_stays_wrong_when_another_dies(lab, trap, monkeypatch):
    """Its session is gone: to warm it up again would end the worker, and with it the others that are open there."""
    wrong, died = [], []
    real = RemoteCell.sample

    def sample(self, part, count, calls):
        name = self.cell.implementation
        if name == "numpy.float32" and not wrong:
            wrong.append(name)
            self.lost = Incorrect(implementation=name, workload=self.cell.workload, reason="wrong when timed")
            self.pool.ask(self.group, p.Release(), 60)  # of its session, and here of all of its worker
            raise Dropped
        if name == "honest" and wrong and not died:
            died.append(name)
            self.pool.dismiss(self.group)
            raise CellDied(self.cell, self.group, Failed(implementation=name, workload=self.cell.workload, reason="x"))
        return real(self, part, count, calls)

    monkeypatch.setattr(RemoteCell, "sample", sample)
    seen = lab("numpy.float32", trap("honest"), trap("also_honest"))
    assert (wrong, died) == (["numpy.float32"], ["honest"])
    statuses = {name: record.status for name, record in seen.by_name.items()}
    assert statuses == {"numpy.float32": "incorrect", "honest": "failed", "also_honest": "ok"}


class Fails:
    """Remote.start, of which the first few workers die before they answer."""

    def __init__(self, monkeypatch, times):
        self.started, self._times, self._real = 0, times, remote.start
        monkeypatch.setattr(remote, "start", self)

    def __call__(self, module, *words, **more):
        self.started += 1
        return self._real("attnbench.no_such_module" if self.started <= self._times else module, *words, **more)


@pytest.mark.new_workers
def test_a_worker_that_dies_while_it_starts_is_tried_again(lab, monkeypatch):
    starts = Fails(monkeypatch, 1)
    assert [record.status for record in lab("numpy.float32", measure=False).records] == ["ok"]
    assert starts.started == 2


@pytest.mark.new_workers
def test_one_that_never_starts_has_failed_and_is_tried_by_the_next_resume(lab, trap, monkeypatch):
    starts = Fails(monkeypatch, 3)  # both at first, and the first one again
    seen = lab("numpy.float32", trap("honest"), measure=False)
    failed, honest = seen.records
    assert (failed.status, failed.unstarted, honest.status) == ("failed", True, "ok")
    assert "no numpy worker could be started, tried twice" in failed.reason
    assert starts.started == 4
    run = Run(None, {}, tuple(seen.records))
    assert run.done == {honest.cell.id}
    again = msgspec.json.decode(msgspec.json.encode(failed), type=Failed)
    assert again.unstarted


def test_a_file_that_no_longer_loads_costs_its_own_cells(lab, tmp_path, causal):
    """The process is gone and a new one cannot load the file: no reason to lose what others have measured."""
    path = tmp_path / "once.py"
    path.write_text(
        f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\nfrom traps import attend\n"
        f"def once(q, k, v):\n    os.unlink({str(path)!r})\n    os._exit(3)\n"
    )
    seen = lab(f"{path}:once", "numpy.float32", workloads=lengths(causal, 16, 20))
    assert [record.status for record in seen.records] == ["failed", "ok", "failed", "ok"]
    assert "could not be loaded again" in seen.records[2].reason


def test_one_that_cannot_say_what_it_supports_is_refused(lab, trap):
    seen = lab(trap("confused"), trap("deadly"), trap("honest"))
    assert [record.status for record in seen.records] == ["unsupported", "unsupported", "ok"]
    assert "KeyError" in seen.by_name["confused"].reason
    assert "ended with code 5" in seen.by_name["deadly"].reason


def test_two_names_for_one_function_are_not_ranked_apart(lab, trap, causal):
    """In one of six runs at least: a busy machine sets two equals apart now and then, a bias always. How often chance
    alone does is pinned on samples made by hand, in tests/results/test_standings.py."""
    workloads = lengths(causal, 24, 32)
    closings = []
    for seed in range(6):
        seen = lab(trap("honest"), trap("also_honest"), workloads=workloads, trials=25, seed=seed)
        places = [row.rank for one in workloads for row in rank([it for it in seen.records if it.workload == one])]
        assert len(places) == 4
        if set(places) == {1}:
            assert "No confident winner" in seen.closing
            return
        closings.append(f"{places} {seen.closing}")
    pytest.fail("\n".join(closings))


@pytest.mark.new_workers
@pytest.mark.parametrize("trouble", [KeyboardInterrupt, OSError, RuntimeError])
def test_no_worker_outlives_an_exception(trap, ceilings, causal, trouble):
    children = []

    def sink(records):
        children.extend(child.pid for child in psutil.Process().children())
        raise trouble

    before = {child.pid for child in psutil.Process().children()}
    request = Request(workloads=(causal,), implementations=(trap("honest"),), framework="numpy", budget_s=0.01)
    with pytest.raises(trouble):
        launch(request, sink, Listener())
    workers = set(children) - before
    assert workers
    assert not any(alive(pid) for pid in workers)


def test_ctrl_c_does_not_wait_for_workers_that_open_side_by_side(ceilings, monkeypatch, causal):
    introduce = Pool._introduce

    def as_accelerator(self, group):
        introduce(self, group)
        self.environments[group] = msgspec.structs.replace(self.environments[group], device="accelerator")

    monkeypatch.setattr(Pool, "_introduce", as_accelerator)
    request = Request(workloads=(causal,), implementations=("numpy.float32", Hangs("a"), Hangs("b")), framework="numpy")
    opening = threading.Event()
    listener = Listener()
    listener.stage = lambda cell, stage: opening.set()  # pyright: ignore[reportAttributeAccessIssue]

    def interrupt():
        opening.wait(30)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)  # to the process, as a terminal does

    threading.Thread(target=interrupt).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(request, lambda records: None, listener)
    assert time.monotonic() - start < request.timeout_s


def test_a_pool_that_was_interrupted_answers_again(causal):
    cell = Cell("numpy.float32", causal)
    with Pool((), None, None) as pool:
        pool.start([Group("numpy")])
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            pool.ask(Group("numpy"), p.MeasureCeilings("float32"), 60)
        assert pool.refusals([cell]) == [Planned(cell, None)]


def test_traces_are_written_and_a_folder_that_cannot_be_made_is_told(lab, trap, tmp_path):
    (tmp_path / "taken").touch()
    good = lab(trap("honest"), trace=tmp_path / "traces")
    bad = lab(trap("honest"), trace=tmp_path / "taken")
    (written,) = (tmp_path / "traces").iterdir()
    assert written.suffix == ".json"
    assert any(str(written) in warning for warning in good.warnings)
    assert any("no trace of honest" in warning and "FileExistsError" in warning for warning in bad.warnings)
    assert isinstance(good.records[0], Ok)
    assert isinstance(bad.records[0], Ok)


def test_threads_are_set_and_pinned(lab):
    seen = lab("numpy.float32", threads=1, measure=False)
    environment = seen.records[0].environment
    assert environment.threads == 1
    assert environment.variables["OMP_NUM_THREADS"] == "1"
    assert len(os.sched_getaffinity(0)) >= environment.cores == 1


def test_a_cell_crowded_out_of_device_memory_is_measured_alone(monkeypatch):
    """On an accelerator all workers share one memory: what ran out of it in company runs once more by itself."""
    from attnbench.run import workload as module

    asked, dismissed = [], []
    monkeypatch.setattr(module.WorkloadRun, "_shares_memory", lambda self, record: True)
    monkeypatch.setattr(Pool, "dismiss_all", lambda self, real=Pool.dismiss_all: (dismissed.append(1), real(self)))
    real = module.WorkloadRun._open

    def open_or_run_out(self, cell, group):
        asked.append((cell.implementation, self._in_company))
        if cell.implementation == "numpy.float32" and self._in_company:
            facts = {"implementation": cell.implementation, "workload": cell.workload}
            self._finish(OutOfMemory(reason="no room", **facts))
            return None
        return real(self, cell, group)

    monkeypatch.setattr(module.WorkloadRun, "_open", open_or_run_out)
    workload = Workload(batch=1, q_len=16, heads=1, head_dim=8)
    records = []
    request = Request(workloads=(workload,), implementations=("numpy.float32", "torch.eager"), budget_s=0.01)
    finished = []
    listener = Listener()
    listener.finished = finished.append
    launch(request, records.extend, listener)
    by_name = {record.implementation: record for record in records}
    assert asked.count(("numpy.float32", True)) == asked.count(("numpy.float32", False)) == 1
    assert by_name["numpy.float32"].status == by_name["torch.eager"].status == "ok"
    assert any("apart" in note for note in by_name["numpy.float32"].notes)
    assert not any("apart" in note for note in by_name["torch.eager"].notes)
    assert len(finished) == 2
    assert len(dismissed) == 2, "once for the lone run, once at the end"


def test_cells_that_would_fill_the_device_come_after_the_others(monkeypatch):
    from attnbench.run import workload as module

    together = []
    share = {"numpy.float32": 0.3, "torch.sdpa": 0.01, "torch.eager": 0.3}
    monkeypatch.setattr(module.WorkloadRun, "_share", lambda self, cell: share[cell.implementation])
    real = module.WorkloadRun._run_together

    def run_together(self, cells):
        together.append([cell.implementation for cell in cells])
        real(self, cells)

    monkeypatch.setattr(module.WorkloadRun, "_run_together", run_together)
    workload = Workload(batch=1, q_len=16, heads=1, head_dim=8)
    names = ("numpy.float32", "torch.sdpa", "torch.eager")
    records = []
    launch(Request(workloads=(workload,), implementations=names, budget_s=0.01), records.extend, Listener())
    by_name = {record.implementation: record for record in records}
    assert together == [["torch.sdpa"], ["numpy.float32", "torch.eager"]]
    assert all(by_name[name].status == "ok" for name in names)
    apart = {name for name in names if any("apart" in note for note in by_name[name].notes)}
    assert apart == {"numpy.float32", "torch.eager"}
    began, turns = zip(*(by_name[name].time.sitting.split("Z") for name in names))
    assert len(set(began)) == 1
    assert turns == ("+1", "", "+1")
    anchors = [record for record in records if record.implementation.startswith("anchor.")]
    assert sorted((one.implementation, one.time.sitting) for one in anchors) == sorted(
        (name, by_name[beside].time.sitting)
        for name in ("anchor.matmul", "anchor.copy")
        for beside in ("torch.sdpa", "torch.eager")
    ), "each turn is judged by anchors of its own"


@pytest.mark.parametrize("keeps", [False, True])
def test_only_workers_that_keep_memory_end_after_a_turn_of_their_own(monkeypatch, keeps):
    from attnbench.run import pool as pools
    from attnbench.run import workload

    monkeypatch.setattr(workload.WorkloadRun, "_share", lambda self, cell: 0.5)
    monkeypatch.setattr(pools, "KEEPS_MEMORY", {"torch"} if keeps else set())
    dismissed = []
    real = Pool.dismiss
    monkeypatch.setattr(Pool, "dismiss", lambda self, group: (dismissed.append(group.framework), real(self, group)))
    workloads = tuple(Workload(batch=1, q_len=tokens, heads=1, head_dim=8) for tokens in (8, 16))
    records = []
    request = Request(workloads=workloads, implementations=("numpy.float32", "torch.eager"), budget_s=0.01)
    launch(request, records.extend, Listener())
    assert {record.status for record in records} == {"ok"}
    assert dismissed.count("torch") == (2 if keeps else 1), "after each workload, or at the end"
    assert dismissed.count("numpy") == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_worker_with_nothing_left_to_do_gives_its_device_memory_back(monkeypatch, device):
    from attnbench.run import pool as module

    gpu = Environment(device=device, device_name="GPU", framework="numpy")
    monkeypatch.setattr(module, "KEEPS_MEMORY", {"numpy"})
    monkeypatch.setattr(Pool, "environment", lambda self, framework: gpu)
    ended = []
    real = Pool.dismiss
    monkeypatch.setattr(Pool, "dismiss", lambda self, group: (ended.append(group), real(self, group)))
    short, long = (Workload(batch=1, q_len=n, heads=1, head_dim=8) for n in (8, 16))
    only_short, both = Apart("short"), Apart("both")
    monkeypatch.setattr(only_short, "supports", lambda w, e: None if w == short else "takes 8 tokens", raising=False)
    records, at_the_end = [], []
    request = Request(workloads=(short, long), implementations=(only_short, both), budget_s=0.01)
    launch(request, lambda some: (records.extend(some), at_the_end.append(len(ended))), Listener())
    assert {r.status for r in records if not r.implementation.startswith("anchor.")} == {"ok", "unsupported"}
    early = [group.process for group in ended[: at_the_end[-1]] if group.process]
    assert early == (["user function numpy.in-short"] if device == "cuda" else [])


def test_only_what_stores_scores_on_an_accelerator_that_cannot_hold_all_is_heavy(monkeypatch):
    from attnbench.run.workload import WorkloadRun

    gpu = Environment(device="cuda", device_name="GPU", framework="torch", memory_bytes=10**9)
    monkeypatch.setattr(Pool, "environment", lambda self, framework: gpu)
    small, large = (Workload(batch=1, q_len=n, heads=8, head_dim=8) for n in (64, 2048))

    def heavy(*names, workload=large):
        run = WorkloadRun(None, workload, Pool((), "cuda", None), Listener(), None, 0)
        return [cell.implementation for cell in run._heavy([Cell(name, workload) for name in names])]

    storing = ("torch.eager", "torch.hf-eager", "torch.sdpa-math", "torch.compiled")
    assert heavy(*storing, "torch.sdpa") == list(storing)
    assert not heavy("torch.eager", "torch.sdpa"), "the device holds both"
    assert not heavy(*storing, workload=small)
    monkeypatch.setattr(
        Pool, "environment", lambda self, framework: Environment(device="cpu", device_name="CPU", framework="torch")
    )
    assert not heavy(*storing)


def test_heavy_ones_run_as_many_at_a_time_as_the_memory_holds(monkeypatch):
    from attnbench.run.workload import WorkloadRun

    shares = {"a": 0.2, "b": 0.2, "c": 0.2, "d": 0.7, "e": 0.1}
    monkeypatch.setattr(WorkloadRun, "_share", lambda self, cell: shares[cell.implementation])
    workload = Workload(batch=1, q_len=8, heads=1, head_dim=8)
    run = WorkloadRun(None, workload, Pool((), "cpu", None), Listener(), None, 0)
    batches = run._that_fit_together([Cell(name, workload) for name in shares])
    assert [[cell.implementation for cell in few] for few in batches] == [["a", "b", "c"], ["d"], ["e"]]


def test_an_anchor_without_memory_is_told_in_a_line(monkeypatch):
    from attnbench.run import protocol as p
    from attnbench.run.workload import WorkloadRun
    from attnbench.spec import OutOfMemory

    told = []
    listener = Listener()
    listener.warning = told.append
    workload = Workload(batch=1, q_len=8, heads=1, head_dim=8)
    refused = p.Closed(OutOfMemory(implementation="anchor.copy", workload=workload, reason="no memory is left"))
    monkeypatch.setattr(Pool, "ask", lambda *_: refused)
    run = WorkloadRun(
        Request(workloads=(workload,), implementations=("numpy.float32",)),
        workload,
        Pool((), "cpu", None),
        listener,
        None,
        0,
    )
    assert run._open_anchor(Cell("anchor.copy", workload), None) is None
    assert told == ["anchor.copy could not be opened: no memory is left"]
