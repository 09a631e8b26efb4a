"""The code of docs/plugins.md does what the page says, as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.core.state.settings import Exposure
from support.commands import swapped
from support.runs import ROOT

PAGE = (ROOT / "docs" / "plugins.md").read_text()
FILES = dict(re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE))
LOOP = """
import sys, torch
from acme_adapter import CheckpointHook

layer = torch.nn.Linear(2, 2)
hook = CheckpointHook({"layer": layer}, every=1, directory="saved")
first = hook.on_start()
with torch.no_grad():
    for step in range(first, int(sys.argv[1])):
        layer.weight.fill_(step + 1)
        hook.on_step_end(step + 1)
hook.on_end(int(sys.argv[1]))
print(first, layer.weight[0, 0].item())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *command: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), **more}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, input=stdin,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def install(folder: Path, module: str) -> None:
    points = re.findall(r'^\[project\.entry-points\."(.+)"\]\n(.+)$', PAGE, re.MULTILINE)
    ((group, point),) = (found for found in points if f'"{module}:' in found[1])
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{point}\n".replace('"', ""))


def test_each_piece_of_code_is_a_file() -> None:
    assert FILES.keys() == {"acme_probe.py", "acme_adapter.py", "acme_tracker.py", "acme_notify.py"}


@pytest.mark.parametrize("marked", [True, False])
def test_the_probe_is_found_and_reports_a_marked_node(folder: Path, marked: bool) -> None:
    install(folder, "acme_probe")
    mark = folder / "mark"
    if marked:
        mark.write_text("fan 3 is slow\n")
    done = run(folder, "-m", "jurymast", "health", "--probe", "acme", "--json", ACME_MARK=str(mark))
    found = [(one["code"], one["verdict"]) for one in json.loads(done.stdout)["findings"]]
    assert found == ([("acme-marked", "suspect")] if marked else []), done.stdout
    assert done.returncode == (1 if marked else 0)


def test_the_adapter_resumes_where_the_first_process_ended(folder: Path) -> None:
    (folder / "loop.py").write_text(LOOP)
    assert run(folder, "loop.py", "3").stdout == "0 3.0\n"
    assert run(folder, "loop.py", "5").stdout == "3 5.0\n"


def test_the_tracker_writes_what_a_run_did(folder: Path) -> None:
    install(folder, "acme_tracker")
    story = swapped(began_at=time.time())
    metrics = Exposure(trackers=("acme",))
    story.plan = replace(story.plan, settings=replace(story.plan.settings, metrics=metrics))
    directory = story.write(folder / "run")
    done = run(folder, "-m", "jurymast.report.watcher", str(directory.root))
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in (directory.root / "metrics.jsonl").read_text().splitlines()]
    assert (told[0]["step"], told[0]["restarts_total"]) == (60, 1)
    assert [line["event"].partition(" ")[0] for line in told[1:]] == ["incident", "a", "the"]


def test_the_notifier_passes_decisions_on(folder: Path) -> None:
    lines = [
        {"event": "NodeLost", "at": "2026-01-01T00:00:00Z", "text": "node n3 lost"},
        {"decision": "Launch", "at": "2026-01-01T00:00:01Z", "text": "=> launch attempt 2"},
    ]
    done = run(folder, "acme_notify.py", stdin="".join(json.dumps(line) + "\n" for line in lines))
    assert done.stdout == "2026-01-01T00:00:01Z => launch attempt 2\n"
