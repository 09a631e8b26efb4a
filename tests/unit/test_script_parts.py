"""Trainings that a batch script starts by one srun for each node: which sruns belong together, and what each
node runs."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.cluster.sbatch import CommandLine, words_of
from jurymast.rundir import RunDirectory
from jurymast.script.notes import noted
from jurymast.script.output import Output, relayed
from jurymast.script.parts import PART, Part, for_all, gather, join, places, shell_text
from jurymast.script.recognise import named_node, part_of
from jurymast.script.srun import parse
from jurymast.script.step import node_command

NODES = ("n1", "n2", "n3")
TWO = {"./node.sh": "#!/bin/bash\ntorchrun --nnodes=3 --node_rank=$1 --master_addr=$2 train.py\n"}


def srun(*words: str) -> CommandLine:
    found = parse(words)
    assert found is not None
    return found


def name_of(*words: str, **environment: str) -> str | None:
    return part_of(srun(*words), environment, NODES, lambda name: TWO.get(name, ""))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-N1 -n1 -w n1 torchrun --nnodes=3 --node_rank=0 t.py",
         "-N1 -n1 -w n2 torchrun --nnodes=3 --node_rank=1 t.py"),
        ("-n1 -r0 torchrun --nnodes 3:3 --node-rank 0 t.py",
         "-n1 -r1 torchrun --nnodes 3:3 --node-rank 1 t.py"),
        ("-N1 --ntasks-per-node=1 accelerate launch --machine_rank 0 t.py",
         "-N1 --ntasks-per-node=1 accelerate launch --machine_rank 2 t.py"),
        ("-N1 -n1 torchrun --nnodes=$N --rdzv-id=7 t.py", "-N1 -n1 torchrun --nnodes=$N --rdzv-id=7 t.py"),
        ("-N1 -n1 -w n1 ./node.sh 0 n1 n1 1", "-N1 -n1 -w n2 ./node.sh 1 n1 n2 1"),
    ],
)  # fmt: skip
def test_parts_of_one_training_have_the_same_name(one: str, other: str) -> None:
    name = name_of(*one.split())
    assert name is not None
    assert name == name_of(*other.split())


def test_a_part_may_name_its_node_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "host").write_text("# the second\nn2\n")
    assert (
        named_node(srun("-N1", "-n1", f"-F{tmp_path}/host", "torchrun", "--nnodes=3", "t.py"), NODES) == "n2"
    )


@pytest.mark.parametrize(
    "command",
    [
        "-N1 -n1 torchrun --standalone --nproc-per-node=8 sweep.py --seed 1",
        "-N1 -n1 torchrun --nnodes=1 --node_rank=0 t.py",
        "-N1 -n1 torchrun --nnodes=2 --node_rank=0 t.py",  # of the job's three
        "-N1 -n2 torchrun --nnodes=3 --node_rank=0 t.py",
        "-N2 -n2 torchrun --nnodes=3 t.py",
    ],
)
def test_what_is_no_part_of_a_training_on_all_nodes(command: str) -> None:
    assert name_of(*command.split()) is None


def test_other_masters_scripts_and_arguments_are_other_trainings() -> None:
    start = "-N1 -n1 torchrun --nnodes=3 --node_rank=0"
    behind = ["--master_addr n1 t.py", "--master_addr n2 t.py", "--master_addr n1 u.py",
              "--master_addr n1 t.py --seed 1"]  # fmt: skip
    names = {name_of(*f"{start} {words}".split()) for words in behind}
    assert len(names) == 4
    assert None not in names


def test_trainings_at_the_same_time_are_not_mixed_up() -> None:
    """Of a shell script's arguments only one is the number of the node."""
    nodes = [("n1", "0"), ("n2", "1")]
    for words in ("{node} {seed}", "{seed} {node}"):
        names = {
            seed: [name_of("-n1", "-w", name, "./node.sh", *words.format(node=number, seed=seed).split())
                   for name, number in nodes]
            for seed in ("0", "1")
        }  # fmt: skip
        assert not {*names["0"]} & {*names["1"]}


def test_a_step_of_srun_has_as_many_tasks_as_the_script_has() -> None:
    command = ["-N1", "torchrun", "--nnodes=3", "--node_rank=0", "t.py"]
    assert name_of(*command) is not None
    assert name_of(*command, SLURM_NTASKS="3") is None


def part(node: str = "", *command: str, **environment: str) -> Part:
    return Part(command or ("torchrun", "t.py"), node, environment, os.getpid())


def test_parts_meet_whatever_their_order_and_the_next_training_begins_anew(tmp_path: Path) -> None:
    with ThreadPoolExecutor(9) as pool:
        places = list(pool.map(lambda number: join(tmp_path / "train", part(f"n{number}"), 3), range(9)))
    assert sorted(places) == [
        (tmp_path / f"train-{count}", number) for count in (1, 2, 3) for number in range(3)
    ]
    for count in (1, 2, 3):
        found = gather(tmp_path / f"train-{count}", part("first"), 3)
        assert found is not None
        assert len({each.node for each in found}) == 3


def test_parts_whose_others_do_not_come_are_joined_by_nobody(tmp_path: Path) -> None:
    folder, _ = join(tmp_path / "train", part("n1"), 3)
    join(tmp_path / "train", part("n2"), 3)
    assert gather(folder, part("n1"), 3, limit_s=0.0) is None
    assert join(tmp_path / "train", part("n3"), 3) == (tmp_path / "train-2", 0)


def test_a_part_has_the_place_of_the_node_that_it_names_or_one_that_is_left() -> None:
    assert places([part("n2"), part("n1"), part()], NODES) == [1, 0, 2]
    assert places([part("lost"), part("n1"), part("n3")], NODES) == [1, 0, 2]
    assert places([part("n3"), part("n3"), part("n1")], NODES) == [2, 1, 0]
    words = ("-r1", "--export=ALL,NODE_RANK=1,HOME", "torchrun")
    of = Part.of(srun(*words), {"HOME": "/me"}, NODES)
    assert (of.node, of.environment) == ("n2", {"HOME": "/me", "NODE_RANK": "1"})


def test_each_node_runs_its_own_parts_command(tmp_path: Path) -> None:
    job, step = RunDirectory(tmp_path / "run"), tmp_path / "step"
    step.mkdir()
    tell = ("sh", "-c", 'echo "$0 ${WORD-none} $ONLY"')
    first = part("n1", *tell, "first", WORD="a", ONLY="here")
    second = replace(
        first, command=(*tell, "it's"), environment={"WORD": "b c", "BASH_FUNC_f%%": "() { :; }"}
    )
    own = {"n1": shell_text(first, first), "n2": shell_text(second, first)}
    (step / "node").write_text(node_command(job, step, {}, 2, tmp_path / "spares", own))
    told = []
    for number, node in enumerate(("n1", "n2", "n3")):
        variables = {**first.environment, "SLURM_NODEID": str(number), "SLURMD_NODENAME": node}
        done = subprocess.run(
            ["sh", str(step / "node"), *first.command], env={**variables, "PATH": os.environ["PATH"]},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        told.append(done.stdout)
    assert told == ["first a here\n", "it's b c \n", ""]
    assert (tmp_path / "spares").read_text() == "first a here\n"


def test_gpus_of_one_node_are_those_of_each() -> None:
    together = for_all(srun("-r1", "--gpus=h100:8", "-x", "n9", "-l", "torchrun"))
    assert words_of(together.options, ()) == [
        "-l", "--gpus-per-node=h100:8",
    ]  # fmt: skip


def test_a_part_prints_what_its_own_nodes_ranks_print(tmp_path: Path, job: RunDirectory) -> None:
    for rank in range(4):
        path = job.rank_log(1, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"rank {rank}\n")
    output = Output(srun("-o", str(tmp_path / "out"), "x"), {})
    with relayed(job, output, after=0, place=1):
        job.attempt_file.write_text("1")
    output.close()
    assert (tmp_path / "out").read_text() == "rank 2\nrank 3\n"


@pytest.fixture
def job(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    plan = {"run": "run", "name": "t", "directory": str(directory.root), "cluster": "slurm", "active": 2}
    more = {"spares": 1, "ranks_per_node": 2, "script": "job.sbatch", "batch": True}
    directory.plan_file.write_text(json.dumps({**plan, **more}))
    return directory


def test_no_secret_that_all_parts_have_is_ever_in_a_file_and_none_stays(tmp_path: Path) -> None:
    """What differs is there until it is read: the variables of one srun may be those of one node."""
    first = Part(("torchrun",), "n1", {"TOKEN": "secret", "HOST": "n1", "ONLY": "first's"}, 11)
    second = Part(("torchrun",), "n2", {"TOKEN": "secret", "HOST": "n2", "NEW": "other"}, 12)
    folder, number = join(tmp_path / "t", first, 2)
    assert number == 0
    assert join(tmp_path / "t", second, 2) == (folder, 1)
    texts = [path.read_text() for path in folder.iterdir()]
    assert not [text for text in texts if "secret" in text or "first's" in text]
    assert "other" in "".join(texts)
    assert gather(folder, first, 2) == [first, second]
    left = "".join(path.read_text() for path in folder.iterdir())
    assert "other" not in left
    assert "hash" not in left
    assert noted(folder / PART.format(0))["pid"] == 11, "the others wait for it"
    later, number = join(tmp_path / "t", first, 2)
    assert (later != folder, number) == (True, 0), "it belongs to another training"
    assert gather(later, first, 2, 0.0) is None
    assert not [path for path in later.iterdir() if "hash" in path.read_text()]
