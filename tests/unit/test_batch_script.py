"""Batch scripts: what their lines say, and the request that is made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jurymast.cluster.planning import OwnOptions, make_plan, spreads_gpus
from jurymast.cluster.sbatch import BatchScript, find_script, parse, read_script, split_command_line, wrapped
from jurymast.cluster.slurm import build_request
from jurymast.core.state.settings import RunPlan
from jurymast.errors import UsageError
from jurymast.policy.resolve import pairs_layer, resolve

OWN = {"--spares": True, "--policy": True, "--wait": False}
TESTS = Path(__file__).parents[1]
JOB = """#!/bin/bash -l

# trains
#SBATCH --job-name="my job"   # a comment
#SBATCH -N 4 --gpus-per-node=8
#SBATCH
#JURYMAST --spares 2
##SBATCH --nodes=100

module load cuda
#SBATCH --nodes=200
srun torchrun train.py
"""


def script(text: str) -> BatchScript:
    return parse(text, "job.sbatch", OWN)


def plan(
    text: str,
    *words: str,
    spares: int = 2,
    environment: dict[str, str] | None = None,
    nodes: int | None = None,
    cluster: str = "slurm",
) -> RunPlan:
    line = split_command_line([*words, "job.sbatch", "--epochs", "3"], OWN)
    return make_plan(
        OwnOptions(nodes=nodes, runs=Path("/shared/runs"), cluster=cluster),
        line,
        resolve([pairs_layer("command line", [("spares", spares)])]),
        script=script(text),
        environment=environment or {},
        working_directory=Path("/shared/work"),
        python="/opt/python3",
        run="20261120-134501-train-x7f3",
    )


def test_lines_up_to_the_first_command_count() -> None:
    found = script(JOB)
    assert [(given.name, given.value) for given in found.sbatch] == [
        ("job-name", "my job"), ("nodes", "4"), ("gpus-per-node", "8"),
    ]  # fmt: skip
    assert found.own == ("--spares", "2")
    assert found.sbatch[1].where == "job.sbatch, line 5: "
    assert found.head.splitlines() == JOB.splitlines()[2:8]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#SBATCH --comment='open", "job.sbatch, line 2: .*quotation"),
        ("#SBATCH -N 2-4", "job.sbatch, line 2: --nodes=2-4: jurymast adds spare nodes to a fixed number"),
        ("#SBATCH -n 16", "job.sbatch, line 2: --ntasks=16 lets Slurm choose the number of nodes"),
        ("#SBATCH -G 16", "job.sbatch, line 2: --gpus=16 lets Slurm choose the number of nodes"),
    ],
)
def test_a_line_at_fault_is_named(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(f"#!/bin/bash\n{line}\nsrun torchrun train.py\n")


def refused_lines() -> list[tuple[str, ...]]:
    """(line, message) of each that the documents list."""
    page = (TESTS.parent / "docs" / "batch-scripts.md").read_text()
    return re.findall(r"^\| `(#[^`]+)` \| (.+?) \|", page, flags=re.MULTILINE)


def test_the_documents_list_refused_lines() -> None:
    assert len(refused_lines()) > 5


@pytest.mark.parametrize(("line", "says"), refused_lines())
def test_a_line_is_refused_as_documented(line: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(f"#!/bin/bash\n{line}\nsrun torchrun train.py\n")
    assert str(refused.value) == f"job.sbatch, line 2: {says}"


# What `sbatch -vvvv` says that it found; tests/slurm/test_sbatch_heads.py asks the installed one.
HEADS = {
    "an indented comment ends nothing": ("#SBATCH -N 2\n  # why\n\t\n#SBATCH -n 4\n", "-N 2 -n 4"),
    "an indented line is a comment": ("#SBATCH -N 2\n  #SBATCH -N 9\n", "-N 2"),
    "no space is needed": ("#SBATCH--nodes=2\n#SBATCH-n4\n", "--nodes=2 -n4"),
    "a hash ends a line within a word": ("#SBATCH --job-name=a#3 -N 4\n#SBATCH -n 2\n", "--job-name=a -n 2"),
    "a value below its option": ("#SBATCH --time\n# in minutes\n#SBATCH 10 -N 2\n", "--time 10 -N 2"),
    "the old name": ("#SLURM --nodes=3\n", "--nodes=3"),
    "a form feed ends no line": ("# page\f\n#SBATCH -N 2\n# \x1c \u2028 \x85\n#SBATCH -n 4", "-N 2 -n 4"),
    "quotes within a word": ("#SBATCH --com\"ment=a  b\"'c'\n", "--comment=a  bc"),
    "backslashes in both quotes": (
        r"""#SBATCH --comment='a\'b' --wckey="c\"d"e\#f\g""",
        "--comment=a'b --wckey=c\"de#fg",
    ),
    "an empty word ends the line": ('#SBATCH -N 2 "" -n 4\n', "-N 2"),
    "commands end the head": ("#SBATCH -N 2\ntrue\n#SBATCH -N 3\n", "-N 2"),
    "other words are comments": ("#SBATC -N 2\n# SBATCH -N 2\n##SBATCH -N 2\n#sbatch -N 2\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_lines_are_read_as_sbatch_reads_them(head: str) -> None:
    text, found = HEADS[head]
    read = script(f"#!/bin/bash\n{text}")
    assert " ".join(word for given in read.sbatch for word in given.words) == found


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("#SBATCH\u00a0-N 2", "job.sbatch, line 2: \u00a0-N is not an option"),
        ("#SBATCH -N 2\n#SBATCHES", "job.sbatch, line 3: ES is not an option"),
        ("#SBATCH --time\n", "job.sbatch, line 2: option --time needs a value"),
        ("#SBATCH -N 2\n#SBATCH HetJob", "job.sbatch, line 3: heterogeneous jobs are not supported"),
        (
            "true\n#PBS -l nodes=4",
            "job.sbatch, line 3: sbatch would read this #PBS line, but jurymast does not",
        ),
    ],
)
def test_what_sbatch_refuses_is_refused_with_its_line(body: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(f"#!/bin/bash\n{body}\n")


def test_options_that_jurymast_carries_out_leave_the_others_as_they_are_read() -> None:
    text = (
        "#!/bin/bash\n# one\n#SBATCH --quiet --comment\n#SBATCH 'a \"b\\\\' -N 2\n  # two\n#SBATCH --wait\n"
    )
    head = script(text).head
    assert head == '#SBATCH --comment "a \\"b\\\\" -N 2\n# one\n'
    again = script(f"#!/bin/bash\n{head}")
    assert [given.words for given in again.sbatch] == [("--comment", 'a "b\\'), ("-N", "2")]


def test_a_script_without_an_interpreter_is_none() -> None:
    with pytest.raises(UsageError, match="standard input, line 1: a batch script must begin with #!"):
        parse("#SBATCH -N 2\n", "standard input", OWN)
    assert parse("#!/bin/sh\n", "standard input", OWN).job_name == "sbatch"


def test_what_slurm_takes_from_nobody_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"job.sbatch, line 1: ends with a Windows line break") as refused:
        script("#!/bin/bash\r\n#SBATCH -N 2\r\nsrun hostname\r\n")
    assert refused.value.hint == r"for example: sed -i 's/\r$//' job.sbatch"
    with pytest.raises(UsageError, match="job.sbatch, line 3: has a NUL character"):
        script("#!/bin/bash\n\necho \0\n")


def test_the_local_cluster_runs_no_batch_script() -> None:
    with pytest.raises(UsageError, match="the local cluster has no srun"):
        plan(JOB, cluster="local")


def test_spare_nodes_are_added_to_what_the_script_says() -> None:
    made = plan(JOB)
    assert (made.active, made.spares, made.name, made.batch) == (4, 2, "my-job", True)
    assert "--job-name=job.sbatch" in plan("#!/bin/sh\n").sbatch_options
    assert made.arguments == ("--epochs", "3")
    assert made.sbatch_options == ("--nodes=6", "--no-kill", "--requeue", "--signal=B:USR2@120")


@pytest.mark.parametrize(
    ("lines", "words", "environment", "active", "options"),
    [
        (("-N 2",), ("-N3",), {}, 3, ["--nodes=5"]),
        (("--ntasks=16", "--ntasks-per-node=8"), (), {}, 2, ["--nodes=4", "--ntasks=32"]),
        (("-N 2", "--gpus=h100:16"), (), {}, 2, ["--nodes=4", "--gpus=h100:32"]),
        (("-N 2", "--gpus=4"), (), {"SBATCH_GPUS": "16"}, 2, ["--gpus=32"]),
        (("-N 2", "--gpus=4"), ("--gpus=8",), {"SBATCH_GPUS": "16"}, 2, ["--gpus=8", "--gpus=16"]),
        (("-N 2", "--gpus=h100:8,a100:16"), (), {}, 2, ["--gpus=h100:16,a100:32"]),
        (("--gpus=16", "--gpus-per-node=8"), (), {}, 2, ["--nodes=4", "--gpus=32"]),
        (("-G 20", "--gpus-per-node=h100:8"), (), {}, 3, ["--nodes=5"]),
        (("-n 1", "-G 4"), (), {}, 1, ["--nodes=3", "--ntasks=3", "--gpus=12"]),
        ((), (), {}, 1, ["--nodes=3"]),
        (("-N 2",), ("--ntasks-per-node=8", "--wrap=x"), {}, 2, ["--ntasks-per-node=8", "--nodes=4"]),
        (("-N 2", "--signal=B:USR1@60"), (), {}, 2, []),
    ],
)
def test_sizes_and_precedence(
    lines: tuple[str, ...], words: tuple[str, ...], environment: dict[str, str], active: int,
    options: list[str],
) -> None:  # fmt: skip
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)
    made = plan(text, *words, environment=environment)
    assert made.active == active
    assert [option for option in options if option in made.sbatch_options] == options
    assert ("--signal=B:USR2@120" in made.sbatch_options) is ("signal" not in text)


@pytest.mark.parametrize(
    ("lines", "words", "spares", "each"),
    [
        (("-N 2", "--gpus=8", "--ntasks=8", "--ntasks-per-gpu=1"), (), 1, "4"),
        (("-N 2", "--gpus=h100:8"), (), 0, "h100:4"),
        (("-N 1", "--gpus=8"), (), 1, "8"),
        (("-N 2",), ("--gpus=4",), 1, "2"),
        (("-N 2", "--gpus=8", "--gres=nvme:1"), (), 1, "4"),
        (("-N 1", "--gpus=8"), (), 0, ""),  # it has them all
        (("-N 3", "--gpus=8"), (), 1, ""),
        (("-N 2", "--gpus=h100:8,a100:8"), (), 1, ""),
        (("-N 2", "--gpus=8", "--gpus-per-task=1"), (), 1, ""),
        (("-N 2", "--gpus=8"), ("--gpus-per-node=4",), 1, ""),
        (("-N 2", "--gpus=8", "--gres=gpu:4"), (), 1, ""),
        (("-N 2",), (), 1, ""),
    ],
)
def test_each_node_has_its_share_of_a_total_of_gpus(
    lines: tuple[str, ...], words: tuple[str, ...], spares: int, each: str
) -> None:
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)
    made = plan(text, *words, spares=spares)
    told = [option for option in made.sbatch_options if option.startswith("--gpus-per-node=")]
    assert told == (
        [f"--gpus-per-node={each}"] if each else [option for option in words if "-node=" in option]
    )
    assert spreads_gpus(made) is bool(each)


@pytest.mark.parametrize(
    ("lines", "words", "environment", "requeue"),
    [
        ((), (), {}, True),
        (("--no-requeue",), (), {}, False),
        (("--no-requeue",), (), {"SBATCH_REQUEUE": ""}, True),
        (("--requeue",), ("--no-requeue",), {}, False),
    ],
)
def test_who_says_last_whether_to_requeue(
    lines: tuple[str, ...], words: tuple[str, ...], environment: dict[str, str], requeue: bool
) -> None:
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)
    assert plan(text, *words, environment=environment).requeue is requeue


def test_the_request_has_the_scripts_lines_and_arguments() -> None:
    request = build_request(plan(JOB, "-p", "gpu"), resolve([]), script(JOB))
    assert request.users == JOB
    assert request.argv[:4] == ("sbatch", "--parsable", "-p", "gpu")
    assert request.argv[-3:] == (f"{request.plan.directory}/slurm/job.sh", "--epochs", "3")
    first, *lines = request.script.splitlines()
    assert first == "#!/bin/sh"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="my job"   # a comment', "#SBATCH -N 4 --gpus-per-node=8", "#SBATCH",
    ]  # fmt: skip
    assert lines[-1].startswith("exec /opt/python3 ")
    assert lines[-1].endswith(f'jurymast.script job {request.plan.directory} "$@"')


def test_what_jurymast_does_itself_does_not_reach_sbatch() -> None:
    text = "#!/bin/sh\n#SBATCH --wait -N 2 --comment='a b' -Q  # quietly\n#PBS -N old\n"
    request = build_request(plan(text, "-Q", "--ignore-pbs", "-p", "gpu"), resolve([]), script(text))
    assert request.argv[2:5] == ("--ignore-pbs", "-p", "gpu")
    assert request.script.splitlines()[1:3] == ['#SBATCH -N 2 "--comment=a b"', "#PBS -N old"]
    assert plan(text, environment={"SBATCH_IGNORE_PBS": "1"}).active == 2


def test_a_command_is_not_wrapped_twice_and_exclusions_are_one(tmp_path: Path) -> None:
    made = plan("#!/bin/sh\n#SBATCH -x n1\n", "--wrap=srun hostname", "--exclude=n2,n3")
    argv = build_request(made, resolve([]), script("#!/bin/sh\n")).argv
    assert [word for word in argv if "wrap" in word] == []
    assert [word for word in argv if "exclude" in word] == ["--exclude=n1,n2,n3"]


def test_a_wrapped_command_is_sbatchs_own_script() -> None:
    assert wrapped("srun hostname").text.startswith(
        "#!/bin/sh\n# This script was created by sbatch --wrap.\n"
    )


def test_a_batch_script_is_told_from_a_training_script(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n")
    (tmp_path / "train.py").write_text("#!/bin/sh\n")
    (tmp_path / "train").write_text("#!/usr/bin/env python3\nprint()\n#SBATCH -N2\n")
    (tmp_path / "job.py").write_text("#!/usr/bin/env python3\n# trains\n#SBATCH -N2\nprint()\n")
    (tmp_path / "job").write_text("#!/opt/python3.11/bin/bash\nsrun torchrun train.py\n")
    (tmp_path / "job.pl").write_text("#!/usr/bin/env perl\nsystem('srun torchrun train.py');\n")
    for name in ("job.py", "job", "job.pl"):
        assert find_script([name], tmp_path) == tmp_path / name
    assert find_script(["job.sbatch", "--lr", "1"], tmp_path) == tmp_path / "job.sbatch"
    (tmp_path / "no-interpreter").write_text("# trains\n#SBATCH -N2\nsrun torchrun train.py\n")
    (tmp_path / "empty.slurm").write_text(" \n")
    for name in ("no-interpreter", "empty.slurm"):
        assert find_script([name], tmp_path) == tmp_path / name
        with pytest.raises(UsageError, match="line 1: a batch script must begin with #!"):
            read_script(tmp_path / name, OWN)
    for words in (["train.py"], ["train"], ["nowhere"], ["-m", "job.sbatch"], []):
        assert find_script(words, tmp_path) is None


def test_every_style_of_script_has_an_outcome_of_sbatchs() -> None:
    golden = json.loads((TESTS / "data" / "golden" / "batch-scripts.json").read_text())
    assert list(golden) == sorted(path.stem for path in (TESTS / "slurm" / "scripts").glob("*.sbatch"))
