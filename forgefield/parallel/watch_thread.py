"""The thread of the watch: it owns all sockets and executes requests of other threads, without blocking on either.

`watch.py` implements how rank 0 and the other ranks handle messages.
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
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from forgefield.parallel.watch_messages import Connection, InvalidMessage, Message, encode, shortened

FAIL_PATIENCE, LEAVE_PATIENCE = 2.0, 5.0
"""Seconds to wait until `fail` and `leave` are confirmed."""
SPREAD = 1.0
"""Seconds that rank 0 waits at most until all others have been notified of a loss before it calls `on_loss`, which may exit."""


class LossKind(StrEnum):
    """Why a rank exited: an error that the user can correct, any other exception, a stop on request, or unknown (killed)."""

    ERROR = "error"
    EXCEPTION = "exception"
    STOPPED = "stopped"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Loss:
    """The first rank that was lost. text: its error message; None if it exited without one. exit_code: of all ranks."""

    rank: int
    host: str
    text: str | None
    kind: LossKind = LossKind.UNKNOWN
    exit_code: int = 1


class _Wait(NamedTuple):
    until: float
    ready: Callable[[], bool]
    then: Callable[[], None]


class Watch(ABC):
    """The connection of this rank to all others. Created by `watch.start_watch`."""

    def __init__(
        self, rank: int, host: str, on_loss: Callable[[Loss], None], on_line: Callable[[int, str], None] | None
    ) -> None:
        self._rank, self._host, self._on_loss, self._on_line = rank, host, on_loss, on_line
        self._loss: Loss | None = None
        self._has_failed = self._left = self._stop = self._ended = False
        self._connections: set[Connection] = set()
        self._dirty: set[Connection] = set()
        self._waits: list[_Wait] = []
        self._requests: deque[Callable[[], None]] = deque()
        self._waiting_threads: list[threading.Event] = []
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, lambda _: self._wake_receiver.recv(65536))
        self._thread = threading.Thread(target=self._run, name="forgefield-watch", daemon=True)
        # A forked child would keep these sockets open after this process has died, and the others would not notice.
        in_child = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close := in_child()) and close())

    @property
    def loss(self) -> Loss | None:
        return self._loss

    @abstractmethod
    def line(self, text: str) -> None:
        """Send one line to the log of rank 0. Never raises or waits; does nothing after the end of the watch."""

    def fail(self, text: str, kind: LossKind = LossKind.EXCEPTION, exit_code: int = 1) -> None:
        """Notify all ranks that this one is about to exit with this error; returns when that is confirmed, or after 2 s.

        Afterwards `loss` is the first loss: this one, or an earlier one. `on_loss` is no longer called on this rank.
        """
        if not (self._has_failed or self._left):
            self._has_failed = True
            loss = Loss(self._rank, self._host, shortened(text), kind, exit_code)
            self._request_and_wait(partial(self._announce, loss), lambda: None, FAIL_PATIENCE)

    def leave(self) -> None:
        """End the watch after everything has been sent. Closing the connection then does not count as a loss."""
        if not self._left:
            self._left = True
            self._request_and_wait(partial(self._post_to_all, {"kind": "leave"}), self._finish, LEAVE_PATIENCE)

    @abstractmethod
    def _announce(self, loss: Loss) -> None:
        """Notify all ranks that this one fails."""

    @abstractmethod
    def _handle(self, connection: Connection, message: Message) -> None:
        """Handle one complete message."""

    @abstractmethod
    def _lost(self, connection: Connection) -> None:
        """Handle a connection that the other side has closed."""

    def _request_and_wait(self, begin: Callable[[], None], then: Callable[[], None], patience: float) -> None:
        """Call `begin` in the watch thread and, when all it posted is confirmed or `patience` seconds have passed, `then`."""
        done = threading.Event()

        def finish() -> None:
            then()
            done.set()

        def request() -> None:
            begin()
            self._wait(patience, self._all_confirmed, finish)

        self._waiting_threads.append(done)
        self._request(request)
        if not self._ended and threading.current_thread() is not self._thread:
            done.wait(patience + 1)

    def _request(self, action: Callable[[], None]) -> None:
        self._requests.append(action)
        with suppress(OSError):  # full: a wake-up is pending already; closed: the thread has ended
            self._wake_sender.send(b"!")

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
            for done in self._waiting_threads:
                done.set()

    def _proceed(self) -> None:
        """Send queued messages and run callbacks that wait for them, until nothing is left to do."""
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
            self._receive(connection, connection.receive())

    def _receive(self, connection: Connection, messages: Iterator[Message]) -> None:
        try:
            for message in messages:
                if message["kind"] == "got":
                    connection.unconfirmed = max(0, connection.unconfirmed - message["bytes"])
                else:
                    self._handle(connection, message)
        except InvalidMessage:
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

    def _post_to_all(self, message: Message) -> None:
        for connection in self._peers():
            connection.post(message)
            self._dirty.add(connection)

    def _wait(self, patience: float, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        self._waits.append(_Wait(time.monotonic() + patience, ready, then))

    def _record_loss(self, loss: Loss) -> None:
        if self._loss is None and not self._left:
            self._loss = loss
            if self._rank == 0:
                self._post_to_all(loss_message(loss))
            self._wait(SPREAD, self._all_confirmed, self._deliver)

    def _deliver(self) -> None:
        if self._loss is not None and not self._has_failed:
            call_safely(partial(self._on_loss, self._loss))

    def _finish(self) -> None:
        self._stop = True

    def _close(self) -> None:
        self._ended = True
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()


def call_safely(callback: Callable[[], None]) -> None:
    """Run a callback; print its errors, which must not end the watch."""
    try:
        callback()
    except Exception:
        with suppress(Exception):
            traceback.print_exc()


def loss_message(loss: Loss) -> Message:
    values = {"rank": loss.rank, "host": loss.host, "text": loss.text}
    return {"kind": "loss", **values, "reason": str(loss.kind), "exit_code": loss.exit_code}


def loss_from(message: Message) -> Loss:
    kind = next((kind for kind in LossKind if kind == message["reason"]), LossKind.UNKNOWN)
    return Loss(message["rank"], message["host"], message["text"], kind, message["exit_code"])
