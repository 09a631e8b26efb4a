"""`jurymast checkpoints`: what people see of a run's checkpoints, and what they do with them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import jurymast
from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.cli.main import main
from jurymast.cluster import planning
from jurymast.rundir import RunDirectory
from support.checkpoints import flip, same, truncate
from support.outputs import checked
from support.stories import Story

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with three checkpoints."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.save_plan(Story().plan)
    run.attempt_file.write_text("3\n")
    state: dict[str, Any] = {"model": {"weight": torch.zeros(5, 2)}, "plan": {1: "odd"}, "epoch": 0}
    checkpoint = jurymast.Checkpointer(state, directory=run.checkpoints, keep=9)
    for step in (1, 2, 3):
        state["model"]["weight"].fill_(float(step))
        state["epoch"] = step
        checkpoint.save(step)
    return run


class Shell:
    """Calls the command in this process."""

    def __init__(self, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
        self._run = run
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        found = main(["checkpoints", str(self._run.root), *words])
        said = self._capsys.readouterr()
        assert found == code, said.out + said.err
        return said.err if code and not said.out else said.out

    def json(self, *words: str, code: int = 0) -> Any:
        return checked(json.loads(self(*words, "--json", code=code)), "checkpoints", "last", *words)


@pytest.fixture
def shell(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(run, capsys)


def test_the_list_says_what_can_be_restored(run: RunDirectory, shell: Shell) -> None:
    truncate(run.checkpoints / "step-00000002" / "__0_0.distcp")
    shell("pin", "1")
    lines = shell().splitlines()
    assert lines[0].split() == ["STEP", "SAVED", "SIZE", "RANKS", "WHERE", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1"]
    assert lines[1].endswith("1  shared  complete, not verified")
    assert "__0_0.distcp has " in lines[2]
    assert lines[3].endswith("complete, not verified, pinned")
    rows = shell.json()["checkpoints"]
    assert [(row["step"], row["complete"], row["pinned"], row["world_size"]) for row in rows] == [
        (3, True, False, 1),
        (2, False, False, 1),
        (1, True, True, 1),
    ]


def test_verify_reads_everything(run: RunDirectory, shell: Shell) -> None:
    assert shell("verify") == "step 3: good\nstep 2: good\nstep 1: good\n"
    assert "complete, verified " in shell("ls")
    flip(run.checkpoints / "step-00000002" / "__0_0.distcp")
    assert shell("verify", "3") == "step 3: good\n"
    assert "step 2: __0_0.distcp is corrupt: its hash does not match" in shell("verify", code=78)
    found = shell.json("verify", "2", code=78)["checkpoints"]
    assert found == [{"step": 2, "problems": ["__0_0.distcp is corrupt: its hash does not match"]}]
    assert "there is no checkpoint of step 9" in shell("verify", "9", code=78)


def test_what_verify_found_is_remembered(run: RunDirectory, shell: Shell) -> None:
    shell("verify")
    file = run.checkpoints / "step-00000002" / "__0_0.distcp"
    flip(file)
    shell("verify", code=78)
    (row,) = [row for row in shell.json()["checkpoints"] if row["step"] == 2]
    assert (row["complete"], row["verified_at"]) == (False, None)
    assert row["problem"] == "__0_0.distcp is corrupt: its hash does not match"
    assert "step 2 is damaged and was not pinned: __0_0.distcp" in shell("pin", "2", code=78)
    assert CheckpointDirectory(run.checkpoints).pinned() == set()
    flip(file)
    assert shell("verify", "2") == "step 2: good\n"
    shell("pin", "2")
    assert shell.json()["checkpoints"][1]["complete"]


def test_rollback(run: RunDirectory, shell: Shell) -> None:
    flip(run.checkpoints / "step-00000002" / "__0_0.distcp")
    assert "step 2 is damaged, so the run was not rolled back" in shell("rollback", "2", code=78)
    assert CheckpointDirectory(run.checkpoints).steps() == [3, 2, 1]
    said = shell("rollback", "1")
    assert "step 1 is now the newest; set aside: step-00000003.rolled-back-" in said
    assert "set aside by a rollback: step-00000002.rolled-back-" in shell()
    weight = torch.zeros(5, 2)
    assert jurymast.Checkpointer({"model": {"weight": weight}}, directory=run.checkpoints).restore() == 1
    record = json.loads((run.checkpoints / "rollback.json").read_text())["rollbacks"]
    assert [(one["step"], one["attempt"]) for one in record] == [(1, 3)]
    shell("rollback", "1", "--delete")
    assert "set aside" not in shell()


def test_export(run: RunDirectory, shell: Shell, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert shell("export", "2", str(target)) == f"{target}/step-00000002.pt\n"
    found = torch.load(target / "step-00000002.pt", weights_only=True)
    wanted = {"model": {"weight": torch.full((5, 2), 2.0)}, "plan": {1: "odd"}, "epoch": 2}
    assert same({key: found[key] for key in wanted}, wanted)
    assert "already exists" in shell("export", "2", str(target), code=78)
    assert os.listdir(target) == ["step-00000002.pt"]
    flip(run.checkpoints / "step-00000003" / "__0_0.distcp")
    assert "step 3 is damaged" in shell("export", "3", str(target), code=78)


def test_an_export_without_torch_is_not_the_checkpoints_fault(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    assert "No module named 'torch' for" in shell("export", "2", str(tmp_path / "out"), code=66)
    assert not (tmp_path / "out").exists()


def test_an_export_from_which_a_new_run_goes_on(run: RunDirectory, shell: Shell, tmp_path: Path) -> None:
    """As `jurymast resubmit` and the page for who is on call say."""
    target = tmp_path / "next"
    words = ("export", "2", str(target), "--format", "directory")
    assert shell(*words) == f"{target}/step-00000002\n"
    weight = torch.zeros(5, 2)
    assert jurymast.Checkpointer({"model": {"weight": weight}}, directory=target).restore() == 2
    assert same(weight, torch.full((5, 2), 2.0))
    assert "already exists" in shell(*words, code=78)
    flip(run.checkpoints / "step-00000003" / "__0_0.distcp")
    text = shell("export", "3", str(target), "--format", "directory", code=78)
    assert "step 3 is damaged: __0_0.distcp is corrupt" in text
    assert [name for name in os.listdir(target) if "-0" in name] == ["step-00000002"], "nothing half-written"
    assert shell.json("export", "1", str(target), "--format", "directory")["step"] == 1


def test_export_of_tensors_alone(shell: Shell, tmp_path: Path) -> None:
    if importlib.util.find_spec("safetensors") is None:
        text = shell("export", "2", str(tmp_path), "--format", "safetensors", code=78)
        assert "pip install safetensors" in text
        return
    text = shell("export", "2", str(tmp_path), "--format", "safetensors")
    assert "left out 2 values that are not tensors: this format has no place for them" in text
    found = importlib.import_module("safetensors.torch").load_file(tmp_path / "step-00000002.safetensors")
    assert same(found, {"model.weight": torch.full((5, 2), 2.0)})


def test_an_object_store(run: RunDirectory, shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    from jurymast.storage.object_store import ObjectStore
    from jurymast.storage.orders import Job

    url = f"file://{tmp_path}/store"
    store = ObjectStore(url, run.root.name, run.secret())
    directory = CheckpointDirectory(run.checkpoints)
    store.upload(directory, 2, Job(60.0))
    assert [row["where"] for row in shell.json("--object", url)["checkpoints"]] == [
        ["shared"],
        ["shared", "object"],
        ["shared"],
    ]
    assert "step 2 already exists" in shell("fetch", "2", "--object", url, code=78)
    directory.set_aside(2)
    assert shell("fetch", "2", "--object", url) == f"{run.checkpoints}/step-00000002\n"
    assert shell("verify", "2") == "step 2: good\n"
    assert "no complete checkpoint of step 7" in shell("fetch", "7", "--object", url, code=78)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("lst", "there is no action lst (did you mean ls?)"),
        ("pin", "pin takes STEP, but was given none"),
        ("pin one", "STEP must be a number, not one"),
        ("export 1", "export takes STEP DIR, but was given 1"),
        ("verify 1 2", "verify takes [STEP], but was given 1 2"),
        ("pin 1 --delete", "--delete goes with rollback, not with pin"),
        ("fetch 1", "the policy names no object store"),
    ],
)
def test_mistakes_are_named(shell: Shell, words: str, why: str) -> None:
    assert why in shell(*words.split(), code=64)
    if words == "fetch 1":
        assert "pip install" in shell("ls", "--object", "abfs://x", code=78)
