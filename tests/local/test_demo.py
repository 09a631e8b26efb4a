"""`jurymast demo`: it loses a node and nothing else, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jurymast.demo import ASCII_BLOCKS, LossCurve, blocks
from jurymast.rundir import RunDirectory
from support.outputs import checked
from support.packages import installed
from support.waiting import wait_until

LIMIT_S = 300.0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: sockets below it may have 108 characters."""
    path = Path(tempfile.mkdtemp(prefix="jm"))
    yield path
    shutil.rmtree(path)


def demo(temporary: Path, *options: str, python: str = sys.executable) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-m", "jurymast", "demo", "--json", "--nodes", "2", *options],
        env={**os.environ, "TMPDIR": str(temporary)}, cwd=temporary, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # What a shell runs in the background ignores Ctrl-C, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finished(temporary: Path, *options: str, python: str) -> dict[str, Any]:
    with demo(temporary, *options, python=python) as process:
        out, story = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, story
    values: dict[str, Any] = checked(json.loads(out), "demo")
    return values


def left_over(temporary: Path) -> list[list[str]]:
    """Commands of processes that work below the directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            below = str(temporary) in process.environ().get("TMPDIR", "") or str(temporary) in " ".join(words)
        except psutil.Error:
            continue
        if below:
            found.append(words)
    return found


SHARED = (
    "man/man1/jurymast-submit.1", "jurymast/configs/site.yaml", "jurymast/site/healthcheck",
    "bash-completion/completions/jurymast", "zsh/site-functions/_jurymast",
    "fish/vendor_completions.d/jurymast.fish",
)  # fmt: skip


@pytest.mark.torch
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_demo_loses_a_rank_and_a_node_and_nothing_else(temporary: Path, tmp_path: Path) -> None:
    """Where the package that we publish is installed, with all that a site finds beside it."""
    python = str(installed(tmp_path))
    share = Path(python).parents[1] / "share"
    assert {*SHARED} <= {str(file.relative_to(share)) for file in share.rglob("*")}
    asked = [python, "-m", "jurymast", "doctor", "--install", "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "JURYMAST_SITE": ""})
    found = {check["check"]: check["answer"] for check in json.loads(done.stdout)["checks"]}
    assert {name for name, answer in found.items() if answer != "yes"} <= {
        "site policy",
        "readable by all",
    }, done.stdout
    told = finished(temporary, "--steps", "45", python=python)
    assert (told["state"], told["complete"], told["steps_done"]) == ("succeeded", True, 45)
    assert [incident["action"] for incident in told["incidents"]] == ["in process", "swap"]
    assert [one["node"] for one in told["incidents"]] == [told["rank_fault"]["node"], told["fault"]["node"]]
    assert told["fault"]["processes"] >= 4  # an agent, its torchrun host, the server it forks from, a rank
    for one in told["incidents"]:  # it says so if the fault struck between two ranks' updates
        amid = "failed before the end of step" in one["reason"]
        assert amid or one["step_restored"] >= one["step_lost_from"], one["reason"]
    assert told["steps_repeated"] == told["steps_repeated_equal"]
    page = Path(told["report"])
    assert "</html>" in page.read_text()
    assert left_over(temporary) == []
    assert list(temporary.iterdir()) == [page.parent]
    assert list(page.parent.iterdir()) == [page]
    undisturbed = finished(temporary, "--steps", "45", "--no-fault", "--keep", python=python)
    assert undisturbed["incidents"] == []
    assert undisturbed["weights_sha256"] == told["weights_sha256"]
    directory = Path(undisturbed["directory"])
    assert directory.parent == temporary / "runs"
    assert (directory / "journal").is_dir()
    assert Path(undisturbed["report"]).parent == directory / "report"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminate"]
)
def test_an_interrupted_demo_leaves_nothing(temporary: Path, number: signal.Signals, code: int) -> None:
    with demo(temporary) as process:
        wait_until(
            "rank of the demo", lambda: any("train_gpt.py" in " ".join(w) for w in left_over(temporary))
        )
        process.send_signal(number)
        _, story = process.communicate(timeout=60)
    assert process.returncode == code, story
    assert left_over(temporary) == []
    assert list(temporary.iterdir()) == []


def test_values_as_blocks() -> None:
    assert blocks([1.0, 2.0, 3.0], 10, "abc") == "abc"
    assert blocks([float(n) for n in range(100)], 8, ASCII_BLOCKS) == ASCII_BLOCKS
    assert blocks([5.0, 5.0], 2, "abc") == "aa"
    assert blocks([1.0, float("nan"), 3.0], 3, "abc") == "ac"
    assert blocks([], 3) == ""


def test_losses_of_two_attempts(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    logs = {
        1: "0.8 million parameters\nstep 1 loss 5.00 9 tokens/s\nstep 2 loss 4.00 9 tokens/s\nstep 3 lo",
        2: "step 2 loss 4.00 9 tokens/s\nstep 3 loss 3.50 9 tokens/s\nweights sha256 " + "ab" * 32 + "\n",
    }
    curve = LossCurve(directory)
    for attempt, text in logs.items():
        directory.rank_log(attempt, 0).parent.mkdir(parents=True)
        directory.rank_log(attempt, 0).write_text(text)
        curve.poll(attempt)
    assert curve.final() == {1: "5.00", 2: "4.00", 3: "3.50"}
    assert curve.repeated() == [(2, "4.00", "4.00")]
    assert (curve.last, curve.weights) == ((3, "3.50"), "ab" * 32)
