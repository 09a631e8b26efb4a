"""What a batch script, its steps and its ranks are started with, by variable, against real sbatch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.runs import SCRIPTS
from support.slurm_runs import policy_file, running_cluster
from testcluster import Cluster
from testcluster.settings import SLURM_SYSTEM

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(2400)]

LIMIT_S = 1200.0
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --cpus-per-task=2 --gpus-per-node=2 --mem=100
#SBATCH --job-name=parity --output=%x-%A-%a.out --error=%x.err --comment=none
#JURYMAST train: yes
ulimit -n 777
umask 027
export OWN="a value"
cd sub
python $DUMP batch 0 "$@"
srun -N1 -n1 python $DUMP step SLURM_PROCID
srun torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
    --rdzv-endpoint=$(hostname):29517 $DUMP rank RANK
srun --ntasks=4 --gpus-per-task=1 --cpus-per-task=1 --error=task-%t.err python $DUMP task SLURM_PROCID
"""
# What differs for a reason, and is all that may. Jobs, processes, ports and this test's directories first.
ANYWAY = {
    "JURYMAST_POLICY", "JURYMAST_RUNS", "OLDPWD", "PWD", "SLURM_JOBID", "SLURM_JOB_ID",
    "SLURM_SUBMIT_DIR", "SLURM_TASK_PID",
    "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT", "_",
    "SLURM_JOB_END_TIME", "SLURM_JOB_SLUID", "SLURM_JOB_START_TIME",
}  # fmt: skip
FRONT_ENDS = {"BASH_FUNC_srun%%", "JURYMAST_SCRIPT_JOB", "JURYMAST_SCRIPT_RUN", "PATH", "PYTHONPATH"}
# Which nodes the ranks have is decided by us.
NODES = {
    "MASTER_ADDR", "SLURMD_NODENAME", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST",
    "SLURM_TOPOLOGY_ADDR",
}  # fmt: skip
# See the README: a rank's line to its agent, the interface for gloo, the flight recorder.
RANKS = NODES | {
    "GLOO_SOCKET_IFNAME", "TORCHELASTIC_ERROR_FILE", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    *(f"JURYMAST_{name}" for name in (
        "ADDRESS", "ATTEMPT", "EVENTS", "KEEP", "KEEPER", "LOG", "MTBF_S", "NODE", "PAGE", "RUN", "RUN_DIR",
        "SPARING", "STACKS", "STDERR")),
}  # fmt: skip
MAY_DIFFER = {
    "batch": FRONT_ENDS,
    "step": FRONT_ENDS | {"SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0"},
    # With one task a node, block and cyclic are the same.
    "rank": RANKS | {"MASTER_PORT", "SLURM_DISTRIBUTION", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"},
    # Slurm started one task a node, and bound none.
    "task": RANKS | {
        "JURYMAST_LOCAL_RANK", "JURYMAST_WORLD_SIZE", "SLURM_DISTRIBUTION", "SLURMD_TRES_BIND",
        "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE",
        "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK",
    },
}  # fmt: skip


# Four processes on each node that load torch, which the other side does without.
UNTESTED = "health: {preflight: off}"


def both_ways(cluster: Cluster, work: Path, script: str = SCRIPT) -> tuple[Any, Any]:
    """What the script has written under sbatch, and under us, in `work`: by the name of each file."""
    return told(cluster, by_sbatch(work), "sbatch", script=script), by_us(cluster, work, script)


def by_sbatch(work: Path) -> Path:
    return work.with_name(f"{work.name}-sbatch")


def by_us(cluster: Cluster, work: Path, script: str) -> dict[str, Any]:
    submit = (str(cluster.python.parent / "jurymast"), "submit", "--spares=1")
    return told(cluster, work, *submit, script=script)


def told(cluster: Cluster, work: Path, *submit: str, script: str) -> dict[str, Any]:
    cluster.login(["mkdir", "-p", str(work / "sub")])
    (work / "job.sbatch").write_text(script)
    done = cluster.login(
        [*submit, "--parsable", "job.sbatch", "an argument"], cwd=work, timeout_s=240, check=False,
        env={"DUMP": str(SCRIPTS / "dump_environment.py"), "PATH": f"{cluster.python.parent}:/usr/bin:/bin",
             "JURYMAST_RUNS": str(work / "runs"), "JURYMAST_POLICY": policy_file(cluster, work, UNTESTED)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    printed = (work / f"parity-{int(done.stdout)}-4294967294.out").read_text()
    assert ended["ExitCode"] == "0:0", printed
    return {path.stem: json.loads(path.read_text()) for path in (work / "sub").glob("*.json")}


# A step may begin before Slurm has the last one's processors back: it waits, and says so, or does not.
STEP_WAITS = re.compile(r"srun: (Job \d+ step creation (?:temporarily|still) disabled|Step created for )")


def said(work: Path) -> dict[str, list[str]]:
    """What the script, its steps and its ranks have said, and Slurm of them, by file; those of the job have
    its number."""
    files = [*work.glob("parity*.*"), *(work / "sub").glob("*.err")]
    lines = {path.name.partition("-4")[0]: path.read_text().splitlines() for path in files}
    return {
        re.sub(r"\d{3,}", "N", name): sorted(
            re.sub(r"\bn\d+\b|\[\d+\](?=:)|(?<=\bjob )\d+", "N", line)
            for line in found
            if line.startswith(("said ", "srun: ", "cpu-bind=")) and not STEP_WAITS.match(line)
        )
        for name, found in lines.items()
    }


def test_every_variable(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    theirs, ours = both_ways(cluster, work)
    names = ["batch-0", "step-0", *(f"rank-{n}" for n in range(4)), *(f"task-{n}" for n in range(4))]
    assert (sorted(theirs), sorted(ours)) == (sorted(names), sorted(names))
    differences = [line for name in names for line in compared(name, theirs[name], ours[name])]
    assert not differences, "\n".join(differences)
    assert ours["rank-0"]["environment"]["SLURM_JOB_NODELIST"].startswith("n[")
    assert said(work) == said(by_sbatch(work))


def compared(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    lines = []
    for kind in ("limits", "mask", "arguments"):
        if theirs[kind] != ours[kind]:
            lines.append(f"{name}: {kind}: {theirs[kind]} / {ours[kind]}")
    here, there = ours["environment"], theirs["environment"]
    for variable in sorted({*here, *there} - ANYWAY - MAY_DIFFER[name.partition("-")[0]]):
        if here.get(variable) != there.get(variable):
            lines.append(f"{name}: {variable}: {there.get(variable)} / {here.get(variable)}")
    return lines


# torch has as many threads as there are processors, unless OMP_NUM_THREADS says how many.
BOUND = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=100 --gpus-per-node=2
#SBATCH --job-name=parity --output=%x-%A-%a.out --error=%x.err
#JURYMAST train: yes
cd sub
cat > bound.py <<END
import os, sys
task, gpus = os.environ["SLURM_PROCID"], os.environ["CUDA_VISIBLE_DEVICES"]
print("said", *sys.argv[1:], task, sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"), gpus)
END
srun --ntasks=4 python bound.py by Slurm
srun --ntasks=4 --cpus-per-task=1 --cpu-bind=map_cpu:1,0 --gpu-bind=map_gpu:1,0 python bound.py listed
SLURM_CPU_BIND=quiet,mask_cpu:0x3,0x2 srun --ntasks=4 --gpus-per-task=1 python bound.py by a variable
srun --ntasks=4 --cpus-per-task=1 --cpu-bind=none --gpu-bind=single:2 python bound.py not bound
srun --ntasks=4 --cpus-per-task=1 --cpu-bind=verbose,map_cpu:1,0 python bound.py and says so
srun --ntasks=4 --cpus-per-task=1 --cpu-bind=v,cores bash -c "python bound.py in a shell"
srun --ntasks=4 --cpu-bind=v,none python bound.py and says that it is not
srun --ntasks=4 --gpus=2 python bound.py by a total
srun --ntasks=4 --gpu-bind=wrong python bound.py refused || echo said refused $?
"""


# Which one a step of one processor a node has depends on how soon Slurm has the last step's back.
# Newer releases give a step as many processors for each task as its job asked for, and refuse the last one.
INHERITED = """#!/bin/bash
#SBATCH --nodes=2 --cpus-per-task=2 --mem=100
#SBATCH --job-name=parity --output=%x-%A-%a.out --error=%x.err
#JURYMAST train: yes
cd sub
cat > bound.py <<END
import os, sys
names = ("SLURM_PROCID", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "OMP_NUM_THREADS")
told, has = [os.environ.get(name) for name in names], sorted(os.sched_getaffinity(0))
print("said", *sys.argv[1:], *told, has if "many" in sys.argv else len(has))
END
srun --ntasks=2 python bound.py as the job
SRUN_CPUS_PER_TASK=1 srun --ntasks=2 python bound.py by its own variable
srun --ntasks=2 --cpus-per-task=1 python bound.py by an option
srun --ntasks=4 python bound.py too many || echo said refused $?
"""


@pytest.fixture
def binding(place: Path) -> Iterator[Cluster]:
    """A cluster that binds tasks to processors, of which a node has as many as this machine for sure."""
    with running_cluster(place, "binds", nodes=3, cpus=2, conf=["TaskPlugin=task/affinity"]) as running:
        yield running
        assert running.repair_all() == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.long
@pytest.mark.parametrize("script", [BOUND, INHERITED], ids=["bound", "inherited"])
def test_tasks_have_the_processors_and_threads_that_slurm_would_give_them(
    binding: Cluster, tmp_path: Path, script: str
) -> None:
    work = binding.shared / tmp_path.name[-20:]
    both_ways(binding, work, script)
    found = said(work)
    assert found == said(by_sbatch(work))
    lines = [line for told in found.values() for line in told]
    counts = [sum(line.startswith(word) for line in lines) for word in ("said", "cpu-bind=")]
    few = 10 if binding.options.slurm == SLURM_SYSTEM else 7
    assert counts == ([33, 12] if script == BOUND else [few, 0]), found


# The head of the script says how many GPUs a task has.
GPUS_OF_TASKS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=100 --gpus-per-task=2
#SBATCH --job-name=parity --output=%x-%A-%a.out --error=%x.err
#JURYMAST train: yes
cd sub
cat > gpus.py <<END
import os, sys
names = ("SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")
print("said", *sys.argv[1:], *map(os.environ.get, names))
END
srun python gpus.py by the head
srun --gpus-per-task=1 python gpus.py by the step
srun --gpu-bind=none python gpus.py not bound | sed 's/None/0,1,2,3/g'
srun --gpu-bind=map_gpu:3,1 python gpus.py listed
srun --gpus=4 python gpus.py by a total
srun --gpus-per-task=1 --ntasks=2 --ntasks-per-node=1 torchrun --nnodes=2 --rdzv-backend=c10d \\
    --rdzv-endpoint=$(hostname):29519 gpus.py for a torchrun
"""


def other_lines(told: list[str]) -> list[str]:
    return [line for line in told if "by the step" not in line]


def test_tasks_have_the_gpus_that_the_job_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name[:20]
    both_ways(cluster, work, GPUS_OF_TASKS)
    found, wanted = said(work), said(by_sbatch(work))
    if cluster.options.slurm != SLURM_SYSTEM:
        # It binds the GPUs of a step as it would the job's: task 1 would see that of task 0, and that alone.
        assert [line for line in found["parity-N"] if "by the step" in line] == [
            f"said by the step {rank} {rank % 2} {rank % 2} 2" for rank in range(4)
        ]
        found, wanted = ({name: other_lines(told) for name, told in side.items()} for side in (found, wanted))
    assert found == wanted
    lines = [line for told in found.values() for line in told]
    assert {"said by the head 0 0,1 0,1 4", "said by the head 3 2,3 2,3 4"} <= set(lines), found
    assert {"said by a total 3 2,3 2,3 4", "said for a torchrun 1 0 0 1"} <= set(lines), found


# Slurm would give one node a single GPU, and another one as many as it has.
TOTAL_OF_GPUS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=100 --gpus=4
#SBATCH --job-name=parity --output=%x-%A-%a.out --error=%x.err
#JURYMAST train: yes
cd sub
cat > gpus.py <<END
import os
names = ("SLURM_PROCID", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS")
print("said", *map(os.environ.get, names), "JURYMAST_RUN" in os.environ)
END
srun python gpus.py
"""


def test_nodes_share_a_total_of_gpus_alike(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name[:20]
    by_us(cluster, work, TOTAL_OF_GPUS)
    lines = [line for told in said(work).values() for line in told]
    assert lines == [f"said {task} 0,1 2 None 4 True" for task in range(4)]


TOLD_TO_EXPORT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=100 --job-name=parity --output=%x-%A-%a.out --error=%x.err
#JURYMAST train: yes
cd sub
export OWN=1
cat > show.py <<END
import os, sys
print("said", *sys.argv[1:], os.environ["SLURM_PROCID"], "HOME" in os.environ, os.environ.get("OWN"))
END
srun --ntasks=4 --export=NONE python show.py; echo said $?
srun --ntasks=4 --export=NONE $(which python) show.py by its path; echo said $?
srun --ntasks=4 --export=OWN python show.py; echo said $?
srun --ntasks=4 --export=OWN,PATH python show.py with PATH; echo said $?
SLURM_EXPORT_ENV=NIL srun --ntasks-per-node=1 torchrun --nnodes=2 show.py; echo said $?
"""


def test_tasks_without_path_are_srun_s_to_refuse(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name[:20]
    both_ways(cluster, work, TOLD_TO_EXPORT)
    found = said(work)
    assert found == said(by_sbatch(work))
    assert sum(line == "said 0" for told in found.values() for line in told) == 2, found


UNBOUND = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=100 --job-name=parity --output=%x-%A-%a.out --error=%x.err
#JURYMAST train: yes
cd sub
cat > bound.py <<END
import os, sys
binding = sorted((name, value) for name, value in os.environ.items() if "CPU_BIND" in name)
print("said", *sys.argv[1:], os.environ["SLURM_PROCID"], binding)
END
srun --ntasks=4 python bound.py by Slurm
srun --ntasks=4 --cpu-bind=cores python bound.py by an option
srun --ntasks=4 --cpu_bind=v,none bash -c "python bound.py by its other name"
SLURM_CPU_BIND=verbose,map_cpu:1,0 srun --ntasks=4 python bound.py by a variable
"""


def test_what_srun_says_of_a_binding_where_slurm_binds_nothing(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name[:20]
    both_ways(cluster, work, UNBOUND)
    found = said(work)
    assert found == said(by_sbatch(work))
    count = 3 if cluster.options.slurm == SLURM_SYSTEM else 0  # newer ones are silent
    assert [line.partition(":")[0] for line in found["parity.err"]] == ["srun"] * count, found


# The same ranks without a batch script. SBATCH_EXPORT takes the user's variables away, and the job around the
# submission would leave its own.
AS_A_SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=2 --mem=100
#SBATCH --job-name=parity --output=%x-%A-%a.out --comment=none
#JURYMAST train: yes
cd sub
srun torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29518 \\
    $DUMP rank RANK
"""
PLAIN = "salloc --quiet -N1 -n1 -c3 --mem=50 jurymast submit --wait --spares=1 -N2 --nproc-per-node=2"
OPTIONS = "--cpus-per-task=1 --gpus-per-node=2 --mem=100 --job-name=parity --comment=none"
COMPARED = (
    "SLURM",
    "SRUN",
    "CUDA",
    "GPU",
    "ROCR",
    "OMP",
    "RANK",
    "LOCAL",
    "GROUP",
    "ROLE",
    "WORLD",
    "MASTER",
)
# What SBATCH_EXPORT asks for, and that the script did not.
ASKED_FOR = {"SLURM_EXPORT_ENV", "SLURM_GET_USER_ENV"}


def test_every_variable_of_a_plain_run_that_is_submitted_inside_a_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    work = cluster.shared / tmp_path.name
    theirs = told(cluster, by_sbatch(work), "sbatch", script=AS_A_SCRIPT)
    cluster.login(["mkdir", "-p", str(work)])
    command = [*PLAIN.split(), *OPTIONS.split(), "--", str(SCRIPTS / "dump_environment.py"), "rank", "RANK"]
    path = f"{cluster.python.parent}:/usr/bin:/bin"
    environment = {"JURYMAST_RUNS": str(work / "runs"), "SBATCH_EXPORT": "NONE", "PATH": path,
                   "JURYMAST_POLICY": policy_file(cluster, work, UNTESTED)}  # fmt: skip
    cluster.login(command, cwd=work, env=environment, timeout_s=LIMIT_S)
    for number in range(4):
        name = f"rank-{number}"
        ours = json.loads((work / f"{name}.json").read_text())
        assert {"HOME", "PATH"} <= ours["environment"].keys()
        found = {**theirs[name], "limits": ours["limits"], "mask": ours["mask"]}
        for side in (ours, found):
            side["arguments"] = []
            kept = {n: v for n, v in side["environment"].items() if n.startswith(COMPARED)}
            side["environment"] = {n: v for n, v in kept.items() if n not in ASKED_FOR}
        assert compared(name, found, ours) == []


SHOWS = """import os, sys
told = ["PATH" in os.environ, "HOME" in os.environ, os.environ.get("FOO", "-"), os.environ.get("BAR", "-")]
open(sys.argv[1], "w").write(" ".join(map(str, told)))
"""
# What a plain run is told to export, and what its ranks then have.
EXPORTS = {
    "none": (["--export=NONE"], {}, "True True - -"),
    "list": (["--export=FOO=1 2,BAR"], {}, "True True 1 2 mine"),
    "all": (["--export=ALL,FOO=3"], {}, "True True 3 mine"),
    "variable": ([], {"SLURM_EXPORT_ENV": "NONE"}, "True True - mine"),
}  # fmt: skip


def test_ranks_of_a_plain_run_have_what_it_exports(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", "-p", str(work)])
    (work / "show.py").write_text(SHOWS)
    users = {"PATH": f"{cluster.python.parent}:/usr/bin:/bin", "BAR": "mine"}
    submit = ["jurymast", "submit", "--parsable", "--spares=0", "-N1", "--runs", str(work / "runs")]
    jobs = [
        cluster.login(
            [*submit, *options, "--", "show.py", name],
            cwd=work,
            env={**users, **variables},
            timeout_s=LIMIT_S,
        ).stdout
        for name, (options, variables, _) in EXPORTS.items()
    ]
    for job in jobs:
        cluster.wait_job(int(job), "COMPLETED", deadline_s=LIMIT_S)
    found = {name: (work / name).read_text() for name in EXPORTS}
    assert found == {name: told for name, (_, _, told) in EXPORTS.items()}
