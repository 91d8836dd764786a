"""Messages between a worker and its parent: framed, paired by number, and believed only if they can be true."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection

import msgspec
import pytest

from attnbench.comparison import Block
from attnbench.run import protocol as p
from attnbench.run.remote import Remote, WorkerDied
from attnbench.spec import Cell, Failed, Workload

SMALL = Workload(batch=1, q_len=8, heads=2, head_dim=4)
CELL, OTHER = Cell("numpy.a", SMALL), Cell("numpy.b", SMALL)


@pytest.fixture
def ends():
    pair = [Connection(one.detach()) for one in socket.socketpair()]
    yield pair
    for one in pair:
        one.close()


@pytest.mark.parametrize("message", [b"", b"x", pytest.param(bytes(range(256)) * 100, id="every byte")])
def test_messages_arrive_as_they_were_sent(ends, message):
    p.send(ends[0], message)
    p.send(ends[0], b"next")
    assert (p.receive(ends[1]), p.receive(ends[1])) == (message, b"next")


def test_a_message_that_nobody_could_have_meant_is_not_waited_for(ends):
    ends[0]._send(p._HEADER.pack(p.LONGEST + 1))
    with pytest.raises(p.Garbled, match="bytes was announced"):
        p.receive(ends[1])


def test_the_end_of_the_other_side_is_the_end(ends):
    ends[0]._send(b"\0\0")
    ends[0].close()
    with pytest.raises(EOFError):
        p.receive(ends[1])


def sampled(*ns, began=100, ended=10_000, **more):
    return p.Sampled(list(ns), began_ns=began, ended_ns=ended, **more)


def block(began=100, ended=10_000, **ns):
    return p.BlockTaken(Block(ns), began, ended)


SAMPLE, TAKE = p.TakeSample("c", "main", 2, 10), p.TakeBlock("c", 10)


@pytest.mark.parametrize(
    ("question", "answer", "wrong"),
    [
        (SAMPLE, sampled(400.0, 500.0), None),
        (SAMPLE, sampled(400.0, 600.0), "it claims 0.01 ms of calls, 0.0099 ms passed"),
        (p.TakeSample("c", "main", 2, 10, "kernel"), sampled(400.0, 600.0), None),
        (SAMPLE, sampled(400.0), "1 samples came back, 2 were asked for"),
        (SAMPLE, sampled(400.0, 0.0), "not a positive number"),
        (SAMPLE, sampled(400.0, float("nan")), "not a positive number"),
        (SAMPLE, sampled(40.0, 40.0, began=10), "its clock disagrees"),
        (SAMPLE, sampled(40.0, 40.0, ended=30_000), "its clock disagrees"),
        (SAMPLE, sampled(40.0, 40.0, began=9_000, ended=8_000), "its clock disagrees"),
        (SAMPLE, p.Done(), "the answer to sample was done"),
        (SAMPLE, p.Refused("no"), None),
        (TAKE, block(wall=900.0, cpu=2000.0), None),
        (TAKE, block(wall=1100.0, cpu=1.0), "it claims"),
        (TAKE, block(wall=1100.0, device=900.0), None),
        (TAKE, block(began=1, wall=1.0), "its clock disagrees"),
        (p.SampleOther("c", "wall", 1), sampled(99_000.0), "it claims"),
        (
            p.Open(CELL, False, True, None, 0),
            p.Closed(Failed(implementation="numpy.a", workload=SMALL, reason="x")),
            None,
        ),
        (
            p.Open(CELL, False, True, None, 0),
            p.Closed(Failed(implementation="numpy.b", workload=SMALL, reason="x")),
            "was about numpy.b",
        ),
        (p.WarmUp("c"), p.Warm(float("inf"), (), False, "wall", (), 0), "it reported inf ns for a call"),
        (p.Release(), sampled(1.0), "the answer to release was sampled"),
    ],
)
def test_an_answer_that_cannot_be_true_is_not_believed(question, answer, wrong):
    found = p.fault(question, answer, sent_ns=50, received_ns=20_000)
    assert found is None if wrong is None else wrong in (found or "")


class Puppet:
    """A process that always runs."""

    pid = 2**22 + 1

    def poll(self):
        return 0

    def wait(self, timeout=None):
        return 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (lambda number: p.encode(p.Numbered(number, p.Done())), None),
        (lambda number: p.encode(p.Numbered(number + 1, p.Done())), "an answer to another question"),
        (lambda number: p.encode(p.Numbered(number, SAMPLE)), "an answer that cannot be read"),
        (lambda number: b"\xc1", "an answer that cannot be read"),
        (lambda number: b"\xa4\xff\xff\xff\xff", "an answer that cannot be read"),
        (lambda number: b"\x91" * 100_000 + b"\xc0", "an answer that cannot be read"),
        (lambda number: p.encode(p.Numbered(number, p.Traced("x"))), "the answer to release was traced"),
    ],
)
def test_only_the_answer_to_the_question_counts(ends, tmp_path, monkeypatch, said, told):
    with (tmp_path / "out").open("w+b") as output:
        remote = Remote("numpy", Puppet(), ends[0], output)
        monkeypatch.setattr("attnbench.run.remote.secrets.randbits", lambda bits: 5)
        p.send(ends[1], b"early")
        with pytest.raises(WorkerDied, match="a message arrived that answers no question"):
            remote.ask(p.Release(), 5)
        ours, theirs = (Connection(one.detach()) for one in socket.socketpair())
        remote = Remote("numpy", Puppet(), ours, output)
        real = p.send

        def answered_at_once(connection, message):
            real(connection, message)
            real(theirs, said(5))

        monkeypatch.setattr(p, "send", answered_at_once)
        if told is None:
            assert remote.ask(p.Release(), 5) == p.Done()
        else:
            with pytest.raises(WorkerDied, match=told) as died:
                remote.ask(p.Release(), 5)
            assert died.value.kind == "failed"
        theirs.close()


def test_numbers_cannot_be_guessed(ends, tmp_path):
    seen = set()
    with (tmp_path / "out").open("w+b") as output:
        remote = Remote("numpy", Puppet(), ends[0], output)
        for _ in range(5):

            def answer():
                number = p.decode_question(p.receive(ends[1])).number
                seen.add(number)
                p.send(ends[1], p.encode(p.Numbered(number, p.Done())))

            assert remote.exchange(p.Release(), 5, p.decode_answer, answer) == p.Done()
    assert len(seen) == 5
    assert max(seen) > 1 << 40
    assert msgspec.msgpack.decode(p.encode(p.Numbered(1, p.Done()))) == [1, {"type": "done"}]
