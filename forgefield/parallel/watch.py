"""Every rank is notified immediately when another rank is lost, for whatever reason: each has one TCP connection to rank 0,
which the operating system closes when the process exits. Rank 0 notifies all others which rank was lost first.

Contract: one daemon thread per process owns all sockets; other threads only queue requests, without locks, so that
`line` may be called from any thread. Messages are JSON objects, one per line: hello, line, fail, leave to rank 0;
welcome, refused, loss, leave from rank 0. Those in `POSTED` arrive in order, and the other side confirms with `got`
(a number of bytes) when it has handled them. The confirmations show that `fail` and `leave` have arrived, and limit the bytes
in flight, so that a rank 0 that is busy for a long time is not mistaken for a broken network.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from forgefield.errors import ForgefieldError
from forgefield.parallel.watch_messages import (
    MESSAGE_LIMIT,
    Connection,
    InvalidMessage,
    Message,
    allow_open_files,
    decode,
    encode,
    listen,
    shortened,
)
from forgefield.parallel.watch_thread import Loss, Watch, call_safely, loss_from, loss_message

KEY = "forgefield/watch"
"""Key in the store under which rank 0 writes "port token"."""
PENDING_LIMIT = 16 * 1024**2
"""Bytes of lines that may wait for a busy rank 0; any more lines are counted and dropped."""


class KeyValueStore(Protocol):
    """Store through which ranks exchange addresses, such as `torch.distributed.Store`. `get` waits for the key."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes | str: ...


def start_watch(
    *,
    rank: int,
    world_size: int,
    host: str,
    address: str,
    store: KeyValueStore,
    on_loss: Callable[[Loss], None],
    on_line: Callable[[int, str], None] | None = None,
    timeout: float = 60,
) -> Watch:
    """Connect to the other ranks: rank 0 returns when all have connected, the others when rank 0 has answered.

    address: of the node of rank 0. store: new for each attempt of a job. timeout: seconds. on_loss: called once, in the
    watch thread, also when a rank is lost while others are still connecting (rank 0 then stops waiting). on_line: called on
    rank 0, in the watch thread for the lines of other ranks and in the calling thread for its own.
    """
    if rank == 0:
        return _Coordinator(world_size, host, on_loss, on_line).wait_for_all(store, timeout)
    hello = {"kind": "hello", "rank": rank, "host": host, "world_size": world_size}
    return _Participant(rank, host, on_loss, on_line).start(_connect(hello, address, store, timeout))


class _Coordinator(Watch):
    """The watch of rank 0, which every other rank is connected to."""

    def __init__(
        self, world_size: int, host: str, on_loss: Callable[[Loss], None], on_line: Callable[[int, str], None] | None
    ) -> None:
        super().__init__(0, host, on_loss, on_line)
        self._world_size = world_size
        self._token = secrets.token_hex(16)
        self._missing = set(range(1, world_size))
        self._all_connected = threading.Event()
        self._error: str | None = None
        self._listener: socket.socket | None = None

    def wait_for_all(self, store: KeyValueStore, timeout: float) -> Watch:
        """Publish the port and wait until all ranks have connected."""
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
            if not self._all_connected.wait(timeout):
                self._error = (
                    f"{_ranks(self._missing)} of {self._world_size} did not reach rank 0 ({self._host}, port {port}) "
                    f"within {timeout:g} s: check their errors, and whether the network allows connections between these "
                    "machines on any port."
                )
            if self._error is not None:
                self.fail(self._error)
                raise ForgefieldError(self._error)
        except BaseException:
            self._request(self._finish)
            raise
        return self

    def line(self, text: str) -> None:
        if self._on_line is not None:
            call_safely(partial(self._on_line, 0, text))

    def _announce(self, loss: Loss) -> None:
        self._record_loss(loss)

    def _accept(self, _: int) -> None:
        if self._listener is None:
            return
        try:
            self._add(Connection(self._listener.accept()[0]))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # the peer closed the connection again
            self._stop_listening()
            required = self._world_size + 512
            self._error = (
                f"Rank 0 is not allowed to open {required} files, as {self._world_size} ranks require: run "
                f"`ulimit -n {required}` first."
            )
            self._all_connected.set()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _handle(self, connection: Connection, message: Message) -> None:
        kind = message["kind"]
        if (connection.rank < 0) != (kind == "hello"):
            raise InvalidMessage
        if kind == "hello":
            self._greet(connection, message)
        elif kind == "line":
            if self._on_line is not None:
                call_safely(partial(self._on_line, connection.rank, message["text"]))
        elif kind == "fail":
            connection.has_failed = True
            self._record_loss(loss_from({**message, "rank": connection.rank, "host": connection.host}))
        elif kind == "leave":
            connection.left = True
        else:
            raise InvalidMessage

    def _greet(self, connection: Connection, hello: Message) -> None:
        rank, world_size = hello["rank"], hello["world_size"]
        if not secrets.compare_digest(hello["token"].encode("utf-8", "replace"), self._token.encode()):
            raise InvalidMessage
        if world_size != self._world_size or rank not in self._missing:
            text = f"Rank 0 expects {self._world_size} ranks and each of them once, but rank {rank} of {world_size} connected"
            text = f"{text} from {hello['host']}: compare how they were started."
            connection.out += encode({"kind": "refused", "text": text})
            connection.send()
            raise InvalidMessage
        connection.rank, connection.host = rank, hello["host"]
        connection.out += encode({"kind": "welcome", "host": self._host})
        if self._loss is not None:
            connection.post(loss_message(self._loss))
        self._missing.discard(rank)
        if not self._missing:
            self._stop_listening()
            for unknown in [c for c in self._connections if c.rank < 0]:
                self._drop(unknown)
            self._all_connected.set()

    def _lost(self, connection: Connection) -> None:
        if connection.rank > 0 and not (connection.left or connection.has_failed):
            self._record_loss(Loss(connection.rank, connection.host, None))

    def _record_loss(self, loss: Loss) -> None:
        super()._record_loss(loss)
        self._all_connected.set()

    def _close(self) -> None:
        super()._close()
        if self._listener is not None:
            self._listener.close()


class _Participant(Watch):
    """The watch of any other rank, with a single connection to rank 0."""

    def start(self, coordinator: Connection) -> Watch:
        self._coordinator, self._dropped_lines = coordinator, 0
        self._add(coordinator)
        self._request(lambda: self._receive(coordinator, coordinator.messages()))  # what came together with the welcome
        self._thread.start()
        return self

    def line(self, text: str) -> None:
        if not (self._ended or self._left):
            self._request(partial(self._post_line, shortened(text)))

    def _post_line(self, text: str) -> None:
        if self._coordinator.queued > PENDING_LIMIT:
            self._dropped_lines += 1
            return
        if self._dropped_lines:
            note = f"({self._dropped_lines} lines left out: rank 0 was too busy to receive them)"
            self._post_to_all({"kind": "line", "text": note})
            self._dropped_lines = 0
        self._post_to_all({"kind": "line", "text": text})

    def _announce(self, loss: Loss) -> None:
        self._post_to_all({"kind": "fail", "text": loss.text, "reason": str(loss.kind), "exit_code": loss.exit_code})

    def _handle(self, connection: Connection, message: Message) -> None:
        if message["kind"] == "loss":
            self._record_loss(loss_from(message))
        elif message["kind"] == "leave":
            connection.left = True  # from now on nothing is held back: queued messages are sent before the confirmation
            connection.send()
        else:
            raise InvalidMessage

    def _lost(self, connection: Connection) -> None:
        if not connection.left:
            self._record_loss(Loss(0, connection.host, None))
        self._finish()


def _connect(hello: Message, address: str, store: KeyValueStore, timeout: float) -> Connection:
    """Connect to rank 0, repeatedly until it answers."""
    deadline = time.monotonic() + timeout
    where, reason = address, "no time left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            entry = store.get(KEY)
            port, token = (entry.decode() if isinstance(entry, bytes) else str(entry)).split()
        except Exception as error:
            text = f"Rank {hello['rank']} did not get the port of rank 0 ({error}): check the error of rank 0."
            raise ForgefieldError(text) from error
        where = f"{address}, port {port}"
        try:
            sock = socket.create_connection((address, int(port)), timeout=left)
            return _greeted(sock, {**hello, "token": token}, deadline)
        except OSError as error:
            reason = str(error)
            time.sleep(min(0.2, left))
    raise ForgefieldError(
        f"Rank {hello['rank']} ({hello['host']}) did not reach rank 0 ({where}) within {timeout:g} s ({reason}): check "
        "the error of rank 0, and whether the network allows connections between these machines on any port."
    )


def _greeted(sock: socket.socket, hello: Message, deadline: float) -> Connection:
    """A connection on which rank 0 has answered `welcome`; OSError if another program is at the other end."""
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
            raise InvalidMessage
        return Connection(sock, rank=0, host=answer["host"], received=rest)
    except InvalidMessage:
        sock.close()
        raise ConnectionError("another program listens there") from None
    except BaseException:
        sock.close()
        raise


def _ranks(ranks: set[int]) -> str:
    shown = [str(r) for r in sorted(ranks)[:8]] + (["..."] if len(ranks) > 8 else [])
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"
