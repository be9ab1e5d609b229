"""The watch, with real processes: whatever ends a rank, all others know which one it was; nothing else is a loss."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from forgefield.errors import ForgefieldError
from forgefield.parallel.watch import KEY, start_watch
from forgefield.parallel.watch_thread import Loss, LossKind, Watch
from tests.support.watched import PATIENCE, Process, StoreServer

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with StoreServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


Begin = Callable[..., list[Process]]


@pytest.fixture
def begin(store: StoreServer) -> Iterator[Begin]:
    """begin(3): ranks 0, 1 and 2 in a process each, all started. begin([0], [1, 2]): in the processes named."""
    begun: list[Process] = []

    def begin(*groups: Any, wait: bool = True, world_size: int | None = None) -> list[Process]:
        if isinstance(groups[0], int):
            groups = tuple([rank] for rank in range(groups[0]))
        new = [Process(list(ranks), world_size or sum(map(len, groups)), store) for ranks in groups]
        begun.extend(new)
        if wait:
            for process in new:
                process.expect("started")
        return new

    yield begin
    for process in begun:
        with suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)  # with what it has forked
        process.popen.wait()
        for pipe in (process.popen.stdin, process.popen.stdout):
            with suppress(OSError):
                pipe.close()


def test_killed_rank_is_noticed_by_all_others(begin: Begin) -> None:
    first, second, third = begin(3)
    second.kill()
    first.expect_loss(1, None)
    third.expect_loss(1, None)


def test_killed_rank_0_is_noticed_by_all_others(begin: Begin) -> None:
    first, second, third = begin(3)
    first.kill()
    second.expect_loss(0, None)
    third.expect_loss(0, None)


def test_rank_that_ends_without_leaving_is_a_loss_whatever_its_exit_code(begin: Begin) -> None:
    first, second = begin(2)
    second.tell("end", 0)
    first.expect_loss(1, None)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_is_noticed_although_a_forked_child_of_it_lives_on(begin: Begin, killed: int) -> None:
    processes = begin(3)
    for process in processes[:2]:
        process.do("fork")
    processes[killed].kill()
    processes[1 - killed].expect_loss(killed, None)
    processes[2].expect_loss(killed, None)


def test_all_know_the_first_loss_although_each_ends_as_soon_as_it_knows(begin: Begin) -> None:
    processes = begin(4)
    for process in processes:
        process.do("end_on_loss")
    processes[2].kill()
    for rank in (0, 1, 3):
        processes[rank].expect_loss(2, None)
        assert processes[rank].popen.wait(PATIENCE) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_error_reaches_everyone_with_its_message(begin: Begin, failing: int) -> None:
    processes = begin(3)
    text = 'out of memory:\n  "20 GB", 5 Å³ \U0001f525 \ud800 \\n'
    assert processes[failing].do("fail", text)["loss"] == failing
    for rank, process in enumerate(processes):
        if rank != failing:
            process.expect_loss(failing, text)
    processes[failing].tell("end", 1)
    for rank, process in enumerate(processes):
        if rank != failing:
            process.nothing_more()
    assert processes[failing].events.empty()


def test_first_loss_counts(begin: Begin) -> None:
    first, second, third, fourth = begin(4)
    third.do("fail", "the cause")
    for process in (first, second, fourth):
        process.expect_loss(2, "the cause")
    assert second.do("fail", "a consequence")["loss"] == 2
    fourth.kill()
    third.kill()
    first.nothing_more()
    assert first.do("leave")["loss"] == 2


def test_of_two_errors_at_once_all_ranks_know_the_same_one(begin: Begin) -> None:
    processes = begin(4)
    for process in processes[:3]:
        process.tell("fail", "mine")
    seen = set()
    for process in processes[:3]:
        event = process.events.get(timeout=PATIENCE)
        event = process.expect("fail") if event["event"] == "loss" else event
        seen.add(event["loss"])
    seen.add(processes[3].expect("loss")["rank"])
    assert len(seen) == 1
    assert seen < {0, 1, 2}


def test_fail_does_not_wait_for_a_rank_0_that_is_gone(begin: Begin) -> None:
    first, second = begin(2)
    first.kill()
    second.expect("loss")
    second.do("fail", "too late")


@on_linux
def test_fail_does_not_wait_forever_for_a_rank_0_that_does_not_answer(begin: Begin) -> None:
    first, second = begin(2)
    first.stop()
    second.do("fail", "hello?")
    first.popen.send_signal(signal.SIGCONT)
    first.expect_loss(1, "hello?")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_leaving_is_not_a_loss_in_any_order(begin: Begin, order: tuple[int, ...]) -> None:
    processes = begin(3)
    for rank in order:
        assert processes[rank].do("leave")["loss"] is None
        assert processes[rank].do("leave")["loss"] is None
        processes[rank].tell("end", 0)
        assert processes[rank].popen.wait(PATIENCE) == 0
    for process in processes:
        process.nothing_more(0.1)


def test_leaving_all_at_once_is_not_a_loss(begin: Begin) -> None:
    processes = begin(4)
    for process in processes:
        process.tell("leave")
        process.tell("end", 0)
    for process in processes:
        assert process.expect("leave")["loss"] is None
        assert process.popen.wait(PATIENCE) == 0
        process.nothing_more(0.05)


def test_the_others_are_still_watched_when_one_has_left(begin: Begin) -> None:
    first, second, third = begin(3)
    second.do("leave")
    third.kill()
    first.expect_loss(2, None)
    second.nothing_more()


def test_lines_arrive_in_order_and_before_the_error(begin: Begin) -> None:
    first, second, third = begin(3)
    long = "ü" * 100_000
    for process in (second, third):
        process.tell("lines", 3000)
    second.tell("line", long)
    second.tell("fail", "the end")
    events = [first.events.get(timeout=PATIENCE) for _ in range(6002)]
    said = {rank: [e["text"] for e in events if e["rank"] == rank] for rank in (1, 2)}
    assert said[1] == [f"{i} of rank 1" for i in range(3000)] + [long, "the end"]
    assert said[2] == [f"{i} of rank 2" for i in range(3000)]
    assert [e["text"] for e in events if e["event"] == "loss"] == ["the end"]


@pytest.mark.parametrize("leaving", [0, 1])
def test_lines_sent_before_leaving_are_not_lost(begin: Begin, leaving: int) -> None:
    processes = begin(2)
    processes[1].tell("lines", 2000)
    if leaving == 1:
        processes[1].tell("leave")
        processes[1].tell("end", 0)
    else:
        processes[1].expect("lines")
        processes[0].tell("leave")
    for i in range(2000):
        event = processes[0].expect("line")
        assert (event["rank"], event["text"]) == (1, f"{i} of rank 1")


@on_linux
def test_lines_of_a_rank_0_that_is_busy_wait_without_blocking_anybody(begin: Begin) -> None:
    first, second = begin(2)
    first.stop()
    second.do("lines", 20_000)
    first.popen.send_signal(signal.SIGCONT)
    for i in range(20_000):
        assert first.expect("line")["text"] == f"{i} of rank 1"


def where(store: StoreServer) -> tuple[int, str]:
    """Port and token of rank 0."""
    with store.changed:
        assert store.changed.wait_for(lambda: KEY in store.values, PATIENCE)
        port, token = store.values[KEY].split()
    return int(port), token


def hello(**changes: Any) -> bytes:
    message = {"kind": "hello", "token": "", "rank": 1, "host": "node1", "world_size": 2, **changes}
    return json.dumps(message).encode() + b"\n"


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE)
    try:
        return connection.recv(1000) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "words",
    [
        hello(token="0" * 32),
        hello(token="ü"),
        b'{"kind": "fail", "text": "I am rank 1"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 100_000,
        b"[" * 4000 + b"\n",
        b"\xff\xfe\n",
        b"17\n",
        b"null\n",
    ],
    ids=["wrong-token", "odd-token", "no-hello", "http", "endless", "nested", "bytes", "number", "null"],
)
def test_stranger_is_dropped_and_harmless(begin: Begin, store: StoreServer, words: bytes) -> None:
    (first,) = begin([0], wait=False, world_size=2)
    port, _ = where(store)
    with (
        socket.create_connection(("127.0.0.1", port)) as silent,
        socket.create_connection(("127.0.0.1", port)) as stranger,
    ):
        stranger.sendall(words)
        assert is_closed(stranger)
        (second,) = begin([1], world_size=2)
        first.expect("started")
        assert is_closed(silent)  # nobody but the ranks is connected once they have met
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    second.do("line", "still here")
    assert first.expect("line")["text"] == "still here"
    first.nothing_more(0.1)


@pytest.mark.parametrize(
    "garbage",
    [
        b"no message\n",
        b'{"kind": "line"}\n',
        b'{"kind": "line", "text": 3}\n',
        b'{"kind": "loss", "rank": 2, "host": "", "text": "invented"}\n',
        b'{"kind": "__import__", "text": "os"}\n',
        b'{"kind": ["line"]}\n',
        hello(),
    ],
)
def test_rank_that_sends_garbage_is_lost(begin: Begin, store: StoreServer, garbage: bytes) -> None:
    (first,) = begin([0], wait=False, world_size=3)
    port, token = where(store)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(hello(token=token, world_size=3))
        assert json.loads(connection.makefile().readline()) == {"kind": "welcome", "host": "node0"}
        (third,) = begin([2], world_size=3)
        first.expect("started")
        connection.sendall(b'{"kind": "line", "text": "last')
        time.sleep(0.05)
        connection.sendall(b' words"}\n' + garbage)
        assert first.expect("line")["text"] == "last words"
        first.expect_loss(1, None)
        third.expect_loss(1, None)


def test_second_process_with_the_same_rank_or_another_world_size_is_refused(begin: Begin, store: StoreServer) -> None:
    (first,) = begin([0], wait=False, world_size=3)
    port, token = where(store)
    begin([1], world_size=3)
    for rank, world_size in ((1, 3), (2, 4), (0, 3), (7, 3), (-1, 3)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(hello(token=token, rank=rank, world_size=world_size))
            answer = json.loads(connection.makefile().readline())
            assert answer["kind"] == "refused"
            assert f"rank {rank} of {world_size}" in answer["text"]
    begin([2], world_size=3)
    first.expect("started")
    first.nothing_more(0.1)


def test_rank_that_goes_while_others_are_on_their_way_is_a_loss_for_all(begin: Begin) -> None:
    first, second = begin([0], [1], wait=False, world_size=3)
    second.expect("started")
    second.kill()
    events = [first.events.get(timeout=PATIENCE) for _ in range(2)]
    assert {e["event"] for e in events} == {"started", "loss"}
    (third,) = begin([2], wait=False, world_size=3)
    assert {third.events.get(timeout=PATIENCE)["event"] for _ in range(2)} == {"started", "loss"}


class Dictionary:
    """A store inside this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def test_missing_rank_is_named_on_every_rank() -> None:
    store, losses = Dictionary(), queue.Queue[Loss]()
    errors: list[str] = []

    def centre() -> None:
        with pytest.raises(ForgefieldError) as raised:
            start_watch(
                rank=0, world_size=3, host="a", address="", store=store, on_loss=losses.put, on_line=None, timeout=1.0
            )
        errors.append(str(raised.value))

    thread = threading.Thread(target=centre)
    thread.start()
    while KEY not in store.values:
        time.sleep(0.01)
    member = start_watch(rank=1, world_size=3, host="b", address="localhost", store=store, on_loss=losses.put)
    thread.join(PATIENCE)
    assert "Rank 2 of 3 did not reach rank 0" in errors[0]
    assert losses.get(timeout=PATIENCE) == member.loss == Loss(0, "a", errors[0], LossKind.EXCEPTION)
    assert losses.empty()


def test_rank_0_that_cannot_be_reached_is_an_error_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    store = Dictionary()
    store.set(KEY, f"{port} token")
    with pytest.raises(ForgefieldError, match=rf"Rank 1 \(b\) did not reach rank 0 \(127.0.0.1, port {port}\)"):
        start_watch(rank=1, world_size=2, host="b", address="127.0.0.1", store=store, on_loss=print, timeout=0.5)
    with pytest.raises(ForgefieldError, match="did not get the port of rank 0"):
        start_watch(rank=1, world_size=2, host="b", address="127.0.0.1", store=Dictionary(), on_loss=print)


def test_one_rank_alone_needs_nothing() -> None:
    lines: list[tuple[int, str]] = []
    before = threading.active_count()
    watch = start_watch(
        rank=0,
        world_size=1,
        host="a",
        address="",
        store=None,
        on_loss=pytest.fail,
        on_line=lambda r, t: lines.append((r, t)),
    )
    watch.line("one")
    watch.fail("nobody is there")
    watch.leave()
    watch.leave()
    assert lines == [(0, "one")]
    assert watch.loss is None
    assert threading.active_count() == before


def test_callbacks_that_raise_do_not_end_the_watch(capfd: pytest.CaptureFixture[str]) -> None:
    store, called = Dictionary(), queue.Queue[Any]()

    def broken(*arguments: Any) -> None:
        called.put(arguments)
        raise OSError("disk full")

    watches: list[Watch] = []
    thread = threading.Thread(
        target=lambda: watches.append(
            start_watch(rank=0, world_size=2, host="a", address="", store=store, on_loss=broken, on_line=broken)
        )
    )
    thread.start()
    while KEY not in store.values:
        time.sleep(0.01)
    member = start_watch(rank=1, world_size=2, host="b", address="localhost", store=store, on_loss=pytest.fail)
    thread.join(PATIENCE)
    watches[0].line("mine")
    member.line("yours")
    member.fail("why")
    member.leave()
    watches[0].leave()
    assert [called.get(timeout=PATIENCE) for _ in range(3)] == [
        (0, "mine"),
        (1, "yours"),
        (Loss(1, "b", "why", LossKind.EXCEPTION),),
    ]
    assert capfd.readouterr().err.count("OSError: disk full") == 3


def test_torchs_store_serves() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    losses = queue.Queue[Loss]()
    watches: list[Watch] = []

    def one(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        watches.append(
            start_watch(rank=rank, world_size=3, host=f"node{rank}", address="127.0.0.1", store=own, on_loss=losses.put)
        )

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    watches[0].fail("why")
    assert losses.get(timeout=PATIENCE) == losses.get(timeout=PATIENCE) == watches[0].loss
    for watch in watches:
        watch.leave()


def test_64_ranks_all_learn_of_the_same_first_loss(begin: Begin) -> None:
    groups = [[0], list(range(1, 22)), list(range(22, 43)), list(range(43, 64))]
    centre, *others = begin(*groups)
    others[1].kill()
    loss = centre.expect("loss")
    assert loss["rank"] in groups[2]
    for process, ranks in zip([others[0], others[2]], [groups[1], groups[3]], strict=True):
        told = [process.expect("loss") for _ in ranks]
        assert sorted(event["by"] for event in told) == ranks
        assert {event["rank"] for event in told} == {loss["rank"]}
