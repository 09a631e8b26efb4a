"""A rank whose log finds no room trains on, and what ends it is told all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jurymast import worker
from jurymast.worker.endings import ERROR_FILE_VARIABLE, read_error
from jurymast.worker.rank import ERRORS_VARIABLE, LOG_VARIABLE

# More than any buffer holds, from Python and from below it.
TALKS = """
import os, sys
print("step", flush=True)
print("x" * 100_000)
sys.stderr.write("y" * 100_000)
sys.stdout.buffer.write(b"z" * 100_000)
"""

# What a full disk does to the log: writes fail, from here on.
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"


def end_of(folder: Path, script: str, log: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Of a rank that starts by itself."""
    path = folder / "script.py"
    path.write_text(script)
    given = {**os.environ, LOG_VARIABLE: log, ERROR_FILE_VARIABLE: str(folder / "error.json"), **more}
    cold = {"why": "", "since": 0.0, "logs": {}}
    return subprocess.run(
        [sys.executable, "-u", str(path)], capture_output=True, text=True, timeout=60, check=False,
        env=worker.variables({"cold": cold}, given),
    )  # fmt: skip


@pytest.mark.parametrize("log", ["full", "/dev/full", "/proc/no/such/log"])
def test_what_a_rank_prints_never_ends_it(tmp_path: Path, log: str) -> None:
    """A log that finds no room; a device, which is no log; a place where no file can be made."""
    done = end_of(tmp_path, f"{FULL * (log == 'full')}{TALKS}raise SystemExit(3)\n", str(tmp_path / log))
    assert done.returncode == 3, done.stderr
    assert ("a rank writes here, because it cannot open its own log" in done.stderr) == (log != "full")
    assert ("x" * 100_000 in done.stdout) == (log != "full")
    assert log != "full" or (tmp_path / log).stat().st_size <= 4096


@pytest.mark.parametrize("opens", [True, False])
def test_a_rank_has_a_log_of_its_stderr_if_that_goes_elsewhere(tmp_path: Path, opens: bool) -> None:
    """Where that cannot be made, its log has both."""
    errors = tmp_path / "err" if opens else Path("/proc/no/such/log")
    script = "import sys; print('out'); print('err', file=sys.stderr)"
    done = end_of(tmp_path, script, str(tmp_path / "log"), **{ERRORS_VARIABLE: str(errors)})
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text().splitlines()
    assert ("out" in log, "err" in log) == (True, not opens)
    assert not opens or errors.read_text() == "err\n"


def test_an_exception_is_told_although_its_traceback_finds_no_room(tmp_path: Path) -> None:
    full = f"{FULL}{TALKS}os.write(os.open('/dev/full', os.O_WRONLY), b'x')\n"
    done = end_of(tmp_path, full, str(tmp_path / "log"))
    assert done.returncode == 1
    told = read_error(str(tmp_path / "error.json"))
    assert told["error"] == "OSError"
    assert "No space left on device" in told["message"]
    assert "script.py" in told["traceback"]
