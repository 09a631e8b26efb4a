"""Splitting a command line: ours, sbatch's, the script's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.cluster.sbatch import (
    NONE,
    OPTIONAL,
    REQUIRED,
    SBATCH,
    SHORT,
    _answer,
    merged,
    parse,
    ranks_per_node,
    split_command_line,
    usable_gpus,
)
from jurymast.cluster.sbatch_command import hint_for
from jurymast.errors import UsageError

OWN = {"--nodes": True, "-N": True, "--spares": True, "--wait": False, "-W": False, "--dry-run": False}


def passed(*words: str) -> list[str]:
    return [word for option in split_command_line(words, OWN).options for word in option.words]


def test_the_table_is_consistent() -> None:
    assert len(SBATCH.long) == len(REQUIRED) + len(OPTIONAL) + len(NONE)
    assert set(SHORT.values()) <= SBATCH.long


def test_ours_sbatchs_and_the_scripts_are_told_apart() -> None:
    line = split_command_line(
        [
            "-N",
            "4",
            "-p",
            "gpu",
            "--spares=2",
            "--time",
            "1:00",
            "--wait",
            "--nice",
            "-H",
            "--",
            "t.py",
            "-N",
            "9",
        ],
        OWN,
    )
    assert line.own == ["-N", "4", "--spares=2", "--wait"]
    assert [option.words for option in line.options] == [
        ("-p", "gpu"),
        ("--time", "1:00"),
        ("--nice",),
        ("-H",),
    ]
    assert [option.name for option in line.options] == ["partition", "time", "nice", "hold"]
    assert line.command == ["t.py", "-N", "9"]
    assert line.last("time") == "1:00"
    assert line.has("hold")
    assert not line.has("qos")


def test_the_script_needs_no_dashes_before_it() -> None:
    line = split_command_line(["-p", "gpu", "t.py", "--nodes", "3", "--", "x"], OWN)
    assert line.command == ["t.py", "--nodes", "3", "--", "x"]
    assert line.own == []


def test_values_that_look_like_options() -> None:
    assert passed("--dependency", "-x", "--mem", "0") == ["--dependency", "-x", "--mem", "0"]


def test_short_options_in_all_their_forms() -> None:
    line = split_command_line(["-HsN4", "-pgpu", "-c", "8", "-vv", "-k", "-koff"], OWN)
    assert line.own == ["-N", "4"]
    words = [option.words for option in line.options]
    assert words == [("-H",), ("-s",), ("-pgpu",), ("-c", "8"), ("-v",), ("-v",), ("-k",), ("-koff",)]
    assert line.last("no-kill") == "off"


def test_abbreviations_as_sbatch_has_them() -> None:
    line = split_command_line(["--part=gpu", "--exclus", "--gpus-per-n", "8"], OWN)
    assert [(option.name, option.value) for option in line.options] == [
        ("partition", "gpu"),
        ("exclusive", None),
        ("gpus-per-node", "8"),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--spars", "2"], "unknown option --spars (did you mean --spares?)"),
        (["--partitoin=gpu"], "unknown option --partitoin (did you mean --partition?)"),
        (["--zzzzzz"], "unknown option --zzzzzz"),
        (["--spare", "2"], "did you mean --spares?"),
        (["--ntasks-per"], "--ntasks-per is ambiguous: --ntasks-per-core, --ntasks-per-gpu"),
        (["-p"], "option -p needs a value"),
        (["--time"], "option --time needs a value"),
        (["--time", "--", "t.py"], "option --time needs a value"),
        (["--spares"], "option --spares needs a value"),
        (["--hold=yes"], "option --hold takes no value"),
        (["--wait=yes"], "option --wait takes no value"),
        (["-Z"], "unknown option -Z"),
        (["-HZ"], "unknown option -Z in -HZ"),
        (["-p", "gpu", ":", "-p", "cpu"], "heterogeneous"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_command_line(words, OWN)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("option", "hint"),
    [("--nnodes=2", "--nodes N"), ("--rdzv_backend=c10d", "rendezvous"), ("--standalone", "--cluster local")],
)
def test_torchrun_s_options_get_their_own_hint(option: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_command_line([option], OWN)
    assert hint in caught.value.hint


@given(st.lists(st.text(max_size=8), max_size=8))
def test_any_words_are_split_or_refused_and_none_gets_lost(words: list[str]) -> None:
    try:
        line = split_command_line(words, OWN)
    except UsageError:
        return
    kept = [*line.own, *(word for option in line.options for word in option.words), *line.command]
    assert sum(map(len, kept)) >= sum(len(word) for word in words if not word.startswith("-"))


@pytest.mark.parametrize(
    ("words", "environment", "ranks"),
    [
        ([], {}, 1),
        (["--gpus-per-node=8"], {}, 8),
        (["--gpus-per-node", "h100:4"], {}, 4),
        (["--gpus-per-node=h100:4,a100:2"], {}, 6),
        (["--gres=gpu:8"], {}, 8),
        (["--gres=gpu:h100:2,shard:4,tmpdir:10G"], {}, 2),
        (["--gres=gpu"], {}, 1),
        (["--gres=shard:4"], {}, 1),
        (["--gres=gpu:4", "--gres=gpu:2"], {}, 2),
        (["--gpus-per-task=2"], {}, 2),
        (["--tres-per-task=cpu=4,gres/gpu:h100:2"], {}, 2),
        (["--tres-per-task=gres/gpu=4"], {}, 4),
        (["--tres-per-task=gres:gpu:3,license/ansys:1"], {}, 3),
        (["--tres-per-task=cpu:8"], {}, 1),
        (["--gpus-per-socket=h100:4", "--sockets-per-node=2"], {}, 8),
        (["--gpus-per-socket=4"], {}, 4),
        ([], {"SBATCH_GPUS_PER_NODE": "4"}, 4),
        (["--gres=gpu:2"], {"SBATCH_GRES": "gpu:8"}, 2),
    ],
)
def test_ranks_default_to_the_gpus_of_a_node(
    words: list[str], environment: dict[str, str], ranks: int
) -> None:
    assert ranks_per_node(merged(None, environment, split_command_line(words, OWN))) == ranks


def test_a_gpu_count_that_is_none() -> None:
    with pytest.raises(UsageError, match="has no count"):
        ranks_per_node(split_command_line(["--gpus-per-node=h100"], OWN))


HELP = """\
Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)...]] script(0) [args(0)...]

Parallel run options:
      --power-budget=watts    of a release that is not out yet;
                              --wattage is another name for it
  -Y, --yield                 give way
      --shape[=cube]          shape of the job

Options provided by plugins:
      --image=NAME            [shifter] image of the job
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use for the container
      --no-quota              [site] without a quota
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An sbatch with options that are not in our table."""
    program = tmp_path / "sbatch"
    version = '[ "$1" = --version ] && echo slurm-wlm 22.05.8 && exit'
    program.write_text(f"#!/bin/sh\n{version}\ncat <<'END'\n{HELP}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _answer.cache_clear()
    yield
    _answer.cache_clear()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("sbatch: unrecognized option '--segment=2'\nTry \"sbatch --help\"", "--segment"),
        ("sbatch: unrecognized option '--stepmgr'", "--stepmgr"), ("sbatch: invalid option -- 'Y'", "Y"),
    ],
)  # fmt: skip
def test_an_option_newer_than_the_installed_slurm_is_told_as_that(said: str, option: str) -> None:
    assert hint_for(said, []).startswith(
        f"slurm-wlm 22.05.8, which is installed here, does not have {option}:"
    )
    assert hint_for("sbatch: error: Invalid account", ["--gpus=4"]) == ""
    refused = "allocation failure: Requested node configuration is not available"
    assert "give --nodes=N" in hint_for(refused, ["sbatch", "--gpus=32"])
    assert hint_for(refused, ["sbatch", "--gpus-per-node=32"]) == ""
    with pytest.raises(UsageError) as unknown:
        split_command_line(["--spread-segments", "job.sh"], {})
    assert str(unknown.value.hint).endswith("sbatch is from slurm-wlm 22.05.8 here, which does not have it")


@pytest.mark.usefixtures("installed")
def test_options_that_only_the_installed_sbatch_knows_pass_in_their_place() -> None:
    words = ["--image", "debian:12", "-N2", "--shape", "-Y", "--power-budget=9", "--shape=cube", "--no-quota"]
    line = split_command_line([*words, "job.sh", "--image", "x"], {"--spares": True})
    assert [word for given in line.options for word in given.words] == words
    assert line.command == ["job.sh", "--image", "x"]
    assert line.last("image") == "debian:12"
    read = parse("#!/bin/sh\n#SBATCH --image\n#SBATCH debian:12 --no-quota\n", "job.sh", {})
    assert [given.words for given in read.sbatch] == [("--image", "debian:12"), ("--no-quota",)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--imagine=x"], r"unknown option --imagine \(did you mean --image\?\)"),
        (["--wattage=3"], "unknown option --wattage"),  # only named in an explanation
        (["--no-quota=3"], "option --no-quota takes no value"),
        (["--image"], "option --image needs a value"),
    ],
)
def test_the_rules_hold_for_options_of_plugins(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        split_command_line(words, {})


def test_without_slurm_the_message_says_that_plugins_options_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    _answer.cache_clear()
    with pytest.raises(UsageError) as refused:
        split_command_line(["--image=x"], {})
    assert str(refused.value.hint).endswith("sbatch is not here, so options of Slurm's plugins are not known")
    _answer.cache_clear()


NVIDIA = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")


@pytest.mark.parametrize(
    ("variables", "files", "count"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, NVIDIA, 3), ({"ZE_AFFINITY_MASK": "0"}, NVIDIA, 1),
        ({"HIP_VISIBLE_DEVICES": "4, 5"}, (), 2), ({"CUDA_VISIBLE_DEVICES": "MIG-a1,MIG-b2"}, (), 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1"}, (), 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, NVIDIA, 0), ({"CUDA_VISIBLE_DEVICES": "-1"}, NVIDIA, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, NVIDIA, 1), ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, (), 0),
        ({}, NVIDIA, 2), ({}, ("kfd",), 2), ({}, (), 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_by_any_vendors_variable_or_by_the_driver(
    tmp_path: Path, variables: dict[str, str], files: tuple[str, ...], count: int
) -> None:
    """As torch counts them. The machine's two processors are no GPUs of AMD's."""
    for name in files:
        (tmp_path / name).touch()
    for number, units in enumerate((0, 0, 304, 304)):
        node = tmp_path / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 48\nsimd_count {units}\nmem_banks_count 1\n")
    assert usable_gpus(variables, tmp_path, tmp_path) == count
