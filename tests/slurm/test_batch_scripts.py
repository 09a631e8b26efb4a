"""Batch scripts as people have them, submitted unchanged to a real cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.cli.find import find_run
from support.runs import SCRIPTS, result
from support.slurm_runs import SlurmRun, jurymast, power_loss
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "SUM": str(SCRIPTS / "sum_ranks.py")}
LIMIT_S = 90.0
# name: the number of nodes, and what stands behind "#!/bin/bash". Lines that begin with "said" or "rank" are
# compared: torch and Slurm say other things besides.
STYLES = {
    "torchrun by srun, after set-up and before more": (2, """
        #SBATCH --ntasks-per-node=1
        set -euo pipefail
        source ./setup.sh
        nodes=( $(scontrol show hostnames "$SLURM_JOB_NODELIST") )
        head=${nodes[0]}
        echo "said: $SLURM_NNODES ${#nodes[@]} $SLURM_JOB_NUM_NODES $(basename $0) $# $(umask)"
        srun --ntasks=$SLURM_NNODES echo said
        srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 1 --rdzv_id $RANDOM --rdzv_backend c10d \\
            --rdzv_endpoint $head:29510 $SUM "$@"
        echo "said: done with $?"
    """),
    "torch.distributed.run in a shell of srun's, a function and a here-document": (1, """
        launch() {
          srun --export=PATH,SUM,GLOO_SOCKET_IFNAME,WORD=exported bash -c '
            cd /tmp && export WORD="$WORD of $SLURM_NNODES in $PWD"
            python -m torch.distributed.run --standalone --nproc-per-node=2 $SUM "b c" &&
              echo said: $SLURM_PROCID
          '
        }
        launch &
        wait $!
        cat <<END
        said: here-document of $SLURM_JOB_NAME
        END
    """),
    "a loop over seeds, without srun and in a container": (1, """
        printf '#!/bin/bash\\nshift 2; PATH=%s exec "$@"' "${PATH#*slurm/bin:}" > apptainer
        chmod +x apptainer
        for run in "" "srun ./apptainer exec image.sif"; do
          WORD=seed-${#run} $run torchrun --nproc-per-node=2 $SUM || exit 1
        done 2> /dev/null | stdbuf -oL cat
        exit ${PIPESTATUS[0]}
    """),
    "a task a rank": (2, """
        #SBATCH --ntasks-per-node=2
        echo said: $SLURM_NTASKS $SLURM_NPROCS $SLURM_NTASKS_PER_NODE $SLURM_TASKS_PER_NODE
        srun python -u $SUM --slurm x
        END_WITH=3 srun python -u $SUM --slurm again
        echo said: $?
    """),
    "a shell a rank, with its own output": (2, """
        #SBATCH --ntasks-per-node=2
        srun -l --output=log-%x bash -c '
          PORT=$(python -c "print(29519)")
          export WORD="$SLURM_LOCALID-$PORT"
          python -u $SUM --slurm $SLURM_PROCID | cat && echo said: $SLURM_PROCID of $SLURM_NTASKS
        '
        sed 's/^/said: /' log-job.sbatch
    """),
    "a script of its own, with a failure": (1, """
        cat > launch.sh <<'END'
        #!/bin/bash
        export WORD=launched
        exec python -m torch.distributed.launch --nproc_per_node=1 --use_env "$@"
        END
        chmod +x launch.sh
        trap 'echo "said: trap"' EXIT
        END_WITH=7 srun ./launch.sh $SUM
        code=$?
        echo "said: ended with $code"
        exit $code
    """),
    "a helper in the background, a trap, and a signal before the time limit": (1, """
        #SBATCH --time=1 --signal=B:USR1@59
        trap 'echo said: signal; kill $helper; exit 5' USR1
        sleep 100 &
        helper=$!
        wait $helper
    """),
    "steps without a training, and exec": (2, """
        srun -l -N1 -n1 echo a 2>&1 | sed 's/^/said: /'
        srun -n2 --ntasks-per-node=1 bash -c 'echo said: $SLURM_PROCID $SLURM_NNODES $SLURM_NTASKS'
        exec srun -N1 -n1 sh -c 'echo said: $0; exit 9'
    """),
    "accelerate": (1, """
        srun accelerate launch --multi_gpu --num_machines 1 --num_processes 2 --mixed_precision no \\
            --dynamo_backend no --main_process_port 29512 $SUM 2> /dev/null
    """),
}  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "batch-scripts.json"


def text_of(style: str) -> str:
    nodes, body = STYLES[style]
    return f"#!/bin/bash\n#SBATCH --nodes={nodes}\n" + re.sub(
        "^ {8}", "", body.strip("\n"), flags=re.MULTILINE
    )


def outcome(cluster: Cluster, work: Path, style: str, *submit: str) -> list[str]:
    """What a job of this style prints, in an order that ranks cannot change, and its exit code."""
    cluster.login(["mkdir", str(work)])
    (work / "setup.sh").write_text('export WORD="set up"\n')
    (work / "job.sbatch").write_text(text_of(style))
    path = f"{cluster.python.parent}:/usr/bin:/bin"
    done = cluster.login(
        [*submit, "--parsable", "--output=out", "job.sbatch", "first", "second word"],
        cwd=work, timeout_s=60, check=False,
        env={**ENVIRONMENT, "PATH": path, "JURYMAST_RUNS": str(work / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    lines = (work / "out").read_text().splitlines()
    print("\n".join(lines))
    kept = {line for line in lines if re.match("(rank|said)", line)}
    return [*sorted(kept), ended["ExitCode"]]


@pytest.mark.parametrize("style", STYLES)
def test_the_outcome_is_sbatchs(cluster: Cluster, tmp_path: Path, style: str) -> None:
    """With JURYMAST_UPDATE_GOLDEN real sbatch says what it is."""
    work = cluster.shared / tmp_path.name
    if os.environ.get("JURYMAST_UPDATE_GOLDEN"):
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        known[style] = outcome(cluster, work.with_name(f"{work.name}-sbatch"), style, "sbatch")
        GOLDEN.write_text(json.dumps(known, indent=1) + "\n")
    found = outcome(cluster, work, style, str(cluster.python.parent / "jurymast"), "submit", "--spares=1")
    assert found == json.loads(GOLDEN.read_text())[style]


def submit(cluster: Cluster, work: Path, script: str, *options: str) -> SlurmRun:
    cluster.login(["mkdir", str(work)])
    (work / "job.sbatch").write_text(script)
    runs = work / "runs"
    done = cluster.login(
        [str(cluster.python.parent / "jurymast"), "submit", "--parsable", *options, "job.sbatch"],
        cwd=work, timeout_s=60, check=False,
        env={**ENVIRONMENT, "PATH": f"{cluster.python.parent}:/usr/bin:/bin", "JURYMAST_RUNS": str(runs)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    return SlurmRun(cluster, find_run(job, runs).root, int(job))


def test_a_command_a_script_on_standard_input_and_an_array(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", str(work)])
    command = [str(cluster.python.parent / "jurymast"), "submit", "--parsable", "--spares=1"]
    environment = {"JURYMAST_RUNS": str(work / "runs"), "SBATCH_JOB_NAME": "named"}

    def job(*words: str, script: str = "") -> str:
        done = cluster.login(
            [*command, "--output=%A-%a", *words], cwd=work, env=environment, input=script, timeout_s=60
        )
        return done.stdout.strip()

    text = '#!/bin/sh\n#SBATCH --array=0-7\n#JURYMAST --name ours\necho "$0 $*"; exit $SLURM_ARRAY_TASK_ID\n'
    array = job("--array=2,4", script=text)
    after = job(f"--dependency=afternotok:{array}", "--wrap", 'echo "wrapped $SLURM_NNODES $SLURM_JOB_NAME"')
    cluster.wait_job(int(after), "COMPLETED", deadline_s=LIMIT_S)
    assert (work / f"{after}-4294967294").read_text() == "wrapped 1 named\n"
    scripts = [(work / f"{array}-{task}").read_text().split() for task in (2, 4)]
    assert [(Path(path).name, *rest) for path, *rest in scripts] == [("slurm_script",)] * 2
    names = [path.parent.name for path in (work / "runs").glob("*/plan.json")]
    runs = [name.partition("-ours-")[2][4:] for name in names]
    assert sorted(runs) == ["", "", "-task-2", "-task-4"]


LOSES_A_NODE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=out --partition=main
#JURYMAST --spares 1
srun python -u $SUM --slurm --until
srun --ntasks-per-node=1 -n2 echo said: alive
srun --ntasks-per-node=1 -n2 torchrun --nproc-per-node=1 $SUM second
echo said: $?
"""


def test_later_steps_do_without_a_node_that_was_lost(cluster: Cluster, tmp_path: Path) -> None:
    """Also of a training whose ranks find each other by Slurm's variables."""
    work = cluster.shared / tmp_path.name
    run = submit(cluster, work, LOSES_A_NODE)
    run.wait("the ranks", lambda s: bool(s.placement), LIMIT_S)
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    (work / "started").unlink()
    victim = run.state().placement[0]
    power_loss(run, victim)
    run.wait("the swap", lambda s: bool(s.incidents) and s.placement[0] != victim, LIMIT_S)
    wait_until("a step after it", (work / "started").exists, limit_s=LIMIT_S)
    (work / "stop").touch()
    assert run.wait_end().exit_code == 0
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    kept = [line for line in printed.splitlines() if line.startswith(("rank", "said"))]
    first = [f"rank {n} of 4, local {n % 2}, sum 10, word -, --slurm, --until" for n in range(4)]
    second = [f"rank {n} of 2, local 0, sum 3, word -, second" for n in range(2)]
    assert sorted(kept[:4]) == first, printed
    assert kept[4:6] == ["said: alive"] * 2, printed
    assert [*sorted(kept[6:8]), *kept[8:]] == [*second, "said: 0"], printed


TRAINS = """#!/bin/bash
#SBATCH --job-name=trains
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x.out --open-mode=append
#JURYMAST --spares 2
set -e
echo "said: begin"
srun bash -c 'exec torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 --max-restarts=3 \\
  {train} --steps {steps} --step-time 0.04 --save-every "10 steps" --out out.json'
echo "said: after $?"
"""


def test_power_losses_of_a_node_and_of_the_batch_host(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """The training goes on. What stands behind it in the script runs in the job's next life, which is told
    how the training ended and does not run it again."""
    work, steps = cluster.shared / tmp_path.name, "150"
    run = submit(cluster, work, TRAINS.format(train=SCRIPTS / "train_tiny.py", steps=steps))
    state = run.wait_safe(20, LIMIT_S)
    victim = next(node for node in state.placement if node != state.host)
    power_loss(run, victim)
    run.wait("the swap", lambda s: len(s.incidents) == 1 and s.incident is None)
    power_loss(run, run.wait_safe((run.state().incidents[0].step_restored or 0) + 20).host)
    state = run.wait_end(LIMIT_S)
    assert (state.exit_code, state.phase.value) == (0, "succeeded"), run.story()
    ended = cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    assert ended["Restarts"] == "1"
    printed = (work / "trains.out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    assert said == ["said: begin", "said: begin", "said: after 0"], printed
    assert "--max-restarts" in printed
    assert result(work / "out.json")["sha256"] == trained_plainly("--steps", steps, nodes=4)


REQUEUED = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=out --open-mode=append
echo "said: begin $SLURM_RESTART_COUNT $SLURM_NTASKS"
export MASTER_PORT=29531
srun python {train} --steps {steps} --step-time 0.04 --save-every "10 steps" --out out.json
echo "said: after $?"
"""


def test_without_a_spare_the_script_begins_again_and_its_training_goes_on(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    work, steps = cluster.shared / tmp_path.name, "80"
    script = REQUEUED.format(train=SCRIPTS / "train_tiny.py", steps=steps)
    run = submit(cluster, work, script, "--spares=0")
    state = run.wait_saved(20, LIMIT_S)
    power_loss(run, next(node for node in state.placement if node != state.host))
    state = run.wait_end(LIMIT_S)
    assert [i.action for i in state.incidents] == ["requeue"], run.story()
    assert (state.incidents[0].step_restored or 0) >= 10
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    assert said == ["said: begin  4", "said: begin 1 4", "said: after 0"], printed
    assert result(work / "out.json")["sha256"] == trained_plainly("--steps", steps, nodes=4)


def test_cancel_ends_the_script_too(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    script = "#!/bin/bash\n#SBATCH --output=out\ntorchrun $SUM --until\necho said: after\n"
    run = submit(cluster, work, script, "--spares=0")
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    code, _, error = jurymast(cluster, "cancel", str(run.directory.root))
    assert code == 0, error
    cluster.wait_job(run.job, "CANCELLED", deadline_s=LIMIT_S)
    assert run.state().phase.value == "cancelled", run.story()
    assert "said" not in (work / "out").read_text()
