"""Real processes that watch each other, one command at a time, and a store through which they meet."""

from __future__ import annotations

import json
import os
import queue
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 20.0
"""Seconds after which a test gives up; how fast the news must be is asserted apart from that."""


class StoreServer(socketserver.ThreadingTCPServer):
    """Keys and values for several processes: one JSON request per connection; `get` waits for its key."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()


class _Answer(socketserver.StreamRequestHandler):
    server: StoreServer

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        with self.server.changed:
            if "value" in request:
                self.server.values[request["key"]] = request["value"]
                self.server.changed.notify_all()
            self.server.changed.wait_for(lambda: request["key"] in self.server.values, PATIENCE)
            self.wfile.write(json.dumps(self.server.values[request["key"]]).encode() + b"\n")


CLIENT = """
import json, socket

class Store:
    def __init__(self, port):
        self.port = port

    def _ask(self, request):
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(json.dumps(request).encode() + b"\\n")
            return json.loads(connection.makefile().readline())

    def set(self, key, value):
        self._ask({"key": key, "value": value})

    def get(self, key):
        return self._ask({"key": key}).encode()
"""

RANK = (
    CLIENT
    + """
import os, sys, threading, time
from forgefield.parallel.watch import start_watch

ranks, world_size, port = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
speaking = threading.Lock()

def say(**event):
    with speaking:
        print(json.dumps(event), flush=True)

ends_on_loss = threading.Event()

def lost(rank, loss):
    say(event="loss", by=rank, rank=loss.rank, host=loss.host, text=loss.text)
    if ends_on_loss.is_set():
        os._exit(1)

def started(rank):
    return start_watch(
        rank=rank, world_size=world_size, host=f"node{rank}", address="127.0.0.1", store=Store(port), timeout=20,
        on_loss=lambda loss: lost(rank, loss),
        on_line=lambda source, text: say(event="line", rank=source, text=text),
    )

watches = []
threads = [threading.Thread(target=lambda r=r: watches.append(started(r))) for r in ranks]
for thread in threads: thread.start()
for thread in threads: thread.join()
watch = watches[0]
say(event="started")
for command in sys.stdin:
    name, argument = json.loads(command)
    if name == "fork" and os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    if name == "lines":
        for i in range(argument):
            watch.line(f"{i} of rank {ranks[0]}")
    if name in ("line", "fail"):
        getattr(watch, name)(argument)
    if name == "leave":
        watch.leave()
    if name == "end_on_loss":
        ends_on_loss.set()
    if name == "end":
        os._exit(argument)
    say(event=name, loss=None if watch.loss is None else watch.loss.rank)
"""
)


class Process:
    """A process that holds some of the ranks; it says what happens to it and does what it is told."""

    def __init__(self, ranks: list[int], world_size: int, store: StoreServer) -> None:
        arguments = [json.dumps(ranks), str(world_size), str(store.server_address[1])]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", RANK, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.events.put(json.loads(line))

    def tell(self, name: str, argument: Any = None) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps([name, argument]) + "\n")
        self.popen.stdin.flush()

    def expect(self, event: str) -> dict[str, Any]:
        found = self.events.get(timeout=PATIENCE)
        assert found["event"] == event, found
        return found

    def expect_loss(self, rank: int, text: str | None) -> None:
        loss = self.expect("loss")
        assert (loss["rank"], loss["host"], loss["text"]) == (rank, f"node{rank}", text)

    def do(self, name: str, argument: Any = None) -> dict[str, Any]:
        self.tell(name, argument)
        return self.expect(name)

    def kill(self) -> None:
        os.kill(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def stop(self) -> None:
        """Return when all threads of the process stand still; the signal alone lets them run on for a moment."""
        self.popen.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.popen.pid}/task")
        while any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.01)

    def nothing_more(self, seconds: float = 0.3) -> None:
        with pytest.raises(queue.Empty):
            pytest.fail(f"unexpected: {self.events.get(timeout=seconds)}")
