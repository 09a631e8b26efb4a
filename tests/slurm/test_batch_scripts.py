"""Batch scripts as people have them, submitted unchanged to a real cluster."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.slurm_runs import SCRIPT_ENVIRONMENT
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

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
        env={**SCRIPT_ENVIRONMENT, "PATH": path, "JURYMAST_RUNS": str(work / "runs")},
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
