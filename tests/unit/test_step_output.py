"""Where a step's output goes, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jurymast.core.settings import RunPlan
from jurymast.errors import UsageError
from jurymast.rundir import RunDirectory, write_atomically
from jurymast.script.srun import parse
from jurymast.script.step import Output, relayed
from support.waiting import wait_until


@pytest.fixture
def job(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "20261120-134501-train-x7f3")
    directory.create()
    write_atomically(directory.policy_file, b"")
    directory.save_plan(
        RunPlan(
            run=directory.root.name, name="train", directory=str(directory.root), cluster="slurm", active=2,
            spares=1, ranks_per_node=1, script="job.sbatch", batch=True,
        )
    )  # fmt: skip
    return directory


def test_output_goes_where_srun_was_told(tmp_path: Path) -> None:
    (tmp_path / "old-1").write_text("from before\n")
    srun = parse(["-l", "-o", f"{tmp_path}/old-%t", "x"])
    assert srun is not None
    output = Output(srun, {})
    assert output.common == 1
    output.write(1, b"a\nb\n")
    output.write(0, b"c\n")
    output.close()
    assert (tmp_path / "old-1").read_text() == "1: a\n1: b\n"
    assert (tmp_path / "old-0").read_text() == "0: c\n"
    srun = parse(["--open-mode=append", "--output", f"{tmp_path}/old-1", "x"])
    assert srun is not None
    output = Output(srun, {})
    os.write(output.common, b"command\n")
    output.write(3, b"d\n")
    output.close()
    assert (tmp_path / "old-1").read_text() == "1: a\n1: b\ncommand\nd\n"


@pytest.mark.parametrize("option", ["-o", "-e"])
def test_a_missing_folder_of_sruns_files_is_an_error_that_names_it(tmp_path: Path, option: str) -> None:
    srun = parse([option, f"{tmp_path}/none/out-%t", "x"])
    assert srun is not None
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path}/none"):
        Output(srun, {})


def test_a_progress_bar_is_relayed_while_it_runs(tmp_path: Path, job: RunDirectory) -> None:
    log = job.rank_log(1, 0)
    log.parent.mkdir(parents=True)
    job.attempt_file.write_text("1")
    srun = parse(["-l", "-o", f"{tmp_path}/out", "x"])
    assert srun is not None
    output, out = Output(srun, {}), tmp_path / "out"
    with relayed(job, output, after=0):
        log.write_bytes(b"begun\n\r 10%")
        wait_until("the bar", lambda: out.exists() and out.read_bytes() == b"0: begun\n0: \r 10%")
        with log.open("ab") as file:
            file.write(b"\r 20%\nnot yet whole")
        wait_until("its next state", lambda: out.read_bytes() == b"0: begun\n0: \r 10%\r 20%\n")
    output.close()
    assert out.read_bytes() == b"0: begun\n0: \r 10%\r 20%\n0: not yet whole\n"
