"""`make test` ends whatever a test does: what hangs or crashes is named with its stacks, the rest is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# Well above what any of these runs needs, and well below `make test`'s own limit.
LIMIT_S = 240.0

HANGS = "while True: time.sleep(0.01)"
CATCHES_ALL = """
while True:
    try:
        while True: time.sleep(0.01)
    except BaseException: pass
"""
HOLDS_THE_GIL = "ctypes.PyDLL(None).sleep(3600)"
BACKTRACKS = "re.match('(a|aa)+$', 'a' * 60 + 'b')"
SEGFAULTS = "os.kill(os.getpid(), signal.SIGSEGV)"
EXITS = "os._exit(0)"

HEAD = "import ctypes, os, re, signal, subprocess, sys, threading, time\nimport pytest\n"


class Planted:
    """A copy of the project whose only tests are those that are planted into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "launcher", "plugins", "slurm", ".ci", ".venv"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "tests" / "unit").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
        (folder / "tests" / "support").symlink_to(ROOT / "tests" / "support")

    def plant(self, name: str, text: str) -> None:
        file = self.folder / "tests" / "unit" / f"test_{name}.py"
        file.write_text(HEAD + textwrap.dedent(text))

    def make_test(self, *flags: str, workers: int = 2, limit: str = "10m") -> tuple[int, str]:
        """The exit code and the output of `make test`, in which limits are a few seconds."""
        given = " ".join(("--timeout=3", "-o limit_grace=4", "-p no:cacheprovider", *flags))
        variables = f"TEST_WORKERS={workers}", f"TEST_LIMIT={limit}", f"PYTEST_FLAGS={given}"
        environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        process = subprocess.Popen(
            ["make", "--assume-old=.venv/.installed", "test", *variables], cwd=self.folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
        return process.returncode, output


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    if os.geteuid() == 0 and not (shutil.which("slurmctld") or not Path("/etc/debian_version").exists()):
        pytest.skip("make test wants Slurm here")
    found = Planted(tmp_path)
    found.plant("before", "def test_before() -> None: pass")
    found.plant("later", "def test_later() -> None: pass")
    return found


def body(text: str) -> str:
    return textwrap.indent(textwrap.dedent(text).strip(), "    ")


def counts(output: str) -> dict[str, int]:
    """Of the first part."""
    last = re.findall(r"^=+ (.*(?:passed|failed|error).*) in .*=+$", output, re.MULTILINE)[0]
    return {
        word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", last)
    }


MIDDLE = {
    "hangs": HANGS, "catches_all": CATCHES_ALL, "holds_gil": HOLDS_THE_GIL, "backtracks": BACKTRACKS,
    "segfaults": SEGFAULTS, "exits": EXITS,
}  # fmt: skip


STARTS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
with open({started!r}, "w") as file:
    file.write(str(child.pid))
os._exit(1)
"""
EXAMPLE = """
from hypothesis import given, strategies as st
from support import limits
limits.EXAMPLE_S = 0.5

@pytest.mark.timeout(60)
@given(number=st.integers(3, 3))
def test_planted(number: int) -> None:
    while True: pass
"""


def test_tests_that_do_not_end_are_named_and_all_others_run(planted: Planted) -> None:
    """In the middle of a file, whose other tests run all the same, once. What a test has started ends with
    its process, an example that does not end is not tried again, and a bad import stops no other file."""
    started = planted.folder / "started"
    for name, does in {**MIDDLE, "starts": STARTS.format(started=str(started))}.items():
        planted.plant(
            name,
            "def test_first() -> None: pass\n"
            f"def test_planted() -> None:\n{body(does)}\n"
            "def test_last() -> None: pass\n",
        )
    planted.plant("example", EXAMPLE)
    planted.plant("import", f"{textwrap.dedent(HANGS)}\ndef test_never() -> None: pass\n")
    code, output = planted.make_test(workers=3)
    assert code != 0
    found, middle = counts(output), len(MIDDLE) + 1
    assert (found["failed"], found["passed"]) == (middle + 1, 2 + 2 * middle), output
    for name in MIDDLE:
        assert re.search(rf"^FAILED .*test_{name}.py::test_planted", output, re.MULTILINE), output
        if name != "exits":
            assert re.search(rf'test_{name}.py", line \d+|test_{name}.py:\d+', output), output
    left = Path("/proc", started.read_text())
    wait_until("the end of what a test has started", lambda: not left.exists())
    assert "this example took 0.5 s of processor time: () {'number': 3}" in output
    assert re.search(r"^ERROR .*test_import.py", output, re.MULTILINE), output


def test_two_hangs_in_files_of_one_test_and_the_last_ones(planted: Planted) -> None:
    """With one process, which was given its last test when the one before ended it."""
    for name in ("a", "z"):
        planted.plant(name, f"def test_planted() -> None:\n{body(HOLDS_THE_GIL)}\n")
    code, output = planted.make_test(workers=1)
    assert code != 0
    assert counts(output) == {"failed": 2, "passed": 2}, output


@pytest.mark.parametrize("does", [HANGS, HOLDS_THE_GIL], ids=["hangs", "holds-the-gil"])
def test_fixtures_that_hang(does: str, planted: Planted) -> None:
    places = [(scope, when) for scope in ("function", "session") for when in ("before", "after")]
    for scope, when in places:
        first, last = (does, "pass") if when == "before" else ("pass", does)
        planted.plant(
            f"{scope}_{when}",
            f"@pytest.fixture(scope={scope!r})\ndef resource():\n{body(first)}\n    yield\n{body(last)}\n"
            "def test_with(resource: None) -> None: pass\ndef test_without() -> None: pass\n",
        )
    code, output = planted.make_test()
    assert code != 0
    # A resource of the session that hangs when it is released makes the last test fail that has run by then.
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    assert len(set(named)) >= len(places), output
    assert {f"tests/unit/test_{scope}_{when}.py::test_with" for scope, when in places[:3]} <= {*named}, output
    assert counts(output)["passed"] >= 2 + len(places) - 1, output


def test_an_import_that_no_signal_ends(planted: Planted) -> None:
    planted.plant("import", f"{HOLDS_THE_GIL}\ndef test_never() -> None: pass\n")
    code, output = planted.make_test()
    assert code != 0
    assert "test_import.py" in output


@pytest.mark.parametrize("does", [HOLDS_THE_GIL, EXITS], ids=["holds-the-gil", "exits"])
def test_a_session_that_does_not_end(does: str, planted: Planted) -> None:
    conftest = planted.folder / "tests" / "unit" / "conftest.py"
    conftest.write_text(
        f"{HEAD}def pytest_sessionfinish(session):\n"
        f"    if not hasattr(session.config, 'workerinput'): return\n{body(does)}\n"
    )
    code, output = planted.make_test()
    assert code != 0
    assert "ended before they were done: gw" in output
    if does is not EXITS:
        assert "pytest_sessionfinish" in output


def test_the_parts_have_a_limit_as_the_last_resort(planted: Planted) -> None:
    """As when the process that divides the tests stands still itself; the next part begins all the same."""
    with (planted.folder / "tests" / "conftest.py").open("a") as conftest:
        conftest.write(
            "\ndef pytest_sessionstart(session):\n    import time\n"
            "    if session.config.getoption('--part') == 'beside': time.sleep(3600)\n"
        )
    code, output = planted.make_test(limit="30")
    assert code != 0
    assert "pytest_sessionstart" in output


def test_all_passes_where_nothing_is_planted(planted: Planted) -> None:
    code, output = planted.make_test()
    assert (code, counts(output)) == (0, {"passed": 2}), output
