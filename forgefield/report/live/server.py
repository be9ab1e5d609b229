"""Serves the live page on 127.0.0.1 with the server of Python's standard library.

Everything is under one path, a random token; `access` decides which requests are answered. GET requests change nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from types import TracebackType
from typing import Any, cast
from urllib.parse import parse_qs, urlencode, urlsplit

from forgefield.errors import ForgefieldError
from forgefield.report.live.access import HEADERS, REPORT_POLICY, may_change, may_read, new_token
from forgefield.report.live.answers import Answers
from forgefield.report.live.folder import RunsFolder, folder_of

ADDRESS = "127.0.0.1"
PORT = 8642
"""The first port that is tried."""
_PORTS = 50
"""Number of ports that are tried."""
_LARGEST_BODY = 10_000
_TIMEOUT_S = 30.0
ASSETS = {
    "": ("index.html", "text/html; charset=utf-8"),
    "live.js": ("live.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "live.css": ("live.css", "text/css; charset=utf-8"),
    "uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
"""Files of the page, with their types."""


class LivePage:
    """A running server. In a notebook its address is displayed; `close` ends it.

    Parameters
    ----------
    path
        A folder of runs, or a run, which the page then shows first.
    port
        0 for any; None for the first one that is free from 8642 on.
    """

    def __init__(self, path: str | os.PathLike[str] = "runs", *, port: int | None = None) -> None:
        folder, run = folder_of(path)
        self.folder = folder
        self.token = new_token()
        self._server = _listening(port)
        self._server.token, self._server.answers = self.token, Answers(RunsFolder(folder))
        self._run = run
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="live page")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        shown = f"#{urlencode({'run': self._run})}" if self._run is not None else ""
        return f"http://{ADDRESS}:{self.port}/{self.token}/{shown}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LivePage({str(self.folder)!r}, {self.address})"

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank" rel="noreferrer">Live page of {self.folder}</a>'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False  # on some systems it would share the port with another server
    token: str
    answers: Answers

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the port, and the connections that browsers keep open."""
        super().server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection early is not reported as an error."""


def _listening(port: int | None) -> _Server:
    ports = [port] if port is not None else [*range(PORT, PORT + _PORTS), 0]
    for number in ports:
        try:
            return _Server((ADDRESS, number), _Handler)
        except OSError as error:
            reason = error.strerror
    raise ForgefieldError(f"Port {port} cannot be used: {reason}. Leave out --port, or choose another one.")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Forgefield", ""
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        rest, query = self._requested()
        if rest is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        elif rest in ASSETS:
            name, kind = ASSETS[rest]
            self._send(files("forgefield.report.live").joinpath("page", name).read_bytes(), kind)
        elif rest == "report":
            page = self._live.answers.report(query.get("run", [""])[0])
            if page is None:
                self._refuse(HTTPStatus.NOT_FOUND)
            else:
                self._send(page, "text/html; charset=utf-8", {"Content-Security-Policy": REPORT_POLICY})
        else:
            self._answer(rest, query)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        rest, _ = self._requested()
        headers = cast("dict[str, str]", self.headers)
        if rest is None or not rest.startswith("api/"):
            self._refuse(HTTPStatus.NOT_FOUND)
        elif not may_change(headers, self._live.token):
            self._refuse(HTTPStatus.FORBIDDEN)
        else:
            try:
                size = int(headers.get("Content-Length") or 0)
                content = json.loads(self.rfile.read(size)) if 0 < size <= _LARGEST_BODY else {}
                run = str(content["run"])
            except (ValueError, TypeError, KeyError, RecursionError):
                self._refuse(HTTPStatus.BAD_REQUEST)
                return
            self._send_json(lambda answers: answers.request(run, rest.removeprefix("api/")))

    @property
    def _live(self) -> _Server:
        return cast("_Server", self.server)

    def _requested(self) -> tuple[str | None, dict[str, list[str]]]:
        """What follows the token in the path, None if the request must not be answered; and the query."""
        try:
            parts = urlsplit(self.path)
        except ValueError:
            return None, {}
        token, _, rest = parts.path.lstrip("/").partition("/")
        if not may_read(cast("dict[str, str]", self.headers), self._live.token, token):
            return None, {}
        try:
            return rest, parse_qs(parts.query, max_num_fields=100)
        except ValueError:
            return None, {}

    def _answer(self, rest: str, query: dict[str, list[str]]) -> None:
        runs = query.get("run", [])
        if rest == "api/runs":
            self._send_json(lambda answers: answers.runs(query.get("errors", ["mae"])[0]))
        elif rest == "api/curves":
            self._send_json(lambda answers: answers.curves(runs, query.get("metric", [])))
        elif rest == "api/compare":
            self._send_json(lambda answers: answers.compare(runs))
        elif rest == "api/run" and runs:
            self._send_json(lambda answers: answers.detail(runs[0]))
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _send_json(self, answer: Callable[[Answers], Any]) -> None:
        """Send what `answer` returns; an error as a message. An answer that the browser already has is not sent again."""
        status = HTTPStatus.OK
        try:
            with self._live.answers.lock:
                value = answer(self._live.answers)
        except ForgefieldError as error:
            status, value = HTTPStatus.CONFLICT, {"error": str(error)}
        content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        if self.command == "GET" and status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            self._send(b"", None, {"ETag": tag}, HTTPStatus.NOT_MODIFIED)
        else:
            self._send(content, "application/json", {"ETag": tag}, status)

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._send(f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8", {}, status)

    def _send(
        self,
        content: bytes,
        kind: str | None,
        headers: Mapping[str, str] | None = None,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if kind is not None:
            self.send_header("Content-Type", kind)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""
