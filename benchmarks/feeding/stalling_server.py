"""`python -m benchmarks.feeding.stalling_server FOLDER FIRST EVERY SECONDS`: files over HTTP, held back at times.

It answers on a port of the loopback, which it prints, and says in the end how many requests it held back: the first
time so many seconds after its start, and then every so many.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@cache
def _content(path: Path) -> memoryview:
    """Return what a file holds; it stays in memory."""
    return memoryview(path.read_bytes())


class _Files(BaseHTTPRequestHandler):
    """Answers with files and parts of them."""

    protocol_version = "HTTP/1.1"
    folder: Path
    first_s: float
    every_s: float
    stall_s: float
    begun: float
    held: set[int]

    def do_GET(self) -> None:
        """Answer, and wait before where it is time to stall."""
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, *, with_content: bool) -> None:
        since = time.monotonic() - self.begun - self.first_s
        if since >= 0 and (left := self.stall_s - since % self.every_s) > 0:
            self.held.add(id(self) ^ int(1e6 * since))
            time.sleep(left)
        content = _content(self.folder / Path(self.path).name)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = 0, len(content)
        if part:
            start = int(part[1])
            stop = min(int(part[2]) + 1, stop) if part[2] else stop
        self.send_response(206 if part else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(stop - start))
        if part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.end_headers()
        if with_content:
            with suppress(ConnectionError):  # whoever asked has seen enough
                self.wfile.write(content[start:stop])


class _Server(ThreadingHTTPServer):
    """Says nothing where a connection breaks off."""

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    folder, first, every, stall = sys.argv[1:5]
    _Files.folder, _Files.begun, _Files.held = Path(folder), time.monotonic(), set()
    _Files.first_s, _Files.every_s, _Files.stall_s = float(first), float(every), float(stall)
    server = _Server(("127.0.0.1", 0), _Files)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(server.server_port, flush=True)
    server.serve_forever()
    print(len(_Files.held), flush=True)


if __name__ == "__main__":
    main()
