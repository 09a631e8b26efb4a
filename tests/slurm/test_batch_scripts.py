"""Batch scripts as people have them, submitted unchanged to a real cluster."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.runs import SCRIPTS as RANK_SCRIPTS
from support.slurm_runs import SCRIPT_ENVIRONMENT, SlurmRun, power_loss
from support.waiting import wait_until
from testcluster import Cluster
from testcluster.settings import SLURM_SYSTEM

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 800.0
GROUP_LIMIT_S = 1200.0
SCRIPTS = Path(__file__).parent / "scripts"
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "batch-scripts.json"
STYLES = sorted(path.stem for path in SCRIPTS.glob("*.sbatch"))
# What always runs: each way in which a training is started, and each in which a script ends.
SAMPLE = [
    "accelerate-on-one-node", "helper-and-signal", "launch-script-that-fails", "missing-folders",
    "refused-by-srun", "shell-a-rank", "srun-a-node", "steps-and-exec", "torchrun-with-setup",
]  # fmt: skip
# Those that train nothing, or on each node by itself.
WITHOUT_TRAINING = [
    "files-of-steps", "helper-and-signal", "missing-folders", "refused-by-srun", "steps-and-exec",
    "streams-of-tasks", "training-on-each-node",
]  # fmt: skip
# Those whose outcome each release of Slurm decides anew; what is recorded is that of the system's.
OF_A_RELEASE = ["files-of-steps", "missing-folders", "refused-by-srun", "streams-of-tasks"]
# As many jobs as a test submits at once: Slurm runs two or three of them beside each other.
TOGETHER = 6


def named() -> list[str]:
    """`make styles` runs all of them; JURYMAST_STYLES may also name some."""
    names = os.environ.get("JURYMAST_STYLES", "").split() or SAMPLE
    return STYLES if names == ["all"] else names


def groups() -> list[list[str]]:
    chosen = named()
    return [chosen[start : start + TOGETHER] for start in range(0, len(chosen), TOGETHER)]


def can_run(cluster: Cluster, style: str) -> bool:
    """Whether the machines have its interpreter: few have csh."""
    program = (SCRIPTS / f"{style}.sbatch").read_text().split(maxsplit=1)[0].removeprefix("#!")
    return cluster.login(["test", "-x", program], check=False).returncode == 0


def ours(cluster: Cluster) -> tuple[str, ...]:
    return (str(cluster.python.parent / "jurymast"), "submit", "--spares=1")


def submitted(cluster: Cluster, work: Path, style: str, *submit: str, hold: bool = False) -> int:
    """A job of this style, in a directory of its own. A script that loads an environment finds the
    Python that trains only there. `hold`: its trainings go on until there is a file `stop`."""
    cluster.login(["cp", "-r", str(SCRIPTS / "site"), str(work)])
    if hold:
        (work / "hold").touch()
    script = (SCRIPTS / f"{style}.sbatch").read_text()
    (work / "job.sbatch").write_text(script)
    (work / "train.py").write_bytes((RANK_SCRIPTS / "sum_ranks.py").read_bytes())
    python = cluster.python.parent
    path = "/usr/bin:/bin" if re.search("activate|module load", script) else f"{python}:/usr/bin:/bin"
    done = cluster.login(
        [*submit, "--parsable", "--output=out", "job.sbatch", "first", "second word"],
        cwd=work, timeout_s=240, check=False,
        env={**SCRIPT_ENVIRONMENT, "PATH": path, "VENV": str(python.parent),
             "JURYMAST_RUNS": str(work / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def outcome(cluster: Cluster, work: Path, job: int) -> list[str]:
    """What the job of a style printed, in an order that ranks cannot change, its exit code, and the files
    that it left with what ranks printed there. Lines that begin with "said" or "rank" are compared: torch and
    Slurm say other things besides. A training that fails says them again each time that it is started."""
    ended = cluster.wait_job(job, "COMPLETED", "FAILED", deadline_s=GROUP_LIMIT_S)
    lines = (work / "out").read_text().splitlines()
    print(f"==== {work.name} ({ended['StartTime']} to {ended['EndTime']})", *lines, sep="\n")
    found = [*sorted({line for line in lines if re.match("(rank|said)", line)}), ended["ExitCode"]]
    return found + sorted({line for path in work.iterdir() for line in told_by(path)})


def told_by(path: Path) -> list[str]:
    """A line for a file, and one for each rank's in it; none for what was there, and for files of stderr,
    which ranks have in one with their stdout. Long numbers in names are jobs' and dates'."""
    given = {"hold", "job.sbatch", "out", "runs", "started", "stop", "train.py", "__pycache__"}
    given |= {file.name for file in (SCRIPTS / "site").iterdir()}
    if path.name in given or path.name.startswith("err"):
        return []
    if path.is_dir():
        return [f"{path.name}/{line}" for inner in path.iterdir() for line in told_by(inner)]
    name = re.sub(r"\d{2,}", "N", path.name)
    text = re.sub(r"^\[default\d+\]:", "", path.read_text(errors="replace"), flags=re.MULTILINE)  # by --tee
    return [name, *(f"{name}: {line}" for line in text.splitlines() if re.search(r"\brank \d+ of", line))]


def outcomes(cluster: Cluster, work: Path, styles: list[str], *submit: str) -> dict[str, list[str]]:
    cluster.login(["mkdir", str(work)])
    jobs = {style: submitted(cluster, work / style, style, *submit) for style in styles}
    return {style: outcome(cluster, work / style, job) for style, job in jobs.items()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("styles", groups(), ids=lambda styles: f"{styles[0]} to {styles[-1]}")
def test_the_outcomes_are_sbatchs(cluster: Cluster, tmp_path: Path, styles: list[str]) -> None:
    """With JURYMAST_UPDATE_GOLDEN real sbatch says what they are."""
    work = cluster.shared / re.sub(r"\W+", "-", tmp_path.name)
    styles = [style for style in styles if can_run(cluster, style)]
    if os.environ.get("JURYMAST_UPDATE_GOLDEN"):
        known = json.loads(GOLDEN.read_text())
        known |= outcomes(cluster, work.with_name(f"{work.name}-sbatch"), styles, "sbatch")
        known = {style: known[style] for style in STYLES if style in known}
        GOLDEN.write_text(json.dumps(known, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    if cluster.options.slurm != SLURM_SYSTEM and (some := [one for one in styles if one in OF_A_RELEASE]):
        golden |= outcomes(cluster, work.with_name(f"{work.name}-sbatch"), some, "sbatch")
    found = outcomes(cluster, work, styles, *ours(cluster))
    assert found == {style: golden[style] for style in styles}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("style", [style for style in named() if style not in WITHOUT_TRAINING])
def test_the_outcome_is_sbatchs_though_a_node_loses_power(
    cluster: Cluster, tmp_path: Path, style: str
) -> None:
    """In the middle of the script's first training."""
    if not can_run(cluster, style):
        pytest.skip("the machines do not have its interpreter")
    work = cluster.shared / re.sub(r"\W+", "-", tmp_path.name)
    cluster.login(["mkdir", str(work)])
    job = submitted(cluster, work / style, style, *ours(cluster), hold=True)
    lose_a_node(cluster, work / style, job)
    golden = json.loads(GOLDEN.read_text())
    assert outcome(cluster, work / style, job) == golden[style]


def first_training(cluster: Cluster, work: Path, job: int) -> SlurmRun:
    """The run that was submitted, or that of an array's task, once it has begun."""

    def begun() -> list[Path]:
        return [path.parent.parent for path in (work / "runs").glob("*/journal/*.jsonl")]

    wait_until("a training", lambda: bool(begun()), limit_s=LIMIT_S)
    return SlurmRun(cluster, begun()[0], job)


def lose_a_node(cluster: Cluster, work: Path, job: int) -> None:
    """A node on which ranks run, but not the script: without that one the job begins again."""
    started, run = work / "started", first_training(cluster, work, job)
    state = run.wait("the ranks", lambda s: bool(s.placement), LIMIT_S)
    wait_until("the first step", started.exists, limit_s=LIMIT_S)
    victim = next(node for node in state.placement if node != state.host)
    power_loss(run, victim)
    run.wait("the swap", lambda s: bool(s.incidents) and victim not in s.placement, LIMIT_S)
    started.unlink()
    wait_until("a step after it", started.exists, limit_s=LIMIT_S)
    (work / "stop").touch()


def test_a_command_a_script_on_standard_input_and_an_array(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", str(work)])
    command = [str(cluster.python.parent / "jurymast"), "submit", "--parsable", "--spares=1"]
    environment = {"JURYMAST_RUNS": str(work / "runs"), "SBATCH_JOB_NAME": "named"}

    def job(*words: str, script: str = "") -> str:
        done = cluster.login(
            [*command, "--output=%A-%a", *words], cwd=work, env=environment, input=script, timeout_s=LIMIT_S
        )
        return done.stdout.strip()

    text = '#!/bin/sh\n#SBATCH --array=0-7\n#JURYMAST --name ours\necho "$0 $*"; exit $SLURM_ARRAY_TASK_ID\n'
    assert "to start at" in job("--test-only", "--wrap", "true")
    assert job("--quiet", script="#!/bin/sh\n#SBATCH --wait\ntouch ended\n") == ""
    assert (work / "ended").exists()
    array = job("--array=2,4", script=text)
    after = job(f"--dependency=afternotok:{array}", "--wrap", 'echo "wrapped $SLURM_NNODES $SLURM_JOB_NAME"')
    cluster.wait_job(int(after), "COMPLETED", deadline_s=LIMIT_S)
    assert (work / f"{after}-4294967294").read_text() == "wrapped 1 named\n"
    scripts = [(work / f"{array}-{task}").read_text().split() for task in (2, 4)]
    assert [(Path(path).name, *rest) for path, *rest in scripts] == [("slurm_script",)] * 2
    names = [path.parent.name for path in (work / "runs").glob("*/plan.json")]
    runs = [name.partition("-ours-")[2][4:] for name in names]
    assert sorted(runs) == ["", "", "", "-task-2", "-task-4"]
