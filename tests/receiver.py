"""A real receiver of webhooks on 127.0.0.1, which answers as it is told and keeps what it got."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = 0


class Receiver:
    """`answers` are given one after the other, the last one again and again; HANG gives none while it is open."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.got, self.keys, self.paths = list(answers), [], [], []
        self._closing = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(self)

            def do_GET(self) -> None:
                receiver._take(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # closing waits for them
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/hook/sesame?key=open"

    def _take(self, request: BaseHTTPRequestHandler) -> None:
        text = request.rfile.read(int(request.headers.get("content-length", 0)))
        self.got.append(json.loads(text) if text else None)
        self.keys.append(request.headers.get("idempotency-key"))
        self.paths.append(f"{request.command} {request.path}")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == HANG:
            self._closing.wait(30)
            return
        request.send_response(answer)
        if answer == 302:
            request.send_header("location", self.url)
        request.send_header("content-length", "0")
        request.end_headers()

    def let_go(self) -> None:
        """End the connections that hang."""
        self._closing.set()

    def close(self) -> None:
        self.let_go()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def receiving(*answers: int) -> Iterator[Receiver]:
    receiver = Receiver(*answers)
    try:
        yield receiver
    finally:
        receiver.close()
