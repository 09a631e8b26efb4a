"""How the test cluster signals a process whose number may be another's by now."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from testcluster.processes import send, start_ticks


def test_a_number_that_a_thread_has_taken_is_no_process() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        assert not send(thread.native_id, start_ticks(thread.native_id), signal.SIGKILL)
    finally:
        stop.set()
        thread.join()


def test_only_the_process_that_was_seen_is_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = start_ticks(process.pid)
        assert not send(process.pid, ticks + 1, signal.SIGKILL)
        assert process.poll() is None
        assert send(process.pid, ticks, signal.SIGKILL)
        assert process.wait(60.0) == -signal.SIGKILL
    assert not send(process.pid, ticks, signal.SIGKILL)
