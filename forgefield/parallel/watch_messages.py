"""Messages of the watch over a TCP connection: JSON objects, one per line, confirmed by the other side.

A message that is not of the kinds below closes its connection; nothing that is received is executed.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

WINDOW = 32 * 1024
"""Unconfirmed bytes on one connection; a longer message is sent on its own."""
MESSAGE_LIMIT, HELLO_LIMIT, TEXT_LIMIT = 16 * 1024**2, 4096, 1_000_000
Message = dict[str, Any]
"""`kind` and the fields of that kind."""
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"token": str, "rank": int, "host": str, "world_size": int},
    "welcome": {"host": str},
    "refused": {"text": str},
    "line": {"text": str},
    "fail": {"text": str, "reason": str, "exit_code": int},
    "loss": {"rank": int, "host": str, "text": (str, type(None)), "reason": str, "exit_code": int},
    "leave": {},
    "got": {"bytes": int},
}
POSTED = frozenset({"line", "fail", "loss", "leave"})


class InvalidMessage(Exception):
    """The other side sent something that is not a message of the watch."""


class Connection:
    """One end of a connection: complete messages in and out, and how many posted bytes the other side has confirmed."""

    def __init__(
        self, sock: socket.socket, *, rank: int = -1, host: str = "", received: bytearray | None = None
    ) -> None:
        sock.setblocking(False)
        _keep_alive(sock)
        self.sock, self.rank, self.host = sock, rank, host
        self.events = selectors.EVENT_READ
        self.has_failed = self.left = self.closed = self.unreachable = False
        self.received, self.handled = received or bytearray(), 0
        self.queue: deque[bytes] = deque()
        self.out, self.queued, self.unconfirmed = bytearray(), 0, 0

    @property
    def confirmed(self) -> bool:
        return self.closed or self.unreachable or not (self.queue or self.unconfirmed)

    def post(self, message: Message) -> None:
        self.queue.append(data := encode(message))
        self.queued += len(data)

    def send(self) -> None:
        """Send as much as the operating system accepts now."""
        while self.queue and (self.left or self.unconfirmed < WINDOW):
            data = self.queue.popleft()
            self.queued -= len(data)
            self.unconfirmed += len(data)
            self.out += data
        try:
            while self.out and not self.unreachable:
                del self.out[: self.sock.send(self.out)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.unreachable = True  # what the other side sent before it closed can still be read
        if self.unreachable:
            self.out.clear()
            self.queue.clear()
            self.queued = 0

    def receive(self) -> Iterator[Message]:
        """The messages that one read completes."""
        try:
            data = self.sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self.closed = not data
        self.received += data
        if b"\n" in data:
            yield from self.messages()
        if len(self.received) > (HELLO_LIMIT if self.rank < 0 else MESSAGE_LIMIT):
            raise InvalidMessage

    def messages(self) -> Iterator[Message]:
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            message = decode(line)
            self.handled += len(line) + 1 if message["kind"] in POSTED else 0
            yield message


def encode(message: Message) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes | bytearray) -> Message:
    try:
        message: Message = json.loads(line)
        if all(isinstance(message[name], kind) for name, kind in FIELDS[message["kind"]].items()):
            return message
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise InvalidMessage


def shortened(text: str) -> str:
    """The text; only the beginning and the end of a very long one."""
    half = TEXT_LIMIT // 2
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def listen() -> socket.socket:
    """A socket that listens on a free port of all interfaces, for IPv4 and, if available, IPv6."""
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    except (OSError, ValueError):
        listener = socket.create_server(("", 0), backlog=4096)
    listener.setblocking(False)
    return listener


def _keep_alive(sock: socket.socket) -> None:
    """Let the operating system close a connection whose other end has not answered for about 30 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
    for name, value in {"TCP_NODELAY": 1, **idle}.items():
        if hasattr(socket, name):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_open_files(n: int) -> None:
    """Raise the limit of open files of this process to `n`, as far as it is allowed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < n:
        with suppress(ValueError, OSError):
            limit = n if hard == resource.RLIM_INFINITY else min(n, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
