"""The command line as people meet it: a mistake is one clear line, a hint and its own exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jurymast.cli.main import main
from jurymast.cli.options import size
from jurymast.core.state.settings import RunPlan
from jurymast.errors import RunNotFoundError
from jurymast.report.which_run import find_run
from jurymast.rundir import RunDirectory

LAUNCHER = Path(__file__).parents[2] / "launcher"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with a script, an empty PATH and no site policy."""
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def jurymast(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": str(place / "empty"),
        "PYTHONPATH": str(LAUNCHER),
        "JURYMAST_SITE": "",
        "HOME": str(place),
        "LC_ALL": "C.UTF-8",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-m", "jurymast", *words],
        cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


BAD: list[tuple[str, int, str, str]] = [
    ("submti -- train.py", 64, "there is no command submti (did you mean submit?)", "jurymast --help"),
    ("submit", 64, "no training script given", "SCRIPT.py"),
    ("submit --spars 2 -- train.py", 64, "unknown option --spars (did you mean --spares?)", "sbatch"),
    ("submit --partitoin gpu -- train.py", 64, "--partitoin (did you mean --partition?)", "sbatch"),
    ("submit --nodes zero -- train.py", 64, "'zero' is not a valid integer", "jurymast submit --help"),
    ("submit --nodes 0 -- train.py", 64, "0 is not in the range", "jurymast submit --help"),
    ("submit -N 2-4 -- train.py", 64, "'2-4' is not a valid integer", "jurymast submit --help"),
    ("submit --spares some -- train.py", 64, "--spares some: must be a number, or auto", ""),
    ("submit --spares -1 -- train.py", 64, "--spares -1: must be a number, or auto", ""),
    ("submit --cluster slrum -- train.py", 64, "'slrum' is not one of 'slurm', 'local'", ""),
    ("submit --gpus=8 -- train.py", 64, "sbatch's --gpus cannot be used here", "--gpus-per-node G"),
    ("submit --nnodes=2 train.py", 64, "unknown option --nnodes", "--nodes N"),
    ("submit -- nowhere.py", 66, "the training script nowhere.py does not exist", "-m MODULE"),
    ("submit --runs train.py/runs -- train.py", 73, "cannot write to the runs directory", "--runs DIR"),
    ("submit --policy none.yaml -- train.py", 65, "none.yaml: cannot be read: No such file", ""),
    ("submit --policy bad.yaml -- train.py", 65, "bad.yaml:1: spare: unknown key (did you mean spares?)", ""),
    (
        "submit -- train.py",
        69,
        "Slurm's commands are not available: sbatch is not in PATH",
        "--cluster local",
    ),
    ("submit --test-only -- train.py", 69, "Slurm's commands are not available", "--cluster local"),
    ("policy check bad.yaml", 65, "bad.yaml:2: detect.heartbeat: 1 is not a duration", ""),
    ("policy show none.yaml", 65, "none.yaml: cannot be read", ""),
    ("--verison", 64, "no such option", "--version"),
    ("submit -- python train.py", 64, "leave python out", "-- SCRIPT.py"),
    ("submit -- /usr/bin/python3.11 -u train.py", 64, "leave /usr/bin/python3.11 out", "-- SCRIPT.py"),
    ("submit -- torchrun --nnodes 2 train.py", 64, "leave torchrun out", "-- SCRIPT.py"),
    ("submit -- -m no.such.module", 66, "there is no module no.such.module", "-m MODULE"),
    ("submit -- -m json.nothing", 66, "there is no module json.nothing (no nothing in json)", "-m MODULE"),
    ("submit --runs new%j -- train.py", 73, "has a character that Slurm does not take", "--runs DIR"),
    ("plan -N 4 --checkpoint-bytes 5XB", 64, "5XB is not a size", "5e12 or 5TB"),
    ("plan -N 4 --checkpoint-bytes 0", 64, "0 is not a size", "jurymast plan --help"),
    ("ps --runs does/not/exist", 73, "there is no directory", "does/not/exist"),
    ("nodes --runs does/not/exist", 73, "there is no directory", "does/not/exist"),
]


@pytest.mark.parametrize(("words", "code", "message", "hint"), BAD, ids=[case[0] for case in BAD])
def test_mistakes(place: Path, words: str, code: int, message: str, hint: str) -> None:
    (place / "bad.yaml").write_text("spare: 1\ndetect: {heartbeat: 1}\n")
    done = jurymast(place, *words.split())
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("jurymast: error: ")
    assert message in done.stderr.lower() or message in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "runs").exists()


# Each with a file that is none where a file is named.
FILES = (
    "policy check pipe", "policy show pipe", "submit --policy pipe -- train.py", "submit -- pipe",
    "submit pipe", "plan -N 4 --policy pipe", "simulate --nodes 4 --policy pipe",
    "simulate --nodes 4 --durations pipe", "simulate --nodes 4 --trace pipe",
)  # fmt: skip


@pytest.mark.parametrize("words", FILES)
def test_a_command_waits_for_no_pipe(
    place: Path, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("JURYMAST_SITE", "")
    os.mkfifo(place / "pipe")
    assert main(words.split()) in (64, 65, 66)
    told = capfd.readouterr().err.splitlines()
    assert told[0].startswith("jurymast: error: ")
    assert "pipe" in told[0]
    assert told[0].endswith("it is not an ordinary file")
    assert [line for line in told[1:] if "hint: " not in line] == []


def test_an_error_does_not_drive_the_terminal(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is about may be named by somebody else."""
    monkeypatch.chdir(place)
    assert main(["status", "\x1b[2Jgone\r"]) == RunNotFoundError.exit_code
    told = capfd.readouterr().err
    assert "gone" in told
    assert not {"\x1b", "\r"} & set(told)


def test_all_policy_mistakes_are_in_one_answer(place: Path) -> None:
    (place / "bad.yaml").write_text("spare: 1\ndetect: {heartbeat: 1}\n")
    done = jurymast(place, "policy", "check", "bad.yaml")
    assert [line.split(": ")[-2] for line in done.stderr.splitlines()][:1] != []
    assert "bad.yaml:1: spare" in done.stderr
    assert "bad.yaml:2: detect.heartbeat" in done.stderr


def test_a_dry_run_needs_no_slurm_and_leaves_nothing(place: Path) -> None:
    words = (
        "--dry-run",
        "-N",
        "4",
        "--spares",
        "2",
        "--gres=gpu:8",
        "-p",
        "gpu",
        "--",
        "train.py",
        "--lr",
        "1",
    )
    done = jurymast(place, "submit", "--json", *words)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["argv"][:5] == ["sbatch", "--parsable", "--gres=gpu:8", "-p", "gpu"]
    assert "#SBATCH --nodes=6\n" in shown["script"]
    assert "spares: 2" in shown["policy"]
    plan = RunPlan.from_json(shown["plan"])
    assert (plan.active, plan.spares, plan.ranks_per_node, plan.arguments) == (4, 2, 8, ("--lr", "1"))
    assert sorted(path.name for path in place.iterdir()) == ["empty", "train.py"]
    people = jurymast(place, "submit", *words)
    assert "sbatch --parsable --gres=gpu:8 -p gpu " in people.stdout
    assert "#SBATCH --no-kill" in people.stdout


def test_a_run_that_nobody_watches_any_more_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted as early as can be: the run is submitted, and nothing follows it yet."""

    def interrupted(directory: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("jurymast.report.follow.wait", interrupted)
    monkeypatch.setattr("jurymast.cluster.allocation.submit_local", lambda directory: 7)
    monkeypatch.chdir(place)
    runs = place / "my runs"
    assert main(["submit", "--cluster", "local", "--runs", str(runs), "--wait", "--", "train.py"]) == 130
    (run,) = runs.iterdir()
    said = capsys.readouterr()
    assert said.out.startswith(f"run        {run.name}\n")
    assert said.err == (
        f"the run goes on; to end it: jurymast cancel '{run}'\n\njurymast: error: interrupted\n"
    )


def test_a_local_dry_run_says_what_it_does_not_use(place: Path) -> None:
    done = jurymast(place, "submit", "--cluster", "local", "--dry-run", "--time", "60", "--", "train.py")
    assert done.returncode == 0
    assert "not used on the local cluster: --time 60" in done.stderr
    assert "jurymast.cluster.batch" in done.stdout


def test_a_dry_run_says_that_no_small_job_brings_a_node(place: Path) -> None:
    (place / "refill.yaml").write_text("nodes_policy: {refill: on}\n")
    options = ("submit", "--cluster", "local", "--policy", "refill.yaml", "--dry-run")
    done = jurymast(place, *options, "--", "train.py")
    assert "nodes_policy.refill has no effect on the local cluster" in done.stderr


def test_help_version_and_policy_show(place: Path) -> None:
    assert "submit" in jurymast(place, "--help").stdout
    assert "--spares N|auto" in jurymast(place, "submit", "-h").stdout
    assert jurymast(place, "--version").stdout.startswith("jurymast ")
    (place / "good.yaml").write_text("spares: 2\n")
    assert "good.yaml:1" in jurymast(place, "policy", "show", "--origin", "good.yaml").stdout
    assert jurymast(place, "policy", "check", "good.yaml").returncode == 0


def test_help_imports_nothing_heavy(place: Path) -> None:
    heavy = "{'pydantic', 'submitit', 'rich', 'torch', 'yaml', 'psutil', 'asyncio', 'jinja2'}"
    program = (
        "import sys, jurymast.cli.main as m\n"
        "m.main(['--help']); m.main(['submit', '--help'])\n"
        f"print('heavy:', sorted({heavy} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHER)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_output_into_a_closed_pipe_ends_quietly(place: Path) -> None:
    command = f"{sys.executable} -m jurymast submit --dry-run -- train.py"
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHER), "JURYMAST_SITE": ""}
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} | true"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("module", ["json.tool", "train", "inside.deeper"])
def test_a_module_is_looked_for_without_being_imported(place: Path, module: str) -> None:
    (place / "inside").mkdir()
    for name in ("__init__.py", "deeper.py"):
        (place / "inside" / name).write_text("raise SystemExit('imported')\n")
    done = jurymast(place, "submit", "--dry-run", "--", "-m", module)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5e12", 5e12),
        ("5TB", 5e12),
        ("5000 GB", 5e12),
        ("5T", 5e12),
        ("5000000000000", 5e12),
        ("1.5GiB", 1.5 * 2**30),
    ],
)
def test_a_size_may_have_a_unit(text: str, number: float) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["1e400", "0", "-1", "5 apples", "1e9 PB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size(text)


@pytest.mark.parametrize("words", [(), ("policy",)])
def test_a_bare_command_shows_its_help(place: Path, words: tuple[str, ...]) -> None:
    done = jurymast(place, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == jurymast(place, *words, "--help").stdout


def test_output_that_finds_no_room_is_one_line(place: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHER), "JURYMAST_SITE": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jurymast", "submit", "--dry-run", "--", "train.py"], cwd=place,
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    said = "jurymast: error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (73, said)


def test_closed_streams_are_no_mistake(place: Path) -> None:
    """A cron job may have none."""
    closed = 'exec "$0" -m jurymast submit --dry-run -- train.py <&- >&- 2>&-'
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHER), "JURYMAST_SITE": ""}
    done = subprocess.run(["sh", "-c", closed, sys.executable], cwd=place, env=environment, check=False)
    assert done.returncode == 0
    shown = 'exec "$0" -m jurymast plan --nodes 2 >&-'
    done = subprocess.run(
        ["sh", "-c", shown, sys.executable], cwd=place, env=environment, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_working_directory_that_is_gone_is_one_line(place: Path) -> None:
    gone = place / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$1"; exec "$2" ps', "sh", gone, Path(sys.executable).with_name("jurymast")],
        cwd=gone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (73, "")
    assert done.stderr == "jurymast: error: the working directory no longer exists: change to one that does\n"


def test_help_names_values_in_words(place: Path) -> None:
    for name in ("simulate", "plan", "submit", "logs", "save"):
        shown = jurymast(place, name, "--help").stdout
        assert "RANGE" not in shown, name
        assert "TEXT" not in shown, name


def make_run(runs: Path, name: str, *jobs: str) -> None:
    run = RunDirectory(runs / name)
    run.create()
    run.save_plan(
        RunPlan(
            run=name, name="x", directory=str(run.root), cluster="slurm",
            active=1, spares=0, ranks_per_node=1, script="x.py", submitted_at=time.time(),
        )
    )  # fmt: skip
    (run.submission / "jobs").mkdir()
    for job in jobs:
        (run.submission / "jobs" / job).touch()


def test_a_run_is_found_by_id_by_slurm_job_and_by_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "20261120-100000-gpt-aaaa", "17")
    make_run(tmp_path, "20261121-100000-gpt-bbbb", "17", "18")
    assert find_run("20261120-100000-gpt-aaaa", tmp_path).root.name.endswith("aaaa")
    assert find_run("18", tmp_path).root.name.endswith("bbbb")
    assert find_run("17", tmp_path).root.name.endswith("bbbb")
    assert find_run("17;research", tmp_path).root.name.endswith("bbbb")
    assert find_run("20261120-100000-gpt-aaaa/", tmp_path).root.name.endswith("aaaa")
    make_run(tmp_path, "20261122-100000-gpt-cccc", "local-42")
    assert find_run("local-42", tmp_path).root.name.endswith("cccc")
    assert find_run(str(tmp_path / "20261120-100000-gpt-aaaa"), Path("/nowhere")).root.name.endswith("aaaa")
    monkeypatch.chdir(tmp_path / "20261120-100000-gpt-aaaa")
    assert find_run(".", Path("/nowhere")).root == Path.cwd()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("20261120-100000-gpt-aaab", "did you mean 20261120-100000-gpt-aaaa?"),
        ("gp", "did you mean 20261120-100000-gpt-aaaa?"),
        ("99", "the newest runs are 20261120-100000-gpt-aaaa"),
        ("", "the newest runs are"),
        ("../x", "the newest runs are"),
    ],
)
def test_a_run_that_is_not_there(tmp_path: Path, text: str, hint: str) -> None:
    make_run(tmp_path, "20261120-100000-gpt-aaaa", "17")
    with pytest.raises(RunNotFoundError) as caught:
        find_run(text, tmp_path)
    assert hint in caught.value.hint


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError) as caught:
        find_run("x", tmp_path / "none")
    assert "JURYMAST_RUNS" in caught.value.hint
