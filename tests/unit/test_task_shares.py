"""What a task has of its node, against what Slurm 22.05 gives it: the masks here are those of its slurmd on
machines of two sockets with four cores."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import pytest

from jurymast.cluster import control
from jurymast.cluster.control import KILLS_STEP, SURVIVE, Binding, around_tasks, binding_of, survive, unbound
from jurymast.core.judges.task_shares import Processor, gpus, processors
from jurymast.core.state.settings import TaskShares
from jurymast.script.sharing import (
    DERIVED,
    VARIABLES,
    all_gpus,
    each_nodes_gpus,
    fits,
    gpus_on_node,
    read_by,
    shares_of,
    with_cpus,
)
from jurymast.script.srun import parse
from jurymast.worker.elastic import own_gpus
from jurymast.worker.shares import line, places

BINDS = Binding(tasks=True)


def asked(typed: str, slurm: Binding = BINDS, **environment: str) -> TaskShares:
    srun = parse([*typed.split(), "x"])
    assert srun is not None
    found = shares_of(srun, environment, slurm, VARIABLES.values())
    assert msgspec.json.decode(msgspec.json.encode(found), type=TaskShares) == found, "nodes are told by JSON"
    return found


def masks(typed: str, threads: int = 2, slurm: Binding = BINDS, own: range | None = None) -> str:
    """As Slurm would log them; "" if no task is bound."""
    machine = {n: Processor(n // threads // 4, n // threads, n // threads // 4) for n in range(8 * threads)}
    count = int(typed.partition("-n")[2].partition(" ")[0])
    found = processors(machine, own or range(8 * threads), count, asdict(asked(typed, slurm)))
    return ",".join(f"{sum(1 << number for number in task):x}" for task in found)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("-n4", ""), ("-n3", ""), ("-n2", "ff,ff00"), ("-n8", "3,300,c,c00,30,3000,c0,c000"),
        ("-n4 -c2", "3,300,c,c00"), ("-n2 -c4", "f,f00"), ("-n4 -c1", "1,2,4,8"), ("-n2 -c8", "ff,ff00"),
        ("-n8 -c1", "3,300,c,c00,30,3000,c0,c000"), ("-n4 --exact", "1,2,4,8"),
        ("-n12 -c1", "1,100,2,200,4,400,8,800,10,20,40,80"), ("-n2 --exact --cpu-bind=cores", "3,3"),
        ("-n4 --cpu-bind=cores", "3,300,c,c00"), ("-n4 --cpu-bind=threads", "1,100,2,200"),
        ("-n4 --cpu-bind=v,sockets", "ff,ff00,ff,ff00"), ("-n4 -c2 --cpu-bind=sockets", "f,f00,f,f00"),
        ("-n4 -c2 --cpu-bind=cores", "3,300,c,c00"), ("-n4 --cpu-bind=cores -m block:block", "3,c,30,c0"),
        ("-n4 -c2 -m block:block", "3,c,30,c0"), ("-n4 -c2 -m cyclic", "3,300,c,c00"),
        ("-n4 -c2 --distribution=plane=4", "3,c,30,c0"),
        ("-n4 -c4 -m block:fcyclic", "303,c0c,3030,c0c0"), ("-n4 --hint=nomultithread", "1,100,4,400"),
        ("-n4 -c2 --hint=nomultithread", "5,500,50,5000"), ("-n2 -c4 --threads-per-core=1", "55,5500"),
        ("-n8 --threads-per-core=1", "1,100,4,400,10,1000,40,4000"),
        ("-n4 -c2 --threads-per-core=1 --cpu-bind=cores", "f,f00,f0,f000"),
        ("-n4 --hint=compute_bound", "3,300,c,c00"), ("-n4 --hint=compute_bound -c2", "f,f00,f0,f000"),
        ("-n4 --hint=multithread", "1,100,2,200"), ("-n4 --ntasks-per-core=1", "3,300,c,c00"),
        ("-n4 --ntasks-per-socket=2 -c2", "f,f00,f,f00"), ("-n4 --cpu-bind=none", ""),
        ("-n4 -c2 --cpu-bind=verbose,no", ""), ("-n4 --cpu-bind=quiet", ""),
        ("-n3 --cpu-bind=map_cpu:3,0x5", "8,20,8"), ("-n2 --cpu-bind=verbose,map_cpu:3,99", ""),
        ("-n3 --cpu-bind=mask_cpu:0x3*2,c", "3,3,c"), ("-n2 --cpu-bind=mask_cpu:f0000,30001", "ffff,1"),
        ("-n2 --cpu-bind=map_ldom:1,0", "ff00,ff"), ("-n2 --cpu-bind=rank_ldom", "ff,ff00"),
        ("-n2 --cpu-bind=rank", "1,2"), ("-n2 --cpu-bind=ldoms", "ff,ff00"),
    ],
)  # fmt: skip
def test_processors_of_a_machine_with_two_threads_a_core(typed: str, told: str) -> None:
    assert masks(typed) == told


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("-n2", "f,f0"), ("-n4 -c2", "3,30,c,c0"), ("-n4 -c1", "1,10,2,20"),
        ("-n8", "1,10,2,20,4,40,8,80"), ("-n4 --cpu-bind=sockets", "f,f0,f,f0"), ("-n3", ""),
        ("-n4 -c2 --hint=nomultithread", "3,30,c,c0"), ("-n9 --cpu-bind=cores", ""),
    ],
)  # fmt: skip
def test_processors_of_a_machine_with_one_thread_a_core(typed: str, told: str) -> None:
    assert masks(typed, threads=1) == told


def test_processors_in_a_job_that_has_a_part_of_its_node() -> None:
    assert masks("-n4", own=range(8)) == "3,c,30,c0", "as many cores as tasks"
    assert masks("-n8", own=range(8)) == "1,2,4,8,10,20,40,80"
    assert masks("-n2 -c4", own=range(8)) == "f,f0"
    assert masks("-n2 -c3", own=range(8)) == "ff,ff", "whole cores, and no rule matches"


def test_what_slurms_configuration_says_of_binding() -> None:
    text = "TaskPlugin              = {}\nTaskPluginParam         = {}\nSelectTypeParameters    = {}\n"
    assert binding_of("") == binding_of(text.format("task/cgroup", "(null type)", "CR_CORE")) == Binding()
    found = binding_of(text.format("task/cgroup,task/affinity", "autobind=cores", "CR_CORE"))
    assert found == Binding(tasks=True, otherwise="cores")
    assert masks("-n4", slurm=found) == "3,300,c,c00"
    assert masks("-n4 --cpu-bind=none", slurm=found) == masks("-n2 -c1", slurm=Binding()) == ""
    found = binding_of(text.format("task/affinity", "", "CR_CPU,CR_CORE_DEFAULT_DIST_BLOCK"))
    assert masks("-n4 -c2", slurm=found) == "3,c,30,c0"


@pytest.mark.parametrize("version", ["24.11.3", "23.02.1", ""])
@pytest.mark.parametrize("site", ["(null)", "autobind=cores,OOMKillStep"])
@pytest.mark.parametrize("job", [None, "0", "1"])
def test_srun_is_told_to_kill_no_step_for_want_of_memory_where_it_may_and_knows_of_it(
    version: str, site: str, job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's choice, or the job's (sbatch --oom-kill-step): agents must outlive what ranks do."""
    config = f"SLURM_VERSION = {version}\nTaskPluginParam  = {site}\n" if version else ""
    monkeypatch.setattr(control, "_config", lambda: config)
    monkeypatch.delenv(KILLS_STEP, raising=False)
    if job is not None:
        monkeypatch.setenv(KILLS_STEP, job)
    may = version == "24.11.3" and (job == "1" or "OOM" in site)
    assert survive() == [*SURVIVE, "--oom-kill-step=0"][: len(SURVIVE) + may]


@pytest.mark.parametrize(
    ("config", "told"),
    [("TaskPlugin = task/affinity\n", ["--cpu-bind=none"]), ("TaskPlugin = task/none\n", []),
     ("", ["--cpu-bind=none"])],
)  # fmt: skip
def test_srun_is_told_to_bind_no_task_only_where_slurm_may_bind_some(
    config: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it would say that it cannot bind."""
    monkeypatch.setattr(control, "_config", lambda: config)
    assert unbound() == told


def test_which_programs_slurm_runs_around_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "TaskEpilog              = (null)\nTaskPlugin = task/none\nTaskProlog              = /etc/p.sh\n"
    monkeypatch.setattr(control, "_config", lambda: config)
    assert around_tasks() == ["TaskProlog"]


def test_a_task_says_to_what_it_is_bound_as_under_slurm() -> None:
    ways = [asked(f"--cpu-bind={way}") for way in ("v,cores", "verbose,map_cpu:1,0", "v,none", "quiet")]
    assert [one.verbose for one in ways] == [True, True, True, False]
    assert not asked("--cpu-bind=v", slurm=Binding()).verbose, "Slurm binds none, and says so"
    told = [line([0, 2], 12, 3, asdict(one)).replace(f"[{os.getpid()}]", "[N]") for one in ways[:3]]
    begin = f" - {os.uname().nodename.partition('.')[0]}, task 12  3 [N]: mask "
    assert told == [
        f"cpu-bind=MASK{begin}0x5 set\n", f"cpu-bind=MAP {begin}0x5 set\n", f"cpu-bind=NONE{begin}0x0\n"
    ]  # fmt: skip
    newer = asdict(ways[2]) | {"unbound_mask": True}
    assert line([0, 2], 12, 3, newer).endswith(": mask 0x5\n"), "as from Slurm 24.11 on"


def test_srun_reads_variables_where_it_has_no_options() -> None:
    said = asked(
        "-n4", SLURM_CPU_BIND="quiet,mask_cpu:0x3", SRUN_CPUS_PER_TASK="2", SLURM_HINT="nomultithread"
    )
    assert (said.bound_to, said.cpus, said.threads_per_core) == ("mask_cpu:0x3", 2, 1)
    said = asked("-n4 -c3 --cpu-bind=cores", SLURM_CPU_BIND="threads", SRUN_CPUS_PER_TASK="2")
    assert (said.bound_to, said.cpus) == ("cores", 3)
    assert asked("-n4", SLURM_CPUS_PER_TASK="2").cpus == 0, "which is the job's"
    assert asked("-n4 --tres-per-task=cpu=2,gres/gpu:1").cpus == 2
    assert asked("-n4", SLURM_DISTRIBUTION="block:block").distribution == "block"


@pytest.mark.parametrize(
    ("typed", "environment", "cpus"),
    [
        ("-n4", {"SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu=3"}, 3),
        ("-n4", {"SLURM_TRES_PER_TASK": "gres/gpu:1,cpu:2"}, 2),
        ("-n4 -c1", {"SLURM_TRES_PER_TASK": "cpu=2"}, 1),
        ("-n4 --tres-per-task=cpu:2", {"SLURM_CPUS_PER_TASK": "3"}, 2),
        ("-n4", {"SRUN_CPUS_PER_TASK": "2"}, 0),
        ("-n4", {"SRUN_CPUS_PER_TASK": "2", "SLURM_CPUS_PER_TASK": "3"}, 3),
    ],
)
def test_a_newer_sruns_tasks_have_the_processors_that_their_job_asked_for(
    typed: str, environment: dict[str, str], cpus: int
) -> None:
    """As with srun 24.11 and 26.05."""
    srun = parse([*typed.split(), "x"])
    assert srun is not None
    found = shares_of(srun, environment, BINDS, {*VARIABLES.values(), *DERIVED} - {"SRUN_CPUS_PER_TASK"})
    assert (found.cpus, found.exactly) == (cpus, bool(cpus))


def test_the_installed_srun_tells_which_variables_it_reads(tmp_path: Path) -> None:
    every = {*VARIABLES.values(), *DERIVED}
    older, newer = every - {"SLURM_CPUS_PER_TASK"}, every - {"SRUN_CPUS_PER_TASK"}
    for name, text, release, told in [
        ("22.05", b"\x7fELF\0SLURM_HINT\0SRUN_CPUS_PER_TASK\0X_SLURM_EXACT\0", (26, 5, 5),
         {"SLURM_HINT", "SRUN_CPUS_PER_TASK"}),
        ("24.11", b"\x7fELF\0SLURM_CPUS_PER_TASK\0SLURM_NTASKS_PER_CORE\0", (22, 5, 8),
         {"SLURM_CPUS_PER_TASK", "SLURM_NTASKS_PER_CORE"}),
        ("wrapper", b"#!/bin/sh\nunset SRUN_CPUS_PER_TASK\nexec srun", (24, 11, 5), newer),
        ("older-wrapper", b"#!/bin/sh\n", (24, 5, 1), older),
        ("nowhere", None, (), older),
    ]:  # fmt: skip
        if text is not None:
            (tmp_path / name).write_bytes(text)
        assert read_by(str(tmp_path / name), release) == told, name


def test_a_variable_that_srun_does_not_read_binds_no_task() -> None:
    """srun 22.05 reads neither, and 24.11 only the first, also if the job has them."""
    srun = parse(["-n4", "x"])
    assert srun is not None
    job = {"SLURM_NTASKS_PER_CORE": "1", "SLURM_NTASKS_PER_SOCKET": "2"}
    assert [shares_of(srun, job, BINDS, read).bound_to for read in ((), {"SLURM_NTASKS_PER_CORE"})] == [
        "", "cores"
    ]  # fmt: skip


def test_srun_refuses_tasks_for_which_the_job_has_too_few_processors() -> None:
    def fit(cpus: int, tasks: int, nodes: int, each: str) -> bool:
        return fits(cpus, tasks, nodes, {"SLURM_JOB_CPUS_PER_NODE": each} if each else {})

    fitting = [(4, 2, 2, "8(x2)"), (4, 3, 2, "8,16"), (100, 2, 2, ""), (0, 2, 2, "2(x2)")]
    assert [fit(*one) for one in fitting] == [True] * 4
    # If nothing says how many a task has, it has one (srun 24.11 and 26.05).
    assert [fit(5, 2, 2, "8(x2)"), fit(4, 4, 2, "8,16"), fit(0, 2, 2, "1(x2)")] == [False] * 3


def test_tasks_are_told_of_their_processors_in_both_variables() -> None:
    """A step that a task starts would be refused if they contradicted each other."""
    assert with_cpus("", 2) == "cpu=2"
    assert with_cpus("cpu=3", 2) == "cpu=2"
    assert with_cpus("gres/gpu:1,cpu:3", 1) == "cpu=1,gres/gpu:1"


def test_this_machine_has_its_own_processors() -> None:
    assert places({10**6})[10**6] == Processor(0, 10**6), "of which Linux says nothing"
    assert len(places(())) >= 1


DEVICES = ["0", "1", "4", "5"]


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        ("x", ["", "", "", ""]), ("--gpus-per-task=h100:2", ["0,1", "4,5", "0,1", "4,5"]),
        ("--gpus-per-task=1", DEVICES), ("--ntasks-per-gpu=2", ["0", "0", "1", "1"]),
        ("--tres-per-task=cpu=2,gres/gpu:1", DEVICES), ("--tres-per-task=gres/gpu:h100=2", ["0,1", "4,5"]),
        ("--tres-per-task=gres:gpu:1", DEVICES), ("--ntasks-per-gpu=0", ["", ""]),
        ("--gpu-bind=single:1", DEVICES), ("--gpu-bind=verbose,single:2", ["0", "0", "1", "1"]),
        ("--gpu-bind=per_task:2", ["0,1", "4,5"]), ("--tres-bind=gres/gpu:single:1", DEVICES),
        ("--gpu-bind=map_gpu:3,2,1,0", ["5", "4", "1", "0"]),
        ("--gpu-bind=map_gpu:1*2,0", ["1", "1", "0", "1"]),
        ("--gpu-bind=mask_gpu:0x3,0x30", ["0,1", "4,5", "0,1", "4,5"]),
        ("--tres-bind=gres/nic:closest+gres/gpu:mask:1,2", ["0", "1", "0"]),
        ("--gpus-per-task=1 --gpu-bind=map_gpu:1,0", ["1", "0"]),
        ("--gpus-per-task=1 --gpu-bind=closest", ["", ""]), ("--gpu-bind=none --gpus-per-task=1", [""]),
    ],
)  # fmt: skip
def test_gpus_of_a_task(typed: str, seen: list[str]) -> None:
    """As with Slurm 22.05 where it does not hide devices (ConstrainDevices)."""
    how = asdict(asked(typed))
    found = [",".join(DEVICES[place] for place in gpus(DEVICES, n, how)) for n in range(len(seen))]
    assert found == seen


@pytest.mark.parametrize(
    ("typed", "environment", "told", "left"),
    [
        ("--gpus=8 x", {"SLURM_GPUS": "24"}, ["--gpus-per-node=4"], {}),
        ("x", {"SLURM_GPUS": "24"}, [], None),
        ("-G h100:3 x", {}, ["--gpus-per-node=h100:2"], {}),
        ("--gpus=8 x", {"SLURM_GPUS_PER_NODE": "4"}, [], None),
    ],
)  # fmt: skip
def test_a_steps_own_total_of_gpus_is_each_nodes_share(
    typed: str, environment: dict[str, str], told: list[str], left: dict[str, str] | None
) -> None:
    """Of two active nodes."""
    before, srun = dict(environment), parse(typed.split())
    assert srun is not None
    assert each_nodes_gpus(srun, environment, 2) == told
    assert environment == (before if left is None else left)


def test_a_newer_sruns_total_of_gpus_counts_for_more_than_the_jobs_for_each_node() -> None:
    srun = parse(["--gpus=2", "x"])
    assert srun is not None
    job = {"SLURM_GPUS_PER_NODE": "2"}
    found = [each_nodes_gpus(srun, dict(job), 2, release) for release in ((), (22, 5, 8), (24, 11, 5))]
    assert found == [[], [], ["--gpus-per-node=1"]]


def test_gpus_of_a_task_by_variables() -> None:
    assert asked("x", SLURM_GPUS_PER_TASK="1").gpus == 1
    assert asked("x", SLURM_TRES_PER_TASK="gres/gpu=3").gpus == 3
    assert asked("x", SLURM_NTASKS_PER_GPU="3").tasks_per_gpu == 3
    assert asked("x", SLURM_GPU_BIND="single:2").tasks_per_gpu == 2
    assert asked("--gpus-per-task=2 x", SLURM_GPUS_PER_TASK="1").gpus == 2


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        ("x", 2), ("--gpus-per-task=1 x", 1), ("--tres-per-task=gres/gpu:1 x", 1),
        ("--tres-per-task=cpu=1 x", 2),
        ("--gpus-per-task=1 --gpu-bind=none x", 0),
    ],
)  # fmt: skip
def test_a_steps_own_number_of_gpus_counts_for_more_than_its_jobs_binding(typed: str, seen: int) -> None:
    """Slurm 24.11 and newer set this for a job with --gpus-per-task=2, also where a step says another one."""
    job = partial(asked, SLURM_TRES_PER_TASK="gres/gpu=2", SLURM_TRES_BIND="gres/gpu:per_task:2")
    assert job(typed).gpus == seen


def test_all_lists_of_gpus_show_the_same_ones() -> None:
    node = {"CUDA_VISIBLE_DEVICES": "0,1,4,5", "SLURM_STEP_GPUS": "2,3,6,7"}
    how = asdict(TaskShares(gpus=2))
    assert own_gpus(node, 1, how) == {"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_STEP_GPUS": "6,7"}
    assert own_gpus(node, 1, asdict(TaskShares())) == own_gpus({}, 1, how) == {}


# As Slurm 22.05 and 24.11 say it, for two tasks on a node.
@pytest.mark.parametrize(
    ("typed", "environment", "count"),
    [
        ("-n4", {}, 0),
        ("-n4", {"SLURM_GPUS_PER_TASK": "2"}, 4),
        ("-n4 --gpus-per-task=1", {"SLURM_GPUS_PER_TASK": "2"}, 2),
        ("-n4 --gpus-per-task=h100:1", {"SLURM_GPUS": "8"}, 2),
        ("-n4 --gpus-per-task=1", {"SLURM_GPUS_PER_NODE": "4"}, 0),
        ("-n4 --gpus-per-task=1 --gpus=4", {}, 2),
        ("-n4 --gpus=2", {"SLURM_GPUS_PER_TASK": "2"}, 4),
        ("-n4 --gres=gpu:3", {"SLURM_GPUS_PER_TASK": "2"}, 0),
        ("-n4 --tres-per-task=gres:gpu:2", {}, 4),
        ("-n4 --ntasks-per-gpu=2", {}, 1),
        ("-n4 --gpu-bind=single:1", {"SLURM_GPUS_PER_TASK": "2"}, 4),
    ],
)
def test_how_many_gpus_a_step_says_that_it_has_on_a_node(
    typed: str, environment: dict[str, str], count: int
) -> None:
    srun = parse([*typed.split(), "x"])
    assert srun is not None
    found = gpus_on_node(srun, environment, VARIABLES.values(), 2)
    assert found == count
    told = own_gpus({"SLURM_GPUS_ON_NODE": "4"}, 0, asdict(TaskShares(gpus_on_node=found)))
    assert told == ({"SLURM_GPUS_ON_NODE": str(count)} if count else {})


@pytest.mark.parametrize(
    ("typed", "environment", "told"),
    [
        ("-n4", {"SLURM_GPUS_PER_TASK": "2"}, ["--gpus-per-node=4"]),
        ("-n4 --gpus-per-task=1", {"SLURM_GPUS_PER_TASK": "1"}, ["--gpus-per-node=4"]),
        ("-n4", {"SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1"}, ["--gpus-per-node=4"]),
        ("-n4", {"SLURM_NTASKS_PER_GPU": "1"}, ["--gpus-per-node=4"]),
        ("-n4", {"SLURM_TRES_PER_TASK": "cpu=1"}, []),
        ("-n4 --gpus-per-task=1", {}, []),
        ("-n4 --gres=gpu:2", {"SLURM_GPUS_PER_TASK": "2"}, []),
        ("-n4 --gpus=2", {"SLURM_GPUS_PER_TASK": "2"}, ["--gpus-per-node=4"]),
    ],
)
def test_the_agent_has_all_gpus_where_the_job_asks_for_some_for_each_task(
    typed: str, environment: dict[str, str], told: list[str]
) -> None:
    srun = parse([*typed.split(), "x"])
    assert srun is not None
    found = all_gpus(srun, {"SLURM_GPUS_ON_NODE": "4", **environment})
    assert [word for given in found for word in given.words] == told
