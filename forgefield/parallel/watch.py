"""Every rank learns at once that another rank is gone, however it went: each keeps one TCP connection to rank 0, and
the operating system closes it when the process ends. Rank 0 tells all the others which rank went first.

Contract. One daemon thread per process owns all sockets; other threads only hand it requests, without locks, so that
`line` may be called from anywhere. Messages are JSON objects, one per line: hello, line, fail, leave to rank 0;
welcome, refused, loss, leave from rank 0. Those in `POSTED` arrive in order, and the other side says `got` (so many
bytes) when it has dealt with them. That is how `fail` and `leave` know that they were heard, and it keeps so little
under way that a rank 0 that is busy for long does not look like a broken network.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from forgefield.errors import ForgefieldError
from forgefield.parallel.wire import (
    MESSAGE_LIMIT,
    Connection,
    Unreadable,
    allow_open_files,
    decode,
    encode,
    listen,
    shortened,
)

KEY = "forgefield/watch"
"""Where rank 0 leaves "port token" in the store."""
FAIL_PATIENCE, LEAVE_PATIENCE = 2.0, 5.0
"""Seconds to wait until `fail` and `leave` are heard."""
SPREAD = 1.0
"""Seconds at most in which rank 0 has all others know of a loss before it calls its own `on_loss`, which may exit."""
PENDING_LIMIT = 16 * 1024**2
"""Bytes of lines that wait for a busy rank 0; what comes on top is counted and left out."""


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


class Watch:
    """The connection of this rank to all others. Made by `Watch.start`."""

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

    @classmethod
    def start(
        cls,
        *,
        rank: int,
        world_size: int,
        host: str,
        address: str,
        store: Any,
        on_loss: Callable[[Loss], None],
        on_line: Callable[[int, str], None] | None = None,
        timeout: float = 60,
    ) -> Watch:
        """Meet the other ranks: rank 0 returns when all have said hello, the others when rank 0 has answered.

        address: where the others find rank 0. store: anything with `set(key, value)` and a `get(key)` that waits for
        the key; fresh for each attempt of a job. timeout: seconds. on_loss: called once, in the watch thread, also when
        a rank goes while others are still on their way (rank 0 then waits no longer). on_line: called on rank 0, in the
        watch thread for the lines of other ranks and in the calling thread for its own.
        """
        if rank == 0:
            return _Centre(world_size, host, on_loss, on_line).meet(store, timeout)
        hello = {"kind": "hello", "rank": rank, "host": host, "world_size": world_size}
        return _Member(rank, host, on_loss, on_line).begin(_connect(hello, address, store, timeout))

    @property
    def loss(self) -> Loss | None:
        return self._loss

    def line(self, text: str) -> None:
        """Send one line of log to rank 0. Never raises, does not wait, does nothing after the end of the watch."""
        raise NotImplementedError

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

    def _tell(self, text: str) -> None:
        """Have everybody know that this rank fails."""
        raise NotImplementedError

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _lost(self, connection: Connection) -> None:
        raise NotImplementedError

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
                self._post_to_all(_message(loss))
            self._wait(SPREAD, self._all_confirmed, self._deliver)

    def _deliver(self) -> None:
        if self._loss is not None and not self._spoken:
            _call(self._on_loss, self._loss)

    def _finish(self) -> None:
        self._stop = True

    def _close(self) -> None:
        self._over = True
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()
        self._ear.close()
        self._bell.close()


class _Centre(Watch):
    """The watch of rank 0, which every other rank is connected to."""

    def __init__(
        self, world_size: int, host: str, on_loss: Callable[[Loss], None], on_line: Callable[[int, str], None] | None
    ) -> None:
        super().__init__(0, host, on_loss, on_line)
        self._world_size = world_size
        self._token = secrets.token_hex(16)
        self._missing = set(range(1, world_size))
        self._met = threading.Event()
        self._trouble: str | None = None
        self._listener: socket.socket | None = None

    def meet(self, store: Any, timeout: float) -> Watch:
        if self._world_size == 1:
            self._close()
            return self
        allow_open_files(self._world_size + 512)
        self._listener = listen()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        port = self._listener.getsockname()[1]
        self._thread.start()
        try:
            store.set(KEY, f"{port} {self._token}")
            if not self._met.wait(timeout):
                self._trouble = (
                    f"{_ranks(self._missing)} of {self._world_size} did not reach rank 0 ({self._host}, port {port}) "
                    f"within {timeout:g} s: look for their errors, and whether the network lets these machines connect "
                    "on any port."
                )
            if self._trouble is not None:
                self.fail(self._trouble)
                raise ForgefieldError(self._trouble)
        except BaseException:
            self._request(self._finish)
            raise
        return self

    def line(self, text: str) -> None:
        if self._on_line is not None:
            _call(self._on_line, 0, text)

    def _tell(self, text: str) -> None:
        self._learn(Loss(0, self._host, text))

    def _accept(self, _: int) -> None:
        if self._listener is None:
            return
        try:
            self._add(Connection(self._listener.accept()[0]))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # the one that knocked went away again
            self._stop_listening()
            enough = self._world_size + 512
            self._trouble = (
                f"Rank 0 may not open {enough} files, which {self._world_size} ranks need: `ulimit -n {enough}`."
            )
            self._met.set()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if (connection.rank < 0) != (kind == "hello"):
            raise Unreadable
        if kind == "hello":
            self._greet(connection, message)
        elif kind == "line":
            if self._on_line is not None:
                _call(self._on_line, connection.rank, message["text"])
        elif kind == "fail":
            connection.spoken = True
            self._learn(Loss(connection.rank, connection.host, message["text"]))
        elif kind == "leave":
            connection.left = True
        else:
            raise Unreadable

    def _greet(self, connection: Connection, hello: dict[str, Any]) -> None:
        rank, world_size = hello["rank"], hello["world_size"]
        if not secrets.compare_digest(hello["token"].encode("utf-8", "replace"), self._token.encode()):
            raise Unreadable
        if world_size != self._world_size or rank not in self._missing:
            text = (
                f"Rank 0 expects {self._world_size} ranks and each of them once, but rank {rank} of {world_size} came"
            )
            connection.out += encode({"kind": "refused", "text": f"{text} from {hello['host']}: compare their start."})
            connection.send()
            raise Unreadable
        connection.rank, connection.host = rank, hello["host"]
        connection.out += encode({"kind": "welcome", "host": self._host})
        if self._loss is not None:
            connection.post(_message(self._loss))
        self._missing.discard(rank)
        if not self._missing:
            self._stop_listening()
            for stranger in [c for c in self._connections if c.rank < 0]:
                self._drop(stranger)
            self._met.set()

    def _lost(self, connection: Connection) -> None:
        if connection.rank > 0 and not (connection.left or connection.spoken):
            self._learn(Loss(connection.rank, connection.host, None))

    def _learn(self, loss: Loss) -> None:
        super()._learn(loss)
        self._met.set()

    def _close(self) -> None:
        super()._close()
        if self._listener is not None:
            self._listener.close()


class _Member(Watch):
    """The watch of any other rank, with one connection: that to rank 0."""

    def begin(self, centre: Connection) -> Watch:
        self._centre, self._left_out = centre, 0
        self._add(centre)
        self._request(lambda: self._hear(centre, centre.messages()))  # what came together with the welcome
        self._thread.start()
        return self

    def line(self, text: str) -> None:
        if not (self._over or self._left):
            self._request(partial(self._post_line, shortened(text)))

    def _post_line(self, text: str) -> None:
        if self._centre.queued > PENDING_LIMIT:
            self._left_out += 1
            return
        if self._left_out:
            note = f"({self._left_out} lines left out: rank 0 was too busy to take them)"
            self._post_to_all({"kind": "line", "text": note})
            self._left_out = 0
        self._post_to_all({"kind": "line", "text": text})

    def _tell(self, text: str) -> None:
        self._post_to_all({"kind": "fail", "text": text})

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        if message["kind"] == "loss":
            self._learn(Loss(message["rank"], message["host"], message["text"]))
        elif message["kind"] == "leave":
            connection.left = True  # nothing is held back any more, so that it goes out before our confirmation
            connection.send()
        else:
            raise Unreadable

    def _lost(self, connection: Connection) -> None:
        if not connection.left:
            self._learn(Loss(0, connection.host, None))
        self._finish()


def _connect(hello: dict[str, Any], address: str, store: Any, timeout: float) -> Connection:
    """Say hello to rank 0 until it answers."""
    deadline = time.monotonic() + timeout
    where, reason = address, "no time left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            found = store.get(KEY)
            port, token = (found.decode() if isinstance(found, bytes) else str(found)).split()
        except Exception as error:
            text = f"Rank {hello['rank']} did not learn where rank 0 listens ({error}): look for the error of rank 0."
            raise ForgefieldError(text) from error
        where = f"{address}, port {port}"
        try:
            sock = socket.create_connection((address, int(port)), timeout=left)
            return _greeted(sock, {**hello, "token": token}, deadline)
        except OSError as error:
            reason = str(error)
            time.sleep(min(0.2, left))
    raise ForgefieldError(
        f"Rank {hello['rank']} ({hello['host']}) did not reach rank 0 ({where}) within {timeout:g} s ({reason}): look "
        "for the error of rank 0, and whether the network lets these machines connect on any port."
    )


def _greeted(sock: socket.socket, hello: dict[str, Any], deadline: float) -> Connection:
    """A connection over which rank 0 said welcome; OSError where nobody of ours is at the other end."""
    try:
        sock.sendall(encode(hello))
        received = bytearray()
        while b"\n" not in received:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            received += (data := sock.recv(4096))
            if not data or len(received) > MESSAGE_LIMIT:
                raise ConnectionError("it closed the connection")
        first, _, rest = received.partition(b"\n")
        answer = decode(first)
        if answer["kind"] == "refused":
            raise ForgefieldError(answer["text"])
        if answer["kind"] != "welcome":
            raise Unreadable
        return Connection(sock, rank=0, host=answer["host"], received=rest)
    except Unreadable:
        sock.close()
        raise ConnectionError("another program listens there") from None
    except BaseException:
        sock.close()
        raise


def _message(loss: Loss) -> dict[str, Any]:
    return {"kind": "loss", "rank": loss.rank, "host": loss.host, "text": loss.text}


def _ranks(ranks: set[int]) -> str:
    shown = [str(r) for r in sorted(ranks)[:8]] + (["..."] if len(ranks) > 8 else [])
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def _call(function: Callable[..., None], *arguments: Any) -> None:
    """A callback that fails must not end the watch."""
    try:
        function(*arguments)
    except Exception:
        with suppress(Exception):
            traceback.print_exc()
