"""Gives a run's metrics out, by the policy's `metrics`: to whoever scrapes a socket or a port, and as a file
for node exporter.

Nothing here holds anything else up: each scrape has a thread and little time, and the file has a thread. What
could not be renewed for a while is not given out any more: it would look as if all went well.
"""

from __future__ import annotations

import hmac
import itertools
import json
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from jurymast import foreign
from jurymast.cluster.allocation import loopback
from jurymast.core.judges.admission import Admission
from jurymast.core.state.settings import Exposure
from jurymast.errors import JurymastError
from jurymast.report.mailbox import Mailbox
from jurymast.report.metrics import COUNTER, INFO, Family, RunMetrics
from jurymast.report.status import StatusWatcher
from jurymast.rundir import RunDirectory, write_atomically
from jurymast.wire.addresses import listen_at, plain

log = logging.getLogger("jurymast.metrics")

EVERY_S = 5.0
# Of the time, this share at most is spent on computing metrics.
SHARE = 0.05
STALE_S = 60.0
LISTEN_AGAIN_S = 10.0
SCRAPES_MOST, SCRAPE_LIMIT_S = 8, 10.0
TOKEN_BYTES_MAX, TOKEN_CHARACTERS_MIN = 4096, 16
FILE_END_S = 2.0
PATH = "/metrics"
Page = Callable[[str], "tuple[bytes, str] | None"]


class Snapshot:
    """What was known at one time, as prometheus_client's encoders want it."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._metrics = [_metric(family) for family in families]

    def collect(self) -> list[Metric]:
        return self._metrics

    def encoded(self, accepts: str) -> tuple[bytes, str]:
        """(text, its content type)"""
        encode, content_type = choose_encoder(accepts)
        text: bytes = encode(self)
        return text, content_type


def _metric(family: Family) -> Metric:
    suffix = {COUNTER: "_total", INFO: "_info"}.get(family.kind, "")
    metric = Metric(family.name.removesuffix(suffix), family.meaning, family.kind)
    for labels, value in family.values:
        metric.add_sample(family.name, dict(labels), value)
    return metric


class ScrapeHandler(BaseHTTPRequestHandler):
    server: ScrapeServer
    timeout = SCRAPE_LIMIT_S

    def do_GET(self) -> None:
        if not self.server.admits(self.headers.get("Authorization", "")):
            self._answer(401, b"a token is needed\n", "text/plain", ("WWW-Authenticate", "Bearer"))
            return
        self.server.proved(self.request)
        if self.path.partition("?")[0] != PATH:
            self._answer(404, f"there is only {PATH}\n".encode(), "text/plain")
        elif (page := self.server.page(self.headers.get("Accept", ""))) is None:
            self._answer(503, b"the run's journal could not be read for a while\n", "text/plain")
        else:
            self._answer(200, *page)

    def _answer(self, code: int, body: bytes, content_type: str, *more: tuple[str, str]) -> None:
        self.send_response(code)
        for name, value in (("Content-Type", content_type), ("Content-Length", str(len(body))), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "jurymast"

    def log_message(self, *_: object) -> None: ...


class ScrapeServer(socketserver.ThreadingTCPServer):
    """`token` "": whoever can connect may read. Strangers may connect without end: see
    `core.judges.admission`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, token: str, page: Page) -> None:
        super().__init__(("", 0), ScrapeHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.page, self._token = page, token
        self._admission = Admission(SCRAPES_MOST, SCRAPE_LIMIT_S)
        self._numbers = itertools.count()
        self._waiting: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def admits(self, authorization: str) -> bool:
        wanted = f"Bearer {self._token}".encode()
        return not self._token or hmac.compare_digest(authorization.encode(errors="replace"), wanted)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client: Any) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = request
            address = plain(client[0]) if client else ""
            displaced = self._admission.connected(number, address, time.monotonic())
            for one in displaced:
                _hang_up(self._waiting.pop(one))
        if number in displaced:
            self.shutdown_request(request)
        else:
            super().process_request(request, client)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client: Any
    ) -> None:
        assert isinstance(request, socket.socket)
        limit = threading.Timer(SCRAPE_LIMIT_S, _hang_up, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client)
        finally:
            limit.cancel()

    def proved(self, request: socket.socket) -> None:
        """Who connected has the token: nobody displaces them, and their address comes first from now on."""
        with self._lock:
            for number in [number for number, one in self._waiting.items() if one is request]:
                self._admission.proved(number)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        with self._lock:
            for number in [number for number, one in self._waiting.items() if one is request]:
                self._admission.left(number)
                del self._waiting[number]
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is nobody's trouble."""


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class OwnFile:
    """A file, or a socket, that ends with us; not if another supervisor's process has put its own there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: tuple[int, int] | None = None

    def write(self, data: bytes, mode: int = 0o600) -> None:
        write_atomically(self.path, data, durable=False, mode=mode)
        self.made()

    def made(self) -> None:
        self._written = self._now()

    def remove(self) -> None:
        with suppress(OSError):
            if self._written is not None and self._now() == self._written:
                self.path.unlink()

    def _now(self) -> tuple[int, int]:
        found = foreign.link_status(self.path)
        return found.st_dev, found.st_ino


class Exporter:
    def __init__(self, watcher: StatusWatcher, wanted: Exposure) -> None:
        self._metrics = RunMetrics(watcher)
        self._directory, self._wanted, self._cluster = watcher.directory, wanted, watcher.plan.cluster
        self._snapshot: Snapshot | None = None
        self._look_at = self._listen_at = self._stale_at = 0.0
        self._problems: dict[str, str] = {}
        self._files: list[OwnFile] = []
        self._listens: dict[str, Callable[[], None]] = {}
        if wanted.socket:
            self._listens["metrics.socket"] = self._listen_at_socket
        if wanted.port is not None:
            self._listens["metrics.port"] = self._listen_at_port
        self._boxes: list[Mailbox[Snapshot]] = []
        if wanted.textfile:
            file = OwnFile(Path(wanted.textfile) / f"jurymast-{watcher.plan.run}.prom")
            self._files.append(file)
            self._boxes.append(Mailbox("metrics.textfile", partial(_write, file), log, tries=1))
        for box in self._boxes:
            box.start()

    def look(self) -> None:
        """Renew what is given out, if it is time to."""
        began = time.monotonic()
        if began >= self._look_at:
            self._snapshot = Snapshot(self._metrics.families(time.time()))
            pause_s = max(EVERY_S, (time.monotonic() - began) / SHARE)
            self._look_at, self._stale_at = began + pause_s, began + pause_s + STALE_S
            for box in self._boxes:
                if box.empty(began):  # else it has an older one to deliver still
                    box.put(self._snapshot)
        if self._listens and began >= self._listen_at:
            self._listen_at = began + LISTEN_AGAIN_S
            self._listen()

    def finish(self, until: float) -> None:
        """Leave no file that would be taken for a run's that goes on."""
        for box in self._boxes:
            box.empty(min(until, time.monotonic() + FILE_END_S))
        for file in self._files:
            file.remove()

    def page(self, accepts: str) -> tuple[bytes, str] | None:
        snapshot = self._snapshot
        if snapshot is None or time.monotonic() >= self._stale_at:
            return None
        return snapshot.encoded(accepts)

    def _listen(self) -> None:
        """Open what is not open yet: another process may have the port for now."""
        for name, listen in list(self._listens.items()):
            try:
                listen()
            except (OSError, JurymastError) as error:
                if self._problems.get(name) != str(error):
                    log.warning("%s: %s; tried again every %.0f s", name, error, LISTEN_AGAIN_S)
                self._problems[name] = str(error)
            else:
                del self._listens[name]

    def _listen_at_socket(self) -> None:
        file = OwnFile(self._directory.metrics_socket)
        self._serve(listen_in(file.path.parent, file.path.name), "")
        file.made()
        self._files.append(file)

    def _listen_at_port(self) -> None:
        wanted = self._wanted
        token = read_token(Path(wanted.token)) if wanted.token else own_token(self._directory)
        here = loopback() if self._cluster == "local" else ""
        listener = listen_at(here, wanted.port or 0)
        self._serve(listener, token)
        file = OwnFile(self._directory.metrics_file)
        self._files.append(file)
        host = f"[{here}]" if ":" in here else here or socket.gethostname()
        target = f"{host}:{listener.getsockname()[1]}"
        file.write(json.dumps([{"targets": [target], "labels": {}}]).encode())

    def _serve(self, listener: socket.socket, token: str) -> None:
        server = ScrapeServer(listener, token, self.page)
        threading.Thread(target=server.serve_forever, daemon=True).start()


def _write(file: OwnFile, snapshot: Snapshot) -> str:
    try:
        file.write(snapshot.encoded("")[0], 0o644)
    except OSError as error:
        return str(error)
    return ""


def listen_in(directory: Path, name: str) -> socket.socket:
    """Return a Unix socket that listens in the directory, whose path may be long, for this user only. An
    earlier one's name is taken. Raises OSError."""
    with foreign.own_directory(directory) as held, ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        (held / name).unlink(missing_ok=True)
        listener.bind(str(held / name))
        (held / name).chmod(0o600)
        listener.listen()
        opened.pop_all()
    return listener


def read_token(path: Path) -> str:
    """The token in a file. Raises OSError, also if others could have read it."""
    token = (
        foreign.read_own(path, TOKEN_BYTES_MAX, closed=foreign.OTHERS_ANYTHING)
        .decode(errors="replace")
        .strip()
    )
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise OSError(f"the token in {path} has fewer than {TOKEN_CHARACTERS_MIN} characters")
    return token


def own_token(directory: RunDirectory) -> str:
    """The run's token, which is made when it is first needed."""
    path = directory.metrics_token_file
    if not foreign.exists(path):
        write_atomically(path, secrets.token_urlsafe(32).encode())
    return read_token(path)
