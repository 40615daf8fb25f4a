"""The HTTP side of a stream: what viewers ask before they subscribe.

Owns one listener and its thread a stream. It answers GET /server_info and, where there is a
detokenizer, POST /detokenize; everything else is 404. It reads nothing but what it was made with,
and must never reach into the publisher's state.
"""

from __future__ import annotations

import selectors
import socket
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

REQUEST_BYTES_MAX: Final = 4 << 20
REPLY_BYTES_MAX: Final = 16 << 20
TIMEOUT_S: Final = 10.0
JSON: Final = "application/json"


class Web:
    """The endpoint of one stream. Raises `OSError` where the port cannot be had."""

    def __init__(
        self, host: str, port: int, info: dict[str, object], detokenizer: str | None
    ) -> None:
        self.info = msgspec.json.encode(info)
        self.detokenizer = detokenizer

        class Bound(_Handler):
            web = self

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that hangs up is its own affair."""

        self._server = Listener((host, port), Bound)
        self._server.timeout = 0
        self._end_in, self._end_out = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"http-{port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Repeatable."""
        self._end_out.close()
        self._thread.join()
        self._server.server_close()
        self._end_in.close()

    def _serve(self) -> None:
        # Not `serve_forever`, which wakes up all the time to see whether it is to end.
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            end = selector.register(self._end_in, selectors.EVENT_READ)
            while end not in [key for key, _ in selector.select()]:
                self._server.handle_request()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S
    server_version = "treecored"
    sys_version = ""
    web: Web

    def do_GET(self) -> None:
        """Describe the stream."""
        if self.path.partition("?")[0] in ("/server_info", "/get_server_info"):
            self._answer(200, self.web.info)
        else:
            self._answer(404, b'{"error":"not found"}')

    def do_POST(self) -> None:
        """Hand token ids on to whoever knows the words."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > REQUEST_BYTES_MAX:
            self.close_connection = True
            self._answer(413, b'{"error":"a body of known and bearable length is needed"}')
            return
        body = self.rfile.read(int(length))
        if self.path.partition("?")[0] != "/detokenize" or self.web.detokenizer is None:
            self._answer(404, b'{"error":"not found"}')
            return
        self._answer(*_ask(self.web.detokenizer, body))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing: a viewer asks for every block."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", JSON)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _ask(url: str, body: bytes) -> tuple[int, bytes]:
    """One request to the detokenizer; its words, or a 502."""
    request = urllib.request.Request(url, body, {"Content-Type": JSON})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return 200, reply.read(REPLY_BYTES_MAX)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(REPLY_BYTES_MAX)
    except (OSError, ValueError):
        return 502, b'{"error":"the detokenizer cannot be reached"}'
