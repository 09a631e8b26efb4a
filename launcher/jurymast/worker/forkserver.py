"""A warm process to fork ranks from: multiprocessing's forkserver, itself forked from a warm process.

The standard one is a fresh interpreter that imports everything once more. Forking it from this process
right after the imports halves what a node's start costs (torch: 1.5-3 s of processor time a copy) and the
two share their memory.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import connection, forkserver
from typing import Any

from jurymast.processes import die_with_parent

# What ranks will import anyway. Only modules that are safe to fork after: they touch no device.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # the first optimizer of a process imports it: 0.5 s
    "torch.distributed.checkpoint.state_dict",
    "jurymast.worker.entry",
    "jurymast.checkpoint.checkpointer",
]
# What is sent to everything in the job must not end the server: multiprocessing would start another, which is
# cold and outlives the host. Whether to end is the agent's decision.
DEAF_TO = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start(close_in_server: int) -> None:
    """Import `PRELOAD` here and fork the server; `close_in_server` is a descriptor that it must not keep.

    To be called once, before this process starts a thread.
    """
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # torch renames its inner modules now and then; a rank imports what it really needs
    server: Any = forkserver._forkserver
    if sys.version_info >= (3, 14) or not hasattr(server, "_forkserver_alive_fd"):
        _start_standard()  # its server takes a key since 3.14
        return
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            os.close(close_in_server)
            _serve(listener.detach(), alive_r)
        os.close(alive_r)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_w
    server._forkserver_pid = pid


def _serve(listener: int, alive_r: int) -> None:
    code = 1
    try:
        die_with_parent()
        for number in DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        forkserver.main(listener, alive_r, [])
        code = 0
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _start_standard() -> None:
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    probe = multiprocessing.get_context("forkserver").Process(target=_nothing)
    probe.start()  # answered once the imports are done: a node is ready only then
    probe.join()


def _nothing() -> None:
    die_with_parent()
