"""Where a step's output goes, and when."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jurymast.core.state.settings import RunPlan
from jurymast.rundir import RunDirectory, write_atomically
from jurymast.script import output as output_module
from jurymast.script.output import NUMBER_FILE, READ_BYTES, CannotOpen, Output, expanded, relayed
from jurymast.script.srun import parse
from jurymast.script.step import node_command
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


def output_of(*options: str, environment: Mapping[str, str] | None = None, **more: Any) -> Output:
    srun = parse([*options, "x"])
    assert srun is not None
    return Output(srun, environment or {}, **more)


def test_output_goes_where_srun_was_told(tmp_path: Path) -> None:
    (tmp_path / "old-1").write_text("from before\n")
    output = output_of("-l", "-o", f"{tmp_path}/old-%t", nodes=("n1", "n2"))
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


def test_each_of_two_files_is_looked_for_in_its_own_folder(tmp_path: Path) -> None:
    for here, missing in (("-e", "-o"), ("-o", "-e")):
        with pytest.raises(CannotOpen, match="there is no folder"):
            output_of(here, f"{tmp_path}/x", missing, f"{tmp_path}/missing/%t")


@pytest.mark.parametrize("option", ["-o", "-e"])
def test_a_missing_folder_of_sruns_files_is_an_error_that_names_it(tmp_path: Path, option: str) -> None:
    srun = parse([option, f"{tmp_path}/none/out-%t", "x"])
    assert srun is not None
    with pytest.raises(CannotOpen, match=f"there is no folder {tmp_path}/none"):
        Output(srun, {})


def test_missing_folders_are_made_where_srun_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm 24.11 and 26.05 do, with these permissions."""
    monkeypatch.setattr(output_module, "release", lambda: (24, 11, 5))
    output = output_of("-o", f"{tmp_path}/a/b/%t/out", "-e", f"{tmp_path}/c/err", nodes=("n1", "n2"))
    for rank in range(2):
        output.write(rank, b"a\n")
    output.write(0, b"b\n", error=True)
    output.close()
    assert (tmp_path / "a/b/1/out").read_text() == "a\n"
    assert (tmp_path / "c/err").read_text() == "b\n"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a/b/1")} == {0o755}
    with pytest.raises(CannotOpen, match="there is no folder .*/c/err/under|no folder .*: Not a directory"):
        output_of("-o", f"{tmp_path}/c/err/under/x")


def test_a_file_that_cannot_be_written_is_an_error_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(CannotOpen, match="could not open stdout file .*: Is a directory"):
        assert output_of("-o", str(tmp_path)).common


@contextmanager
def standard_streams(folder: Path, *, together: bool = False) -> Iterator[Path]:
    """The standard output goes to the file `1` in this folder, and stderr to `2`, or there as well."""
    folder.mkdir()
    before = [os.dup(1), os.dup(2)]
    try:
        for number, name in ((1, "1"), (2, "1" if together else "2")):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        yield folder
    finally:
        for number, descriptor in enumerate(before, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


# What srun made of them: job 102, step 3, task 1 of its node n2; task 13 of an array.
NAMES = [
    ("%u-%x-%A-%s-%J-%n-%N", "me-my job-102-3-102.3-1-n2"),
    ("%3t-%3n-%15t", "001-001-0000000001"),
    ("%20j-%3s-%9J-%5x-%4N", "0000000102-003-000000102.3-my job-n2"),
    ("%%-%5j-%-%x", "%-00102-%-my job"),
    ("back\\%j", "back%j"),
    ("back\\%t-%t", "back%t-%t"),
    ("%q", "%q"),
    ("plain", "plain"),
]
IN_AN_ARRAY = {"SLURM_ARRAY_TASK_ID": "13"}
# Of these fields, what srun 22.05, 24.11 and 26.05 made.
NAMES_BY_RELEASE = [
    ("%a", {}, "4294967294", "4294967294", "0"),
    ("%3a", {}, "4294967294", "4294967294", "000"),
    ("%b-%3b", {}, "%b-3b", "4-004", "0-000"),
    ("%12a-%b-%3b", IN_AN_ARRAY, "0000000013-%b-3b", "0000000013-3-003", "0000000013-3-003"),
    ("%r-%3r-%S-%5S", {}, "%r-3r-%S-5S", "%r-3r-%S-5S", "0-000-s8ANM8QKR1ZP00-s8ANM8QKR1ZP00"),
    ("%r", {"SLURM_RESTART_COUNT": "2"}, "%r", "%r", "2"),
    ("%2m-%5%-%5-", {}, "2m-5%-5-", "2m-5%-5-", "%2m-%5%-%5-"),
    ("%x%", {}, "my job%", "my job%", "my job"),
]
RELEASES = [(22, 5, 8), (24, 11, 5), (26, 5, 1)]
OF_THE_STEP = {
    "SLURM_JOB_ID": "102", "SLURM_STEP_ID": "3", "SLURM_JOB_NAME": "my job", "USER": "me",
    "SLURM_JOB_SLUID": "s8ANM8QKR1ZP00",
}  # fmt: skip


@pytest.mark.parametrize("installed", RELEASES, ids=str)
@pytest.mark.parametrize(("pattern", "name"), NAMES)
def test_names_of_files_are_sruns(
    pattern: str, name: str, installed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "release", lambda: installed)
    assert expanded(pattern, OF_THE_STEP, 1, 1, "n2") == name


@pytest.mark.parametrize(("pattern", "more", "old", "middle", "new"), NAMES_BY_RELEASE)
def test_names_of_files_are_those_of_the_installed_srun(
    pattern: str, more: dict[str, str], old: str, middle: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for installed in RELEASES:
        monkeypatch.setattr(output_module, "release", lambda installed=installed: installed)
        found.append(expanded(pattern, {**OF_THE_STEP, **more}, 1, 1, "n2"))
    assert found == [old, middle, new]


def test_a_name_with_the_steps_number_waits_for_it(tmp_path: Path) -> None:
    output = output_of("-o", f"{tmp_path}/%J", environment={"SLURM_JOB_ID": "102"}, folder=tmp_path)
    assert output.common == 1
    (tmp_path / NUMBER_FILE).write_text("3\n")
    output.write(0, b"a\n")
    output.close()
    assert (tmp_path / "102.3").read_text() == "a\n"


def test_files_and_labels_are_the_tasks(tmp_path: Path, job: RunDirectory) -> None:
    """Two ranks of one torchrun are one task; a step's part has one task, of its own."""
    job.save_plan(replace(job.own_plan(), ranks_per_node=2))
    job.attempt_file.write_text("1")
    for rank in range(4):
        log = job.rank_log(1, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"rank {rank}\n")
    output = output_of("-l", "-o", f"{tmp_path}/%t-%n-%N", nodes=("n1", "n2"))
    with relayed(job, output, after=0):
        pass
    assert (tmp_path / "0-0-n1").read_text() == "0: rank 0\n0: rank 1\n"
    assert (tmp_path / "1-1-n2").read_text() == "1: rank 2\n1: rank 3\n"
    tasks = output_of("-l", "-o", f"{tmp_path}/each-%t-%n-%N", nodes=("n1", "n2"), tasks=2)
    part = output_of("-o", f"{tmp_path}/part-%t-%n-%N", nodes=("n2",))
    with relayed(job, tasks, after=0), relayed(job, part, after=0, place=1):
        pass
    assert (tmp_path / "each-3-1-n2").read_text() == "3: rank 3\n"
    assert (tmp_path / "part-0-0-n2").read_text() == "rank 2\nrank 3\n"


def test_tasks_that_print_nothing_have_their_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output_of("-o", "o-%t", "-e", "e-%t", tasks=2, nodes=("n1",)).own_files()
    assert sorted(path.name for path in tmp_path.glob("?-*")) == ["e-0", "e-1", "o-0", "o-1"]


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (["-o", "o", "-e", "e"], {"o": "0: out\n1: out\n", "e": "0: err\n1: err\n"}),
        (["-o", "o", "-e", "e-%t"], {"o": "0: out\n1: out\n", "e-0": "0: err\n", "e-1": "1: err\n"}),
        (["-e", "e-%n-%N"], {"1": "0: out\n1: out\n", "e-0-n1": "0: err\n", "e-1-n2": "1: err\n"}),
        ([], {"1": "0: out\n1: out\n", "2": "0: err\n1: err\n"}),
        (["-o", "all"], {"1": "0: out\n1: out\n", "2": "0: err\n1: err\n"}),
        (["-o", "none"], {}),
        (["-e", "none"], {"1": "0: out\n1: out\n"}),
        (["-e", "1"], {"1": "0: out\n1: out\n", "2": "1: err\n"}),
        # In one log, so in the order in which it was printed: see below.
        (["-o", "o"], {"o": "0: out\n1: out\n"}),
        (["-o", "o-%t"], {"o-0": "0: out\n", "o-1": "1: out\n"}),
        (["-o", "1"], {"1": "1: out\n"}),
        (["-o", "o", "-e", "o"], {"o": "0: out\n1: out\n"}),
    ],
    ids=" ".join,
)
def test_where_stderr_goes(
    options: list[str], files: dict[str, str], job: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As srun 22.05 has it. What ranks print to stderr is in their own log only if it goes elsewhere."""
    monkeypatch.chdir(job.root)
    job.attempt_file.write_text("1")
    with standard_streams(Path("streams")) as streams:
        output = output_of("-l", *options, nodes=("n1", "n2"))
        apart = output.stderr_apart
        job.save_plan(replace(job.own_plan(), stderr_apart=apart))
        for rank in range(2):
            job.rank_log(1, rank).parent.mkdir(parents=True, exist_ok=True)
            job.rank_log(1, rank).write_text("out\n")
            job.rank_errors(1, rank).write_text("err\n")
        with relayed(job, output, after=0):
            pass
        output.close()
    assert apart is any("err" in text for text in files.values()) or options == ["-e", "none"]
    written = [path for path in (*streams.iterdir(), *job.root.glob("[oe]*")) if path.is_file()]
    assert {path.name: text for path in written if (text := path.read_text())} == files


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], []),
        (["-o", "o"], ["--error=o"]),
        (["-o", "o-%j"], ["--error=o-%j"]),
        (["-o", "1"], ["--error=1"]),
        (["-o", "o", "-e", "e"], []),
        (["-o", "o-%t"], []),
    ],
    ids=str,
)
def test_stderr_of_the_steps_command_follows_its_stdout(
    options: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun is told, because its own stdout goes where we have opened the file."""
    monkeypatch.chdir(tmp_path)
    assert output_of(*options, nodes=("n1", "n2")).srun_options == told


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (["-o", "o-%t"], {"o-0": "out 0\nerr 0\nrank\n", "o-1": "out 1\nerr 1\n"}),
        (["-o", "o-%N", "-e", "e %n"],
         {"o-a": "out 0\nrank\n", "o-b": "out 1\n", "e 0": "err 0\n", "e 1": "err 1\n"}),
        (["-e", "e-%n", "--open-mode=append"], {"e-0": "old\nerr 0\n", "e-1": "err 1\n"}),
        (["-o", "o"], {"o": "rank\n"}), (["-o", "o-%t-%s"], {"o-0-": "rank\n"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_steps_command_itself_prints_goes_to_the_file_of_its_task(
    options: list[str], files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are begun before the step, even if nobody prints; a spare node has none."""
    job, step = RunDirectory(tmp_path / "run"), tmp_path / "step"
    for folder in (step, tmp_path / "there"):
        folder.mkdir()
    monkeypatch.chdir(tmp_path / "there")
    if "--open-mode=append" in options:
        Path("e-0").write_text("old\n")
    output = output_of(*options, nodes=("a", "b"))
    text = node_command(job, step, {}, 2, tmp_path / "spares", {}, files=output.own_files())
    (step / "node").write_text(text)
    command = ["sh", str(step / "node"), "sh", "-c", "echo out $SLURM_NODEID; echo err $SLURM_NODEID >&2"]
    for number in range(3):
        environment = {
            "SLURM_NODEID": str(number),
            "SLURMD_NODENAME": f"n{number}",
            "PATH": os.environ["PATH"],
        }
        subprocess.run(command, env=environment, cwd="/", check=True, timeout=60)
    output.write(0, b"rank\n")
    output.close()
    assert {path.name: path.read_text() for path in Path().iterdir()} == files
    assert (tmp_path / "spares").read_text() == "out 2\nerr 2\n"


def test_a_last_line_without_an_end_gets_none(job: RunDirectory, tmp_path: Path) -> None:
    """But the next attempt begins on a line of its own, and srun ends lines that it labels."""
    for attempt, text in enumerate(("begun", "a\nb", "x" * (READ_BYTES + 9)), 1):
        job.rank_log(attempt, 0).parent.mkdir(parents=True, exist_ok=True)
        job.rank_log(attempt, 0).write_text(text)
    job.attempt_file.write_text("3")
    for option, ends in (("-Q", ""), ("-l", "\n")):
        output = output_of(option, "-o", f"{tmp_path}/out{option}")
        with relayed(job, output, after=0):
            pass
        output.close()
        text = (tmp_path / f"out{option}").read_text().replace("0: ", "")
        assert text == f"begun\na\nb\n{'x' * (READ_BYTES + 9)}{ends}"


def test_a_file_that_srun_has_begun_for_both_is_not_begun_again(tmp_path: Path) -> None:
    output = output_of("-o", f"{tmp_path}/o-%J")  # whose name only srun knows at first
    (tmp_path / "o-.").write_text("a shell's warning\n")
    output.srun_opens_errors()
    output.write(0, b"a\n")
    output.close()
    assert (tmp_path / "o-.").read_text() == "a shell's warning\na\n"


def test_streams_of_one_file_are_not_apart(tmp_path: Path) -> None:
    with standard_streams(tmp_path / "streams", together=True):
        assert not output_of().stderr_apart


def test_a_file_that_srun_has_begun_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("a launcher's warning\n")
    output = output_of("-e", f"{tmp_path}/e")
    output.srun_opens_errors()
    output.write(0, b"a\n", error=True)
    output.close()
    assert (tmp_path / "e").read_text() == "a launcher's warning\na\n"


def test_more_than_64_ranks_have_their_files(tmp_path: Path, job: RunDirectory) -> None:
    job.save_plan(replace(job.own_plan(), ranks_per_node=40))
    job.attempt_file.write_text("1")
    for rank in range(80):
        job.rank_log(1, rank).parent.mkdir(parents=True, exist_ok=True)
        job.rank_log(1, rank).write_text(f"rank {rank}\n")
    output = output_of("-o", f"{tmp_path}/o-%4t", nodes=("n1", "n2"), tasks=40)
    with relayed(job, output, after=0):
        pass
    assert (tmp_path / "o-0079").read_text() == "rank 79\n"
    assert len([*tmp_path.glob("o-*")]) == 80


def test_labels_are_as_wide_as_the_last_tasks() -> None:
    read, write = os.pipe()
    before = os.dup(1)
    os.dup2(write, 1)
    try:
        output = output_of(nodes=("n1", "n2"), tasks=6, environment={"SLURM_LABELIO": "1"})
        output.write(6, b"a\n")
        output.write(11, b"b\n")
    finally:
        os.dup2(before, 1)
        os.close(write)
    assert os.read(read, 100) == b" 6: a\n11: b\n"
    os.close(before)
    os.close(read)


@pytest.mark.parametrize(
    ("said", "told"),
    [("1", "b\n"), ("all", "a\nb\n"), ("-", "a\nb\n"), ("NONE", ""), ("allreduce.log", "a\nb\n")],
)
def test_words_that_are_no_files(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = output_of("-o", said, nodes=("n1", "n2"))
    output.write(0, b"a\n")
    output.write(1, b"b\n")
    output.close()
    assert capfd.readouterr().out == told
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_unbuffered_output_waits_for_no_line_end(tmp_path: Path, job: RunDirectory) -> None:
    log = job.rank_log(1, 0)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"Loading...")
    job.attempt_file.write_text("1")
    output, out = output_of("-u", "-o", f"{tmp_path}/out"), tmp_path / "out"
    with relayed(job, output, after=0):
        wait_until("the beginning of a line", lambda: out.exists() and out.read_bytes() == b"Loading...")
    output.close()


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
