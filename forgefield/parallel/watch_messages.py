"""Messages over a TCP connection for the watch: whole JSON objects, one per line, confirmed by the other side.

A message that is not of the kinds below ends its connection; nothing that arrives is ever executed.
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
"""Bytes under way on one connection; one longer message goes alone."""
MESSAGE_LIMIT, STRANGER_LIMIT, TEXT_LIMIT = 16 * 1024**2, 4096, 1_000_000
FIELDS: dict[str, dict[str, Any]] = {
    "hello": {"token": str, "rank": int, "host": str, "world_size": int},
    "welcome": {"host": str},
    "refused": {"text": str},
    "line": {"text": str},
    "fail": {"text": str},
    "loss": {"rank": int, "host": str, "text": (str, type(None))},
    "leave": {},
    "got": {"bytes": int},
}
POSTED = frozenset({"line", "fail", "loss", "leave"})


class Unreadable(Exception):
    """The other side sent what is no message of ours."""


class Connection:
    """One end of a connection: whole messages in and out, and how much of what was posted is dealt with over there."""

    def __init__(
        self, sock: socket.socket, *, rank: int = -1, host: str = "", received: bytearray | None = None
    ) -> None:
        sock.setblocking(False)
        _keep_alive(sock)
        self.sock, self.rank, self.host = sock, rank, host
        self.events = selectors.EVENT_READ
        self.spoken = self.left = self.closed = self.deaf = False
        self.received, self.handled = received or bytearray(), 0
        self.queue: deque[bytes] = deque()
        self.out, self.queued, self.unconfirmed = bytearray(), 0, 0

    @property
    def confirmed(self) -> bool:
        return self.closed or self.deaf or not (self.queue or self.unconfirmed)

    def post(self, message: dict[str, Any]) -> None:
        self.queue.append(data := encode(message))
        self.queued += len(data)

    def send(self) -> None:
        """Hand the operating system what it takes now."""
        while self.queue and (self.left or self.unconfirmed < WINDOW):
            data = self.queue.popleft()
            self.queued -= len(data)
            self.unconfirmed += len(data)
            self.out += data
        try:
            while self.out and not self.deaf:
                del self.out[: self.sock.send(self.out)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.deaf = True  # what the other side said before it went may still be there to be read
        if self.deaf:
            self.out.clear()
            self.queue.clear()
            self.queued = 0

    def receive(self) -> Iterator[dict[str, Any]]:
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
        if len(self.received) > (STRANGER_LIMIT if self.rank < 0 else MESSAGE_LIMIT):
            raise Unreadable

    def messages(self) -> Iterator[dict[str, Any]]:
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            message = decode(line)
            self.handled += len(line) + 1 if message["kind"] in POSTED else 0
            yield message


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
        if all(isinstance(message[name], kind) for name, kind in FIELDS[message["kind"]].items()):
            return message
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise Unreadable


def shortened(text: str) -> str:
    """The beginning and the end of an immense text."""
    half = TEXT_LIMIT // 2
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def listen() -> socket.socket:
    """A free port of all interfaces, for IPv4 and, where the machine has it, IPv6."""
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    except (OSError, ValueError):
        listener = socket.create_server(("", 0), backlog=4096)
    listener.setblocking(False)
    return listener


def _keep_alive(sock: socket.socket) -> None:
    """Have the operating system close a connection whose other end has not answered for about 30 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
    for name, value in {"TCP_NODELAY": 1, **idle}.items():
        if hasattr(socket, name):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_open_files(n: int) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < n:
        with suppress(ValueError, OSError):
            wanted = n if hard == resource.RLIM_INFINITY else min(n, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
