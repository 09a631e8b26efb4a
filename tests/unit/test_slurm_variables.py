"""Slurm's variables as scripts and ranks see them, in plain runs and in batch scripts alike."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.agent.real_io import users_variables
from jurymast.cluster.sbatch_command import environment_for_sbatch
from jurymast.core.judges import slurm_variables
from jurymast.core.judges.slurm_variables import of_a_task, of_active_nodes, step_in
from jurymast.worker.elastic import task_variables
from support.node_model import plan as plan_on

# A job of two active nodes and a spare one, with 16 processors each, as Slurm 22.05 and 24.11 describe it,
# and a step of one task a node in it.
STEP = {
    "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NODELIST": "n[1-3]",
    "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_JOB_NODELIST_PACK_GROUP_0": "n[1-3]", "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_GPUS": "h100:12",
    "SLURM_JOB_CPUS_PER_NODE": "16(x3)", "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "16(x3)",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_TASKS_PER_NODE_PACK_GROUP_0": "1(x3)",
    "SLURM_PROCID": "2", "SLURM_NODEID": "2", "SLURM_GTIDS": "2", "SLURM_LOCALID": "0",
}  # fmt: skip
SAME = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "16", "SLURMD_NODENAME": "n3", "HOME": "/home/me"}
# What Slurm sets for the second of two tasks in a job of the nodes n1 and n3 alone.
WITHOUT_SPARE = {
    "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NODELIST": "n[1,3]", "SLURM_NODELIST": "n[1,3]",
    "SLURM_STEP_NODELIST": "n[1,3]", "SLURM_JOB_NODELIST_PACK_GROUP_0": "n[1,3]", "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_GPUS": "h100:8",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2)", "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "16(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE_PACK_GROUP_0": "1(x2)",
    "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_GTIDS": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
RANK = {"LOCAL_RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}


def plain_rank() -> dict[str, str]:
    """The variables of a plain run's rank: what its agent leaves, and what its host adds."""
    plan = plan_on(cluster="slurm")
    step = users_variables(plan, ("n1", "n2", "n3"), {**STEP, **SAME})
    return {**step, **task_variables(RANK, step, "n[1,3]", each_rank=False)}


def scripts_rank() -> dict[str, str]:
    """Those of a rank that a batch script's torchrun starts: the script's, then the step's, then as above."""
    script = of_active_nodes({**STEP, **SAME}, 3, 2, "n[1-2]")
    step = {**script, **of_a_task(script, "n[1-2]", nodes=2)}
    plan = replace(plan_on(cluster="slurm"), batch=True)
    step = users_variables(plan, ("n1", "n2", "n3"), step)
    return {**step, **task_variables(RANK, step, "n[1,3]", each_rank=False)}


def test_every_variable_of_the_table_is_tried() -> None:
    assert slurm_variables.KINDS.keys() <= STEP.keys() == WITHOUT_SPARE.keys()


@pytest.mark.parametrize("rank", [plain_rank, scripts_rank])
@pytest.mark.parametrize("name", STEP)
def test_ranks_see_a_job_without_spare_nodes(rank: object, name: str) -> None:
    assert callable(rank)
    assert rank()[name] == WITHOUT_SPARE[name]


def test_plain_runs_and_batch_scripts_differ_in_nothing() -> None:
    assert plain_rank() == scripts_rank() == {**WITHOUT_SPARE, **SAME}


def test_ranks_do_not_see_the_options_of_our_srun() -> None:
    plan = plan_on(cluster="slurm")
    ours = {"SLURM_CPU_BIND": "none", "SLURM_CPU_BIND_TYPE": "none", "SLURM_OPEN_MODE": "a"}
    assert users_variables(plan, ("n1", "n2", "n3"), {**ours, **SAME}) == SAME


@pytest.mark.parametrize("where", ["local", "slurm", "a batch script"])
def test_ranks_get_nothing_that_another_run_has_left_in_the_environment(where: str) -> None:
    """In a file that somebody has saved in a rank, for example, and a job script reads. Their stderr went to
    that run's log, their images into its memory."""
    plan = replace(plan_on(cluster="local" if where == "local" else "slurm"), batch=where == "a batch script")
    theirs = dict.fromkeys(named_in_the_source() - USERS, "/elsewhere")
    kept = {"JURYMAST_CADENCE_S": "60", "JURYMAST_CHECKPOINTS": "/scratch/me", "HOME": "/home/me"}
    assert users_variables(plan, ("n1",), {**theirs, **kept}) == kept


# What people set, what an agent always sets anew, and what only processes above the ranks read.
USERS = {
    f"JURYMAST_{name}"
    for name in (
        "CADENCE_S", "CADENCE_STEPS", "CHECKPOINTS", "KEEP", "MTBF_S", "RUNS", "SITE", "COMPLETE",
        "RUN", "RUN_DIR", "NODE", "ADDRESS", "LINE", "SCRIPT_JOB", "SCRIPT_RUN", "SCRIPT_SHELL", "STEP",
        "TASKS_ALONE",
    )
}  # fmt: skip


def named_in_the_source() -> set[str]:
    package = Path(slurm_variables.__file__).parents[1]
    texts = (path.read_text() for path in package.rglob("*.py"))
    return {name for text in texts for name in re.findall(r"\bJURYMAST_[A-Z_]*[A-Z]\b", text)}


def test_runs_without_slurm_leave_its_variables_alone() -> None:
    assert users_variables(plan_on(cluster="local"), ("local-1",), STEP) == STEP


def test_ranks_that_slurm_would_start_have_its_numbers() -> None:
    tasks = task_variables(RANK, STEP, "n[1,3]", each_rank=True)
    assert (tasks["SLURM_PROCID"], tasks["SLURM_LOCALID"], tasks["SLURM_NODEID"]) == ("5", "1", "1")
    assert (tasks["SLURM_NTASKS"], tasks["SLURM_TASKS_PER_NODE"]) == ("8", "4(x2)")
    assert tasks["SLURM_GTIDS"] == "4,5,6,7"
    assert "SLURM_NTASKS_PER_NODE" not in tasks, "no option says it"
    assert "PMI_RANK" not in tasks


def test_ranks_have_the_numbers_that_an_mpi_would_give_them() -> None:
    """Accelerate, among others, reads them. Our own step has one task a node, spare ones included."""
    step = {**STEP, "PMI_RANK": "2", "PMI_SIZE": "3", "PMIX_RANK": "2"}
    task = task_variables(RANK, step, "n[1,3]", each_rank=True)
    assert [task[name] for name in ("PMI_RANK", "PMIX_RANK", "PMI_SIZE")] == ["5", "5", "8"]
    of_a_torchrun = task_variables(RANK, step, "n[1,3]", each_rank=False)
    assert [of_a_torchrun[name] for name in ("PMI_RANK", "PMIX_RANK", "PMI_SIZE")] == ["1", "1", "2"]


def test_lists_of_unequal_nodes_keep_the_first_entries() -> None:
    for value, narrow in [("4,8(x2)", "4,8"), ("16(x2),8", "16(x2)"), ("(null)", "(null)")]:
        assert of_active_nodes({"SLURM_TASKS_PER_NODE": value}, 3, 2, "") == {"SLURM_TASKS_PER_NODE": narrow}


@pytest.mark.parametrize(
    "left",
    [
        {"SLURM_MEM_PER_NODE": "100"}, {"SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "4"},
        {"SLURM_NTASKS_PER_NODE": "2"}, {"SLURM_CPU_BIND": "verbose"}, {"SLURM_EXPORT_ENV": "NONE"},
        {"SBATCH_CPU_BIND": "quiet"}, {"PMI_RANK": "1", "PMIX_RANK": "1"}, {"CUDA_VISIBLE_DEVICES": "2"},
        {"TORCHELASTIC_RUN_ID": "x"}, {"JURYMAST_SAVED_STEP": "70", "JURYMAST_RUN_DIR": "/r"},
    ],
)  # fmt: skip
def test_a_job_from_inside_another_begins_clean(left: dict[str, str]) -> None:
    users = {
        "HOME": "/home/me",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "a",
        "JURYMAST_RUNS": "/r",
    }
    assert environment_for_sbatch({**users, **left, "SLURM_JOB_ID": "7"}) == users


def test_a_submission_from_outside_keeps_what_the_user_has_set() -> None:
    users = {"SLURM_MPI_TYPE": "pmix", "CUDA_VISIBLE_DEVICES": "1", "SLURM_CPU_BIND": "cores"}
    assert environment_for_sbatch({**users, "SBATCH_WAIT": "1"}) == users


@pytest.mark.parametrize(
    ("number", "step"),
    [("0", "0"), ("17", "17"), ("-5", "batch"), ("4294967291", "batch"), ("-6", "interactive"),
     ("4294967290", "interactive")],
)  # fmt: skip
def test_a_script_and_the_shell_of_an_allocation_are_no_steps_of_srun_s(number: str, step: str) -> None:
    assert step_in({"SLURM_STEP_ID": number}) == step


def test_older_releases_give_a_script_no_number() -> None:
    assert step_in({"SLURM_PROCID": "0"}) == "batch"
