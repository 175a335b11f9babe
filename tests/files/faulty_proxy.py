"""A server of HTTP that hands everything on to another, but for the requests that it is told to spoil."""

import http.client
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Kind = Literal["busy", "broken", "forbidden", "stall", "silent", "refuse", "cut", "short"]
Answer = tuple[int, dict[str, str], bytes]
_SAID = {
    "busy": (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "broken": (500, b"<Error><Code>InternalError</Code><Message>Something broke.</Message></Error>"),
    "forbidden": (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
}


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """What is done to a request."""

    kind: Kind
    after_bytes: int = 100
    """Of the body, where it is cut, or comes too short with a length that says so."""
    seconds: float = 2.0
    """That a stall takes before the true answer."""


class FaultyProxy:
    """Hands requests on; told so, spoils some of them. Listens on a free port of the loopback."""

    def __init__(self, host: str, port: int) -> None:
        self._behind = (host, port)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._spoils: Mapping[int, Spoil] = {}
        self._always: Spoil | None = None
        self._known: dict[tuple[str, str, str | None], Answer] = {}
        self.requests: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = (
                True  # or each body waits until the client has said that it got the head
            )

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def spoil(self, spoils: Mapping[int, Spoil] | None = None, always: Spoil | None = None) -> None:
        """Count requests from 1 again, and spoil those of these numbers, or all."""
        with self._lock:
            self._spoils, self._always, self.requests = spoils or {}, always, []

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range", "")
        with self._lock:
            self.requests.append(f"{request.command} {request.path} {wanted}".rstrip())
            spoil = self._always or self._spoils.get(len(self.requests))
        sent = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if spoil is not None and spoil.kind in _SAID:
            _answer(request, *_SAID[spoil.kind], {"Content-Type": "application/xml"})
            return
        if spoil is not None and spoil.kind in ("silent", "stall", "refuse"):
            waits = {"silent": None, "stall": spoil.seconds, "refuse": 0.0}[spoil.kind]
            self._closed.wait(waits)
            if spoil.kind != "stall":
                request.close_connection = True
                return
        status, headers, body = self._true_answer(request, sent)
        if spoil is None or spoil.kind == "stall":
            _answer(request, status, body, headers)
            return
        short = body[: spoil.after_bytes]
        if spoil.kind == "cut":
            _answer(request, status, short, headers, length=len(body))
            request.close_connection = True
        else:
            _answer(request, status, short, headers)

    def _true_answer(self, request: BaseHTTPRequestHandler, sent: bytes) -> Answer:
        """Ask the server behind; what it answered once isn't asked again until something is written."""
        wanted = (request.command, request.path, request.headers.get("Range"))
        with self._lock:
            if request.command not in ("GET", "HEAD"):
                self._known.clear()
            elif wanted in self._known:
                return self._known[wanted]
        answer = self._asked(request, sent)
        with self._lock:
            self._known[wanted] = answer
        return answer

    def _asked(self, request: BaseHTTPRequestHandler, sent: bytes) -> Answer:
        connection = http.client.HTTPConnection(*self._behind)
        try:
            connection.request(request.command, request.path, sent, dict(request.headers))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


def _answer(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str],
    length: int | None = None,
) -> None:
    """Answer a request; a client that has gone is no fault of ours."""
    said = {
        name: value for name, value in headers.items() if name.lower() not in ("connection", "date", "server")
    }
    if request.command != "HEAD":
        said = {name: value for name, value in said.items() if name.lower() != "content-length"}
        said["Content-Length"] = str(len(body) if length is None else length)
    try:
        request.send_response(status)
        for name, value in said.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(b"" if request.command == "HEAD" else body)
    except OSError:
        request.close_connection = True
