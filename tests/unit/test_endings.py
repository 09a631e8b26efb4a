"""Where a rank's script ended itself, as the rank notes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jurymast.worker.elastic import ImpatientAgent
from jurymast.worker.endings import read_error

CASES = """
import functools, json, os, sys, threading
from jurymast.worker import endings

def raises(): raise SystemExit(5)
def raises_the_class(): raise SystemExit
def says(): raise SystemExit("no data")
def calls(): sys.exit(259)
def calls_with_two(): sys.exit((1, 2))
def calls_with_another(): sys.exit(ValueError("no data"))
def calls_with_one(): sys.exit(SystemExit(8))
def is_done(): sys.exit(0)
def by_name(): exit(9)
def of_a_kind(): raise Kind(6)
def through_c(): functools.partial(raises)()
def again():
    try: raises()
    except SystemExit as error: raise error
def another():
    try: sys.exit(3)
    except SystemExit: raise SystemExit(4)
def cleans_up():
    try: sys.exit(7)
    finally: by_name.done = True
class Kind(SystemExit): pass

def told(path=os.environ["TORCHELASTIC_ERROR_FILE"] + ".exit"):
    if not os.path.exists(path):
        return None
    with open(path) as file:
        found = json.load(file)
    os.unlink(path)
    frames = [line for line in found["traceback"].splitlines() if "<string>" in line]
    return [found["code"], frames[-1].rpartition(" ")[2]]

def ended(leave):
    try: leave()
    except SystemExit as error: return [str(error), told()]

functions = [value for value in globals().values() if type(value) is type(told)]
cases = [function for function in functions if function not in (told, ended)]
before = {case.__name__: ended(case)[0] for case in cases}
endings.tell_exits()
after = {case.__name__: ended(case) for case in cases}
thread = threading.Thread(target=raises)
thread.start()
thread.join()
after["in_a_thread"] = ["", told()]
try: SystemExit.closed = "no"
except TypeError: pass
print(json.dumps([before, after, hasattr(SystemExit, "closed")]), flush=True)
threading.Thread(target=lambda: os._exit(11)).start()
threading.Event().wait()
"""


WRITES = """
import os
from jurymast.worker import endings

class Slow(Exception):
    def __str__(self):
        print(os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]), flush=True)
        return "no data"

endings.write_error(Slow(), "Traceback")
"""


def test_the_host_never_finds_half_of_an_error(tmp_path: Path) -> None:
    """It would take the rank for one that ended by itself, with exit code 1."""
    path = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", WRITES], env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert read_error(str(path)) == {"error": "Slow", "message": "no data", "traceback": "Traceback"}
    assert os.listdir(tmp_path) == [path.name]


def test_each_exit_with_a_failure_notes_its_place_and_stays_what_it_is(tmp_path: Path) -> None:
    """SystemExits of other threads end no rank; os._exit does in each."""
    path = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", CASES], env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (11, "")
    before, after, is_open = json.loads(done.stdout)
    assert {name: text for name, (text, _) in after.items()} == {**before, "in_a_thread": ""}
    assert {name: place for name, (_, place) in after.items()} == {
        "raises": [5, "raises"], "raises_the_class": None, "says": [1, "says"], "calls": [3, "calls"],
        "calls_with_two": [1, "calls_with_two"], "calls_with_another": [1, "calls_with_another"],
        "calls_with_one": [8, "calls_with_one"], "is_done": None, "by_name": [9, "by_name"],
        "of_a_kind": [6, "of_a_kind"], "through_c": [5, "raises"], "again": [5, "raises"],
        "another": [4, "another"], "cleans_up": [7, "cleans_up"], "in_a_thread": None,
    }  # fmt: skip
    assert not is_open
    assert json.loads(Path(f"{path}.exit").read_text())["code"] == 11


def test_a_rank_has_not_failed_while_it_writes_how_as_torchs_record_does(tmp_path: Path) -> None:
    told: list[Any] = []
    host: Any = object.__new__(ImpatientAgent)
    host._server = SimpleNamespace(codes=lambda: [None, -15])
    host._page, host._reported, host._plan = None, set(), {"temporary": str(tmp_path)}
    host._worker_group = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in (0, 1)])
    launch, pipe = SimpleNamespace(attempt=1), SimpleNamespace(tell=told.append)
    host._rendezvous_handler = SimpleNamespace(launch=launch, pipe=pipe)
    path = Path(host._error_file(0))
    path.touch()
    assert host._report_failures(ending=True)
    assert [(one.rank, one.exit_code) for one in told] == [(1, -15)]
    assert host._end()  # so that it is waited for
    path.write_text(json.dumps({"message": {"message": "RuntimeError: Connection reset by peer"}}))
    assert not host._end()
    assert host._report_failures(ending=True)
    assert [(one.rank, one.error) for one in told] == [(1, ""), (0, "RuntimeError")]
