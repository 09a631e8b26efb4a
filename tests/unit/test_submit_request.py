"""From command line to request: plan, batch script (golden files), run directory, partitions."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast import foreign
from jurymast.cluster.allocation import local_process, submit_local
from jurymast.cluster.planning import WARN_SIGNAL, OwnOptions, make_plan, new_run_id, time_limit_s
from jurymast.cluster.sbatch import BatchScript, split_command_line
from jurymast.cluster.sbatch_command import accepted
from jurymast.cluster.slurm import (
    Request,
    build_request,
    check_fits,
    check_runs_directory,
    parse_partitions,
    render_script,
    script_around,
    submit_slurm,
    write_run_directory,
)
from jurymast.core.state.settings import RunPlan
from jurymast.errors import JurymastError, RunDirectoryError, ScriptError, SubmissionError, UsageError
from jurymast.policy.resolve import pairs_layer, resolve
from jurymast.rundir import RunDirectory

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
RUNS = Path("/shared/team runs")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hi')\n")
    return path


def plan(
    script: Path,
    *words: str,
    nodes: int = 4,
    spares: int | str = 1,
    environment: dict[str, str] | None = None,
    runs: Path = RUNS,
    cluster: str = "slurm",
    name: str = "",
    behind: tuple[str, ...] = (),
) -> RunPlan:
    line = split_command_line([*words, "--", *(behind or (script.name, "--lr", "1"))], {})
    return make_plan(
        OwnOptions(nodes=nodes, runs=runs, cluster=cluster, name=name),
        line,
        resolve([pairs_layer("command line", [("spares", spares)])]),
        environment=environment or {},
        working_directory=script.parent,
        python="/opt/py thon/bin/python3",
        run="20261120-134501-train-x7f3",
    )


CASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "plain": ((), {}),
    "passed-through": (
        ("-p", "gpu", "--gres=gpu:h100:8", "--time", "2-00:00:00", "--signal=B:USR1@300", "-o", "my %j.log"),
        {},
    ),
    "exclusions-merged": (("-x", "n[1-3,7],n9", "--qos=high", "--exclude=m2"), {}),
    "array": (("--array=0-3%2",), {}),
    "never-requeued": (("--no-requeue", "--no-kill", "--ntasks-per-node=1"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rendered_request(script: Path, case: str) -> None:
    words, environment = CASES[case]
    request = build_request(plan(script, *words, environment=environment), resolve([]))
    text = f"{shlex.join(request.argv)}\n---\n{request.script}"
    golden = GOLDEN / f"sbatch-{case}.txt"
    if os.environ.get("JURYMAST_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("batch", [False, True])
def test_a_warning_before_python_has_started_does_not_end_the_job(
    script: Path, tmp_path: Path, batch: bool
) -> None:
    """Slurm sends it at once where the time limit is nearer than the warning."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -USR2 $$\necho goes on\n")
    python.chmod(0o700)
    given = replace(plan(script, runs=tmp_path), python=str(python))
    if batch:
        given = replace(given, sbatch_options=(f"--signal={WARN_SIGNAL}",))
        text = script_around(given, BatchScript("job.sh", "#!/bin/sh\n"))
    else:
        RunDirectory(given.directory).submission.mkdir(parents=True)
        text = render_script(given)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


@pytest.mark.parametrize(
    ("typed", "environment", "options", "in_the_file"),
    [
        ([], {}, (), True),
        (["--signal=USR1@60"], {}, ("--signal=USR1@60",), False),
        (["--signal", "USR1@60"], {}, ("--signal", "USR1@60"), False),
        ([], {"SBATCH_SIGNAL": "USR1@60"}, ("--signal=USR1@60",), False),
        (["--signal=B:TERM@60"], {"SBATCH_SIGNAL": "USR1@60"}, ("--signal=B:TERM@60",), False),
    ],
)
def test_who_asks_for_a_signal_gets_that_one_alone(
    script: Path, typed: list[str], environment: dict[str, str], options: tuple[str, ...], in_the_file: bool
) -> None:
    """sbatch keeps the `B:` of one that it has read before."""
    made = plan(script, *typed, environment=environment)
    assert made.sbatch_options == options
    assert ("#SBATCH --signal=" in render_script(made)) is in_the_file


def test_the_plan(script: Path) -> None:
    made = plan(
        script, "--gres=gpu:8", "-J", "GPT 5!", "-D", "sub", "-x", "n[1,2],n9", spares="auto", nodes=40
    )
    assert (made.active, made.spares, made.nodes, made.ranks_per_node) == (40, 1, 41, 8)
    assert made.name == "GPT-5"
    assert made.script == str(script)
    assert made.arguments == ("--lr", "1")
    assert made.working_directory == str(script.parent / "sub")
    assert made.exclude == ("n[1,2]", "n9")
    assert made.requeue
    assert made.directory == str(RUNS / made.run)
    assert RunPlan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("words", "environment", "requeue"),
    [
        ((), {}, True),
        (("--no-requeue",), {}, False),
        ((), {"SBATCH_NO_REQUEUE": ""}, False),
        (("--requeue",), {"SBATCH_NO_REQUEUE": "1"}, True),
    ],
)
def test_requeue(script: Path, words: tuple[str, ...], environment: dict[str, str], requeue: bool) -> None:
    assert plan(script, *words, environment=environment).requeue is requeue


def test_a_module(script: Path) -> None:
    (script.parent / "pkg").mkdir()
    (script.parent / "pkg" / "train.py").touch()
    made = plan(script, behind=("-m", "pkg.train", "-m", "x"))
    assert (made.module, made.script, made.arguments) == (True, "pkg.train", ("-m", "x"))


def test_an_exclude_file_is_read(script: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("n1\nn[4-5]\n")
    assert plan(script, f"--exclude={tmp_path}/bad.txt").exclude == ("n1", "n[4-5]")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-n", "8"), "--ntasks"),
        (("--ntasks-per-node=8",), "--ntasks-per-node"),
        (("-G", "8"), "--gpus"),
        (("--no-kill=off",), "--no-kill=off"),
        (("--requeue", "--no-requeue"), "contradict"),
        (("--exclude=./none",), "cannot read this file"),
    ],
)
def test_options_that_contradict_jurymast_are_refused(
    script: Path, words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        plan(script, *words)
    assert caught.value.hint or "contradict" in says or "file" in says


def test_a_policy_whose_least_number_of_nodes_the_run_does_not_have_is_refused(script: Path) -> None:
    line = split_command_line(["--", script.name], {})
    policy = resolve([pairs_layer("command line", [("nodes.min", 5)])])
    with pytest.raises(UsageError, match="nodes.min is 5, and the run has 4 nodes") as caught:
        make_plan(
            OwnOptions(nodes=4, runs=RUNS, cluster="slurm", name=""), line, policy, environment={},
            working_directory=script.parent, python="python3",
        )  # fmt: skip
    assert caught.value.hint


def test_variables_that_contradict_jurymast_are_refused(script: Path) -> None:
    with pytest.raises(UsageError, match="SBATCH_GPUS"):
        plan(script, environment={"SBATCH_GPUS": "8"})


@pytest.mark.parametrize(
    ("behind", "error", "says"),
    [
        (("nowhere.py",), ScriptError, "nowhere.py does not exist"),
        (("/",), ScriptError, "/ is a directory without a __main__.py"),
        (("-m",), UsageError, "needs a module name"),
        (("--lr", "1"), UsageError, "where the training script should"),
    ],
)
def test_scripts_that_are_none(
    script: Path, behind: tuple[str, ...], error: type[JurymastError], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan(script, behind=behind)


def test_run_ids_read_well_sort_by_time_and_differ() -> None:
    now = time.struct_time((2026, 11, 20, 13, 45, 1, 4, 324, 0))
    ids = {new_run_id("gpt", now) for _ in range(50)}
    assert len(ids) > 45
    assert all(one.startswith("20261120-134501-gpt-") and len(one) == 24 for one in ids)


def test_the_run_directory_is_whole_and_private_or_absent(script: Path, tmp_path: Path) -> None:
    request = build_request(plan(script, runs=tmp_path / "runs"), resolve([]))
    made = write_run_directory(request)
    run = request.run_directory
    assert run.plan() == request.plan
    assert run.policy_file.read_text() == request.policy
    assert (run.submission / "job.sh").read_text() == request.script
    assert request.argv[-1] == str(run.submission / "job.sh")
    for path in [run.root, *run.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    with pytest.raises(RunDirectoryError, match="File exists"):
        write_run_directory(request)
    run.unmake(made)
    assert list((tmp_path / "runs").iterdir()) == []


def test_submit_sends_what_the_dry_run_showed(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = build_request(plan(script, runs=tmp_path / "runs"), resolve([]))
    write_run_directory(request)
    sbatch, said = tmp_path / "sbatch", tmp_path / "said"
    sbatch.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {said}\necho 'moved to gpu' >&2\necho '77;far'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    submitted = submit_slurm(request)
    assert ["sbatch", *said.read_text().splitlines()] == list(request.argv)
    assert Path(request.argv[-1]).read_text() == request.script
    assert (submitted.slurm_job, submitted.slurm_cluster, submitted.notes) == ("77", "far", "moved to gpu")
    assert (request.run_directory.submission / "jobs" / "77").read_text() == "far"


@pytest.mark.parametrize(
    ("text", "found"),
    [("123\n", ("123", "")), ("123;far\n", ("123", "far")), ("note from the site\n77\n", ("77", ""))],
)
def test_parsable_output(text: str, found: tuple[str, str]) -> None:
    assert accepted(text) == found


def test_no_job_id_is_no_submission() -> None:
    with pytest.raises(SubmissionError, match="printed no job id: 'queued'"):
        accepted("queued\n")


def test_the_runs_directory(tmp_path: Path) -> None:
    check_runs_directory(tmp_path / "new" / "runs")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError):
        check_runs_directory(tmp_path / "file" / "runs")
    with pytest.raises(RunDirectoryError, match="character"):
        check_runs_directory(tmp_path / "%j")
    script = BatchScript("job.sbatch", "#!/bin/sh\n")
    check_runs_directory(tmp_path / "a b", script)
    check_runs_directory(tmp_path / "a:b")
    with pytest.raises(RunDirectoryError, match="colon"):
        check_runs_directory(tmp_path / "a:b", script)


SINFO = """\
gpu*|up|1-infinite|3|idle
gpu*|up|1-infinite|2|allocated
gpu*|up|1-infinite|1|down*
cpu|up|1-4|10|idle
odd line
empty|up|1-infinite|0|n/a
"""


def test_partitions_are_read() -> None:
    found = parse_partitions(SINFO)
    assert sorted(found) == ["cpu", "empty", "gpu"]
    assert (found["gpu"].total, found["gpu"].out, found["gpu"].default, found["gpu"].largest_job) == (
        6,
        1,
        True,
        None,
    )
    assert (found["cpu"].total, found["cpu"].default, found["cpu"].largest_job) == (10, False, 4)


@pytest.mark.parametrize(
    ("asked", "active", "spares", "message", "hint"),
    [
        (
            "",
            5,
            2,
            "7 nodes (5 active + 2 spare), and partition gpu has 6 nodes, 1 of them out",
            "--spares 1",
        ),
        ("gpu", 7, 0, "partition gpu has 6 nodes", "at most --nodes 6 fits"),
        ("cpu", 4, 1, "partition cpu allows 4 nodes a job", "--spares 0"),
        ("gpu,cpu", 7, 1, "partition gpu has 6", "at most --nodes 6"),
        ("gpus", 1, 0, "there is no partition gpus (did you mean gpu?)", "cpu, empty, gpu"),
    ],
)
def test_what_a_partition_cannot_hold(asked: str, active: int, spares: int, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_fits(parse_partitions(SINFO), asked, active, spares)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "active", "spares"), [("", 5, 1), ("gpu", 6, 0), ("cpu", 3, 1), ("cpu,gpu", 5, 1)]
)
def test_what_a_partition_can_hold(asked: str, active: int, spares: int) -> None:
    check_fits(parse_partitions(SINFO), asked, active, spares)


def test_without_a_default_partition_slurm_decides() -> None:
    check_fits(parse_partitions("gpu|up|1-infinite|1|idle\n"), "", 5, 5)


def test_a_local_run_is_a_detached_process_that_cancel_can_tell_from_others(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = local_request(script, tmp_path)
    write_run_directory(request)
    pid = submit_local(request.plan.directory, request.argv)
    run = RunDirectory(request.plan.directory)
    process = local_process(run)
    assert process is not None
    assert process.pid == pid
    assert os.getsid(pid) == pid
    read = foreign.read

    def clock_was_set(path: Path | str, most: int) -> bytes:
        """By a second: the machine then seems to have been started at another time."""
        shown = read(path, most)
        return re.sub(rb"btime \d+", b"btime 1", shown) if str(path) == "/proc/stat" else shown

    with monkeypatch.context() as patched:
        patched.setattr(foreign, "read", clock_was_set)
        assert local_process(run) is not None
    record = run.submission / "local.json"
    values = json.loads(record.read_text())
    for lie in ({"began": values["began"] - 60}, {"boot": "another"}):
        record.write_text(json.dumps({**values, **lie}))
        assert local_process(run) is None
    process.kill()
    os.waitpid(pid, 0)
    record.write_text(json.dumps(values))
    assert local_process(run) is None
    assert stat.S_IMODE((run.submission / "job-local.log").stat().st_mode) == 0o600


def local_request(script: Path, tmp_path: Path) -> Request:
    """A local request whose Python only waits: the real batch process is tested elsewhere."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    stand_in.chmod(0o700)
    made = plan(script, runs=tmp_path / "runs", cluster="local")
    made = RunPlan.from_json({**made.to_json(), "python": str(stand_in)})
    request = build_request(made, resolve([]))
    assert request.argv[-2:] == ("jurymast.cluster.batch", made.directory)
    assert request.argv[0] == str(stand_in)
    assert request.script == ""
    return request


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0), ("90:30", 5430.0), ("1:30:00", 5400.0), ("2-00", 172_800.0), ("2-12:30", 217_800.0),
        ("1-00:00:10", 86_410.0), ("0", None), ("UNLIMITED", None), ("soon", None), (None, None),
    ],
)  # fmt: skip
def test_time_limits(text: str | None, seconds: float | None) -> None:
    assert time_limit_s(text) == seconds


def test_spares_follow_the_policy_s_rate_and_the_time_limit(script: Path) -> None:
    assert plan(script, spares="auto", nodes=128).spares == 2
    assert plan(script, "--time", "5", spares="auto", nodes=128).spares == 0
