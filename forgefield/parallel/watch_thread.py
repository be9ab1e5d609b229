"""The thread behind the watch of ranks: it owns all sockets, carries out what other threads ask for, and waits for neither.

What the two sides do with messages is in `watch.py`.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from forgefield.parallel.watch_messages import Connection, Unreadable, encode, shortened

FAIL_PATIENCE, LEAVE_PATIENCE = 2.0, 5.0
"""Seconds to wait until `fail` and `leave` are heard."""
SPREAD = 1.0
"""Seconds at most in which rank 0 has all others know of a loss before it calls its own `on_loss`, which may exit."""


@dataclass(frozen=True)
class Loss:
    """The first rank that went. text: its own error message if it could still speak; None: it ended without a word."""

    rank: int
    host: str
    text: str | None


class _Wait(NamedTuple):
    until: float
    ready: Callable[[], bool]
    then: Callable[[], None]


class Watch(ABC):
    """The connection of this rank to all others. Made by `watch.start_watch`."""

    def __init__(
        self, rank: int, host: str, on_loss: Callable[[Loss], None], on_line: Callable[[int, str], None] | None
    ) -> None:
        self._rank, self._host, self._on_loss, self._on_line = rank, host, on_loss, on_line
        self._loss: Loss | None = None
        self._spoken = self._left = self._stop = self._over = False
        self._connections: set[Connection] = set()
        self._dirty: set[Connection] = set()
        self._waits: list[_Wait] = []
        self._requests: deque[Callable[[], None]] = deque()
        self._askers: list[threading.Event] = []
        self._selector = selectors.DefaultSelector()
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, lambda _: self._ear.recv(65536))
        self._thread = threading.Thread(target=self._run, name="forgefield-watch", daemon=True)
        # A forked child would hold our sockets open after our death, and nobody would notice that.
        in_child = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close := in_child()) and close())

    @property
    def loss(self) -> Loss | None:
        return self._loss

    @abstractmethod
    def line(self, text: str) -> None:
        """Send one line of log to rank 0. Never raises, does not wait, does nothing after the end of the watch."""

    def fail(self, text: str) -> None:
        """Tell everybody that this rank is about to end with this error; return when it was heard, or after 2 s.

        Afterwards `loss` is the first loss: this one, or one that came before. `on_loss` is not called here any more.
        """
        if not (self._spoken or self._left):
            self._spoken = True
            self._ask(partial(self._tell, shortened(text)), lambda: None, FAIL_PATIENCE)

    def leave(self) -> None:
        """End the watch in good order, after all that was sent: that this connection closes is no loss to anybody."""
        if not self._left:
            self._left = True
            self._ask(partial(self._post_to_all, {"kind": "leave"}), self._finish, LEAVE_PATIENCE)

    @abstractmethod
    def _tell(self, text: str) -> None:
        """Have everybody know that this rank fails."""

    @abstractmethod
    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        """Deal with a message that came in whole."""

    @abstractmethod
    def _lost(self, connection: Connection) -> None:
        """Deal with a connection that the other side has closed."""

    def _ask(self, begin: Callable[[], None], then: Callable[[], None], patience: float) -> None:
        """Have the watch thread `begin` something and, once all it posted is confirmed or patience ends, do `then`."""
        done = threading.Event()

        def finish() -> None:
            then()
            done.set()

        def request() -> None:
            begin()
            self._wait(patience, self._all_confirmed, finish)

        self._askers.append(done)
        self._request(request)
        if not self._over and threading.current_thread() is not self._thread:
            done.wait(patience + 1)

    def _request(self, action: Callable[[], None]) -> None:
        self._requests.append(action)
        with suppress(OSError):  # full: it rings already; closed: nobody is there
            self._bell.send(b"!")

    # Everything below runs in the watch thread.

    def _run(self) -> None:
        try:
            while not self._stop or self._waits:
                timeout = max(0.0, min(w.until for w in self._waits) - time.monotonic()) if self._waits else None
                for key, events in self._selector.select(timeout):
                    key.data(events)
                while self._requests:
                    self._requests.popleft()()
                self._proceed()
        finally:
            self._close()
            for done in self._askers:
                done.set()

    def _proceed(self) -> None:
        """Send what is to be sent, and do what was waiting for that, until nothing more follows."""
        while True:
            for connection in self._dirty:
                if not connection.closed:
                    connection.send()
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
                    if events != connection.events:
                        connection.events = events
                        self._selector.modify(connection.sock, events, partial(self._ready, connection))
            self._dirty.clear()
            now = time.monotonic()
            ready = [w for w in self._waits if now >= w.until or w.ready()]
            if not ready:
                return
            for wait in ready:
                self._waits.remove(wait)
                wait.then()

    def _ready(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._dirty.add(connection)
        if events & selectors.EVENT_READ and not connection.closed:
            self._hear(connection, connection.receive())

    def _hear(self, connection: Connection, messages: Iterator[dict[str, Any]]) -> None:
        try:
            for message in messages:
                if message["kind"] == "got":
                    connection.unconfirmed = max(0, connection.unconfirmed - message["bytes"])
                else:
                    self._handle(connection, message)
        except Unreadable:
            connection.closed = True
        if connection.closed:
            self._drop(connection)
            self._lost(connection)
            return
        if connection.handled:
            connection.out += encode({"kind": "got", "bytes": connection.handled})
            connection.handled = 0
        self._dirty.add(connection)

    def _add(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.sock, connection.events, partial(self._ready, connection))

    def _drop(self, connection: Connection) -> None:
        connection.closed = True
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _peers(self) -> list[Connection]:
        return [c for c in self._connections if c.rank >= 0 and not c.left]

    def _all_confirmed(self) -> bool:
        return all(c.confirmed for c in self._peers())

    def _post_to_all(self, message: dict[str, Any]) -> None:
        for connection in self._peers():
            connection.post(message)
            self._dirty.add(connection)

    def _wait(self, patience: float, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        self._waits.append(_Wait(time.monotonic() + patience, ready, then))

    def _learn(self, loss: Loss) -> None:
        if self._loss is None and not self._left:
            self._loss = loss
            if self._rank == 0:
                self._post_to_all(loss_message(loss))
            self._wait(SPREAD, self._all_confirmed, self._deliver)

    def _deliver(self) -> None:
        if self._loss is not None and not self._spoken:
            call_safely(self._on_loss, self._loss)

    def _finish(self) -> None:
        self._stop = True

    def _close(self) -> None:
        self._over = True
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()
        self._ear.close()
        self._bell.close()


def call_safely(function: Callable[..., None], *arguments: Any) -> None:
    """A callback that fails must not end the watch."""
    try:
        function(*arguments)
    except Exception:
        with suppress(Exception):
            traceback.print_exc()


def loss_message(loss: Loss) -> dict[str, Any]:
    return {"kind": "loss", "rank": loss.rank, "host": loss.host, "text": loss.text}
