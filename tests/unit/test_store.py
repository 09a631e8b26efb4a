"""torch's store on a socket that listens already."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from jurymast.wire.addresses import listen_at

pytestmark = pytest.mark.torch


def test_a_store_is_served_on_a_socket_that_listens() -> None:
    pytest.importorskip("torch")
    from jurymast.worker.store import store_at

    with listen_at("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        served = store_at("127.0.0.1", port, 10.0, listener.detach())
    store_at("127.0.0.1", port, 10.0).set("key", "value")
    assert served.get("key") == b"value"


@pytest.mark.parametrize(
    ("release", "takes"), [("2.6.0+cu124", False), ("2.7.1", False), ("2.8.0", True), ("2.13.0+cpu", True)]
)
def test_a_torch_whose_newer_server_takes_no_such_socket_uses_the_older_one(
    release: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of torch 2.6 raises NotImplementedError."""
    torch = pytest.importorskip("torch")
    from jurymast.worker import store

    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(release))
    monkeypatch.setattr(store, "TCPStore", lambda *_place, **how: asked.update(how))
    store.store_at("localhost", 1, 1.0, 3)
    assert (asked["use_libuv"], asked["master_listen_fd"]) == (takes, 3)


HOST = """
import os, socket
from jurymast.worker import elastic, server
def serve(plan, channel): raise NotImplementedError("no store for " + plan["run"])
elastic.serve = serve
started = server.ForkServer(frozenset(), {"run": "this one"})
started._pid = os.getppid()
started._become_host(socket.socket(), 0)
"""


def test_a_host_that_cannot_go_on_says_why_in_the_nodes_log() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith("NotImplementedError: no store for this one\n"), done.stderr
