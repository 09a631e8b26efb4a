"""Signals that a script sends to its steps, or asks Slurm for: the same script under sbatch and under us."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jurymast.core.state.run import Phase
from jurymast.journal import replay
from jurymast.rundir import RunDirectory
from support.slurm_runs import SCRIPT_ENVIRONMENT, TRAIN, submit, submit_script
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 550.0
# Tells, in files, what it hears. It ends once it has heard the signals that it was started with.
HEARS = """
import os, signal, sys, time
name, rank, wanted = sys.argv[1], os.environ["SLURM_PROCID"], sys.argv[2:]
heard = []
def hear(number, _frame):
    heard.append(signal.Signals(number).name)
    print(f"said: {name} rank {rank} hears {heard[-1]}", flush=True)
    open(f"{name}-{rank}-{heard[-1]}", "w")
    if name == "leave":
        time.sleep(5 * (rank == "0"))  # it saves
        sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hear)
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"{name}-{rank}-ready", "w")
while wanted != heard:
    signal.pause()
"""
AWAIT = """
await() { until [[ -e $1-0-$2 && -e $1-1-$2 ]]; do sleep 0.1; done; }
"""
BACKGROUND = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out --time=10 --partition=main
#JURYMAST train: yes
{AWAIT}
srun python -u hears.py both SIGUSR1 SIGUSR2 & pid=$!
await both ready; kill -USR1 $pid; await both SIGUSR1; kill -USR2 $pid; wait $pid
echo "said: both $?"
(srun python -u hears.py inner SIGUSR2 & pid=$!; await inner ready; kill -USR2 $pid; wait $pid
 echo "said: inner $?") & wait $!
echo "said: $?"
srun python -u hears.py int SIGUSR1 2>&1 & pid=$!
await int ready; kill -INT $pid; sleep 2; kill -USR1 $pid; wait $pid; echo "said: int $?"
srun python -u hears.py hup never & pid=$!
await hup ready; kill -HUP $pid; wait $pid; echo "said: hup $?"
srun python -u hears.py twice never & pid=$!
await twice ready; kill -INT $pid; sleep 0.2; kill -INT $pid; wait $pid; echo "said: twice $?"
echo "said: end"
"""
# A trap runs between two commands: a shell that just begins to wait may sleep through the signal.
FROM_SLURM = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out --time=10 --partition=main --signal=B:USR2@60
#JURYMAST train: yes
{AWAIT}
srun python -u hears.py steps SIGUSR1 SIGUSR2 & pid=$!
await steps ready; scancel --signal=USR1 $SLURM_JOB_ID; await steps SIGUSR1
scancel --signal=USR2 $SLURM_JOB_ID; wait $pid; echo "said: steps $?"
trap 'echo "said: trapped"; kill -USR1 $pid' USR2
srun python -u hears.py leave never & pid=$!
await leave ready; scancel --batch --signal=USR2 $SLURM_JOB_ID
await leave SIGUSR1; wait $pid; echo "said: leave $?"
echo "said: end"
"""
# Whoever ends a step in Slurm means neither its job nor its nodes.
IN_SLURM = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out --time=10 --partition=main
#JURYMAST train: yes
{AWAIT}
srun python -u hears.py scancelled never & pid=$!
await scancelled ready; scancel $SLURM_JOB_ID.0; wait $pid; echo "said: scancelled $?"
srun python -u hears.py killed never & pid=$!
await killed ready; pkill -x srun; wait $pid; echo "said: killed $?"
srun --time=1 python -u hears.py limited never; echo "said: limited $(($? > 128))"
echo "said: end"
"""


def said(text: str) -> list[str]:
    return sorted(re.findall(r"^said: .*", text, re.MULTILINE))


def both_ways(
    cluster: Cluster, work: Path, script: str, *, apart: bool = False
) -> tuple[list[str], list[str]]:
    """What a script says under sbatch, and under us. `apart`: one would disturb the other."""
    for way in ("sbatch", "ours"):
        cluster.login(["mkdir", "-p", str(work / way)])
        (work / way / "hears.py").write_text(HEARS)
    (work / "sbatch" / "job.sbatch").write_text(script)
    plain = cluster.login(
        ["sbatch", "--parsable", "job.sbatch"], cwd=work / "sbatch",
        env={**SCRIPT_ENVIRONMENT, "PATH": f"{cluster.python.parent}:/usr/bin:/bin"},
    )  # fmt: skip
    if apart:
        cluster.wait_job(int(plain.stdout), "COMPLETED", deadline_s=LIMIT_S)
    run = submit_script(cluster, work / "ours", script)
    for job in (int(plain.stdout), run.job):
        cluster.wait_job(job, "COMPLETED", deadline_s=LIMIT_S)
    return said((work / "sbatch" / "out").read_text()), said((work / "ours" / "out").read_text())


@pytest.mark.timeout(1200)
def test_a_script_signals_its_background_steps(cluster: Cluster, tmp_path: Path) -> None:
    theirs, ours = both_ways(cluster, cluster.shared / tmp_path.name, BACKGROUND)
    assert ours == theirs
    assert "said: both rank 1 hears SIGUSR2" in ours


@pytest.mark.timeout(1200)
def test_slurm_signals_steps_and_the_script_passes_a_warning_on(cluster: Cluster, tmp_path: Path) -> None:
    """Each rank hears a signal once. Ranks that leave, one while the other saves, end the step with 0."""
    theirs, ours = both_ways(cluster, cluster.shared / tmp_path.name, FROM_SLURM)
    assert ours == theirs
    assert {"said: steps 0", "said: trapped", "said: leave 0"} <= set(ours)


@pytest.mark.timeout(1200)
def test_steps_that_end_in_slurm_end_no_job_and_blame_no_node(cluster: Cluster, tmp_path: Path) -> None:
    """By scancel, with their srun, and at a time limit of their own."""
    work = cluster.shared / tmp_path.name
    theirs, ours = both_ways(cluster, work, IN_SLURM, apart=True)
    assert ours == theirs
    assert {"said: scancelled 137", "said: killed 137", "said: limited 1", "said: end"} <= set(ours)
    for folder in (work / "ours" / "runs").iterdir():
        state = replay(RunDirectory(folder))
        assert state is not None
        assert (state.public_state, state.restarts, state.excluded) == ("cancelled", 0, {}), state.end_reason


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nodes", "spares"), [(2, 1), pytest.param(1, 0, marks=pytest.mark.long)])
def test_a_plain_run_whose_step_is_cancelled_ends_and_blames_no_node(
    cluster: Cluster, tmp_path: Path, nodes: int, spares: int
) -> None:
    arguments = (*TRAIN, "--steps", "100000")
    options = ("--nodes", str(nodes), "--spares", str(spares))
    run = submit(cluster, tmp_path, *options, arguments=arguments)
    run.wait_step(5)
    cluster.login(["scancel", f"{run.job}.0"])
    state = run.wait_end(LIMIT_S)
    assert (state.public_state, state.restarts, state.excluded) == ("cancelled", 0, {}), run.story()
    assert "scancel JOB.STEP" in state.end_reason
    cluster.wait_job(run.job, "FAILED", "CANCELLED", deadline_s=LIMIT_S)


@pytest.mark.timeout(600)
def test_an_agent_of_a_single_node_that_is_killed_alone_ends_no_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its guard tells the difference, so the run goes on in another life of the job."""
    run = submit(cluster, tmp_path, "--nodes", "1", "--spares", "0", arguments=(*TRAIN, "--steps", "100000"))
    (node,) = run.wait_step(5).placement
    cluster.fault("kill", node, pid=run.agent_pid(node), signal="KILL")
    state = run.wait("the requeue", lambda state: state.ended or state.phase is Phase.REQUEUED)
    assert not state.ended, state.end_reason
    assert [(one.cause, one.action) for one in state.incidents] == [("node_crash", "requeue")], run.story()
