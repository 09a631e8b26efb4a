"""What runs in a batch script's job: what is recognised, what is handed on, which run is which training."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jurymast.cluster.allocation import Allocation
from jurymast.cluster.sbatch import words_of
from jurymast.core.state import events as ev
from jurymast.core.state.settings import RunPlan
from jurymast.errors import RunCancelledError, UsageError
from jurymast.interpreter import run_module
from jurymast.journal import JournalWriter, first_events
from jurymast.rundir import RunDirectory, write_atomically, write_json
from jurymast.script import recognise, shims
from jurymast.script.job import interpreter, warn_if_none_reached
from jurymast.script.output import NUMBER_FILE, Output, relayed
from jurymast.script.recognise import (
    in_container,
    names_python,
    python_command,
    rank_count,
    starts_launcher,
    starts_ranks,
    tasks_a_node,
)
from jurymast.script.srun import parse
from jurymast.script.step import (
    REACHED,
    container_command,
    node_command,
    true_variables_file,
    warn_if_unreached,
)
from jurymast.script.trainings import Training, Trainings
from jurymast.worker.elastic import as_a_task

NOBODY = 65534


@pytest.mark.parametrize(
    ("typed", "command", "without_nodes"),
    [
        ("-N2 -n 2 hostname -s", "hostname -s", ""),
        ("--nodes=2 --ntasks 2 -lu hostname", "hostname", "-l -u"),
        ("--cpu-bind=none --export=A=1 -- prog --nodes", "prog --nodes", "--cpu-bind=none --export=A=1"),
        ("--container-image x.sqsh --container-wo /a torchrun", "torchrun",
         "--container-image x.sqsh --container-workdir /a"),
        ("-K --kill-on-bad-exit=1 --mpi=pmix -l -Whello prog", "prog", "--mpi=pmix -l"),
        ("-F hosts prog -F x", "prog -F x", "-F hosts"),
        ("--nodefile=hosts -Fother prog", "prog", "--nodefile=hosts -Fother"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_sruns_command_is_found_behind_its_options(typed: str, command: str, without_nodes: str) -> None:
    srun = parse(typed.split())
    assert srun is not None
    assert " ".join(srun.command) == command
    ours = frozenset({"nodes", "ntasks", "kill-on-bad-exit", "wait"})
    assert " ".join(words_of(srun.options, ours)) == without_nodes


@pytest.mark.parametrize("typed", ["--no-such-option x", "-n1 a : -n2 b", "--nodes", "-y"])
def test_what_srun_alone_understands_is_left_to_it(typed: str) -> None:
    assert parse(typed.split()) is None


@pytest.mark.parametrize(
    ("command", "files", "found"),
    [
        (["torchrun", "train.py"], {}, True),
        (["/opt/env/bin/torchrun", "train.py"], {}, True),
        (["python3", "-u", "-m", "torch.distributed.run", "train.py"], {}, True),
        (["bash", "-c", "source env.sh && torchrun train.py"], {}, True),
        (["bash", "-lc", "accelerate  launch --multi_gpu x.py"], {}, True),
        (["apptainer", "exec", "--nv", "image.sif", "torchrun", "train.py"], {}, True),
        (["python", "-m", "accelerate.commands.launch", "train.py"], {}, True),
        (["fabric", "run", "train.py"], {}, True),
        (["tune", "run", "--nproc_per_node", "2", "full_finetune_distributed"], {}, True),
        (["tune", "run", "lora_finetune_single_device"], {}, False),
        (["./launch.sh", "x"], {"./launch.sh": "#!/bin/bash\nexec torchrun $*\n"}, True),
        (["bash", "launch.sh"], {"launch.sh": "#!/bin/sh\ntorchrun t.py\n"}, True),
        (["python", "prepare.py"], {"prepare.py": "import torchrun_helpers  # torchrun\n"}, False),
        (["bash", "-c", "cd x; ./launch.sh"], {"./launch.sh": "#!/bin/sh\ntorchrun t.py\n"}, True),
        (["bash", "-c", "cd /w && ./a.sh"], {"/w/./a.sh": "#!/bin/sh\ntorchrun t.py\n"}, True),
        (["bash", "a.sh"], {"a.sh": "torchrun t.py\n"}, True),
        (["bash", "-c", "cd w; . a.bash"], {"w/a.bash": "export A=1\ntorchrun t.py\n"}, True),
        (["bash", "a.sh"], {"a.sh": "#!/bin/sh\nsource b.sh\n", "b.sh": "#!/bin/sh\ntorchrun t.py\n"}, True),
        (["bash", "a.sh"], {"a.sh": "#!/bin/sh\n  # or torchrun t.py\nbash a.sh; hostname\n"}, False),
        (["bash", "-c", "$LAUNCHER --node_rank $SLURM_PROCID train.py"], {}, True),
        (["bash", "-c", "${COMMAND} $SLURM_PROCID"], {}, True),
        (["sh", "a.sh"], {"a.sh": "#!/bin/sh\nexec $LAUNCHER train.py\n"}, True),
        (["./a.sh"], {"./a.sh": '#!/bin/sh\na=(--rdzv-id=${JOB:-99})\ntorchrun "${a[@]}" t.py\n'}, True),
        (["bash", "-c", "$OTHER train.py"], {}, False),
        (["bash", "-c", "$LOOP"], {}, False),
        (["hostname"], {}, False),
        (["rsync", "-a", "torchrunner/", "/tmp"], {}, False),
        (["accelerate", "env"], {}, False),
    ],
)
def test_launchers_are_found_wherever_they_stand(
    command: list[str], files: dict[str, str], found: bool
) -> None:
    variables = {"LAUNCHER": "torchrun --nnodes 2", "COMMAND": "$LAUNCHER --node_rank", "LOOP": "$LOOP $LOOP"}
    variables["JOB"] = "17"
    assert starts_launcher(command, lambda name: files.get(name, ""), variables) is found


@pytest.mark.parametrize(
    ("typed", "environment", "tasks"),
    [
        ("x", {"SLURM_NNODES": "4"}, 1),
        ("x", {"SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "32"}, 8),
        ("--ntasks-per-node=1 x", {"SLURM_NNODES": "4", "SLURM_NTASKS": "32"}, 1),
        ("-N4 -n4 x", {"SLURM_NNODES": "4", "SLURM_NTASKS": "32"}, 1),
        ("-n 6 x", {"SLURM_NNODES": "4"}, 0),
        ("-N1 -n1 x", {"SLURM_NNODES": "4"}, 0),
        ("--nodes=2-4 x", {}, 0),
        ("--nodes=4-4 x", {}, 1),
    ],
)
def test_tasks_on_each_of_four_nodes(typed: str, environment: dict[str, str], tasks: int) -> None:
    srun = parse(typed.split())
    assert srun is not None
    assert tasks_a_node(srun, environment, 4) == tasks


@pytest.mark.parametrize(
    ("command", "script", "module"),
    [
        ("python train.py --lr 1", "train.py", False),
        ("/opt/bin/python3.11 -u train.py", "train.py", False),
        ("python -um pkg.train", None, False),
        ("python -m pkg.train --x", "pkg.train", True),
        ("python -O train.py", None, False),
        ("python", None, False),
        ("ipython train.py", None, False),
        ("bash train.sh", None, False),
    ],
)
def test_python_commands(command: str, script: str | None, module: bool) -> None:
    found = python_command(command.split())
    assert (None if found is None else (found.script, found.module)) == (script and (script, module))


@pytest.mark.parametrize(
    ("command", "files", "found"),
    [
        (["bash", "-c", "cd /work && python -u train.py --rank $SLURM_PROCID"], {}, True),
        (["/bin/sh", "-c", "RANK=$SLURM_PROCID python3.11 -m pkg.train"], {}, True),
        (["./run.sh"], {"./run.sh": "#!/bin/bash\nsource env\nexec python train.py\n"}, True),
        (["python", "train.py"], {}, True),
        (["python", "-W", "ignore", "-um", "pkg.train"], {}, True),
        (["bash", "-c", "python3 -X faulthandler -OO train.py"], {}, True),
        (["/bin/tcsh", "-fc", "setenv A 1; exec python train.py"], {}, True),
        (["numactl", "--cpunodebind=0", "python", "-u", "train.py"], {}, True),
        (["/usr/bin/env", "A=1", "python3", "train.py"], {}, True),
        (["uv", "run", "python", "train.py"], {}, True),
        (["uv", "run", "--no-sync", "train.py", "--lr", "1"], {}, True),
        (["bash", "-c", "uv sync; uv run src/train.py"], {}, True),
        (["uv", "run", "pytest"], {}, False),
        (["uv", "pip", "install", "train.py"], {}, False),
        (["apptainer", "exec", "--nv", "image.sif", "python", "-u", "train.py"], {}, True),
        (["apptainer", "exec", "image.sif", "bash", "-c", "python train.py"], {}, True),
        (["apptainer", "exec", "image.sif", "./run.sh"], {"./run.sh": "#!/bin/sh\npython x.py\n"}, True),
        (["apptainer", "exec", "image.sif", "nvidia-smi", "-L"], {}, False),
        (["bash", "-c", "RANK=$SLURM_PROCID $CMD"], {}, True),
        (["bash", "-c", "./a.sh"], {"./a.sh": "#!/bin/sh\n./b.sh\n", "./b.sh": "#!/bin/sh\n$CMD\n"}, True),
        (["/bin/bash", "a.sh"], {"a.sh": "export RANK=$SLURM_PROCID\npython train.py\n"}, True),
        (["bash", "-c", "$OTHER train.py"], {}, False),
        (["env", "A=1", "hostname"], {}, False),
        (["python", "-c", "import torch", "x.py"], {}, False),
        (["bash", "-c", "python -c 'import torch'"], {}, False),
        (["bash", "-c", "python --version"], {}, False),
        (["bash", "-c", "which python; nvidia-smi"], {}, False),
        (["cp", "python train.py"], {}, False),
        (["hostname"], {}, False),
    ],
)
def test_shells_that_run_python(command: list[str], files: dict[str, str], found: bool) -> None:
    assert starts_ranks(command, lambda name: files.get(name, ""), {"CMD": "python -u train.py"}) is found


def test_python_is_named_by_commands_that_are_not_known_to_start_it() -> None:
    assert names_python(["apptainer", "exec", "--nv", "image.sif", "python", "-u", "train.py"])
    assert names_python(["srun-wrapper", "python3", "-m", "pkg.train"])
    assert not names_python(["apptainer", "exec", "image.sif", "nvidia-smi"])


@pytest.mark.parametrize(
    ("typed", "ranks", "script", "arguments", "ignored"),
    [
        ("train.py a -b", "1", "train.py", ("a", "-b"), ()),
        ("--nproc_per_node=8 --nnodes 2 train.py --nnodes 3", "8", "train.py", ("--nnodes", "3"), ()),
        ("--nproc-per auto --rdzv_conf a=b --standalone -m pkg x", "auto", "pkg", ("x",), ()),
        ("--max-restarts 3 -r 3 -t=1 --log_dir d train.py", "1", "train.py", (),
         ("max-restarts", "redirects", "tee", "log-dir")),
        ("--nproc-per-node 2 -- train.py", "2", "train.py", (), ()),
    ],
)  # fmt: skip
def test_torchruns_options(
    typed: str, ranks: str, script: str, arguments: tuple[str, ...], ignored: tuple[str, ...]
) -> None:
    launch = recognise.parse(typed.split(), {})
    assert (launch.ranks, launch.script, launch.arguments) == (ranks, script, arguments)
    assert launch.ignored == ignored
    assert launch.module is ("-m" in typed.split())


@pytest.mark.parametrize(
    ("typed", "nodes"),
    [
        ("t.py", ""), ("--nnodes=2 t.py", "2"), ("--nnodes 1:4 t.py", "4"), ("--nnodes=1 t.py", "1"),
        ("--nnodes 1:1 t.py", "1"), ("--standalone --nproc-per-node=2 t.py", "1"),
    ],
)  # fmt: skip
def test_how_many_nodes_a_launcher_is_told_of(typed: str, nodes: str) -> None:
    assert recognise.parse(typed.split(), {}).nodes == nodes


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--run-path train.py", "--run-path is not supported yet"),
        ("--nproc-per-node", "expected one argument"),
        ("--r 3 train.py", "ambiguous"),
        ("--gpus 3 train.py", "unrecognized arguments: --gpus"),
        ("--nnodes 2", "no training script given"),
    ],
)
def test_what_torchrun_would_not_run_is_refused(typed: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        recognise.parse(typed.split(), {})


def test_torchrun_reads_variables_and_launch_adds_the_local_rank() -> None:
    assert recognise.parse(["--no-python", "./run.sh", "x"], {}).program
    assert recognise.parse(["t.py"], {"PET_NPROC_PER_NODE": "4"}).ranks == "4"
    assert recognise.parse(["--nproc-per-node=2", "t.py"], {"PET_NPROC_PER_NODE": "4"}).ranks == "2"
    assert recognise.parse(["t.py", "a"], {}, launch=True).arguments == ("--local-rank=${local_rank}", "a")
    assert recognise.parse(["--use_env", "t.py", "a"], {}, launch=True).arguments == ("a",)


@pytest.mark.parametrize(
    ("ranks", "gpus", "count"), [("3", 8, 3), ("auto", 8, 8), ("auto", 0, 5), ("gpu", 2, 2), ("cpu", 8, 5)]
)
def test_ranks_are_counted_as_torch_counts_them(ranks: str, gpus: int, count: int) -> None:
    assert rank_count(ranks, gpus, 5) == count
    for wrong in ("gpu", "many", "0"):
        with pytest.raises(UsageError):
            rank_count(wrong, 0, 5)


RANK = {
    "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip


def test_a_task_has_nothing_of_torchruns_rendezvous() -> None:
    rank = dict(RANK)
    as_a_task(rank, {})
    assert rank == {"JURYMAST_LOCAL_RANK": "1", "JURYMAST_WORLD_SIZE": "8"}
    with_address = dict(RANK)
    as_a_task(with_address, {"MASTER_ADDR": "n1"})
    assert with_address["MASTER_ADDR"] == RANK["MASTER_ADDR"]


def test_what_we_add_to_the_environment_is_taken_away_again(tmp_path: Path) -> None:
    users = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/mine", "APPTAINER_BIND": "/data", "HOME": "/home/me"}
    job = RunDirectory(tmp_path / "a run")
    begun = shims.with_shims(users, job)
    script = f"{shims.exports(job, tmp_path / 'step')}\nexec env -0"
    told = subprocess.run(["sh", "-c", script], env=begun, capture_output=True, text=True, check=True).stdout
    changed = dict(line.split("=", 1) for line in told.rstrip("\0").split("\0"))
    assert changed["PATH"].split(":")[0] == str(job.root / "slurm/bin")
    assert changed["PYTHONPATH"].split(":")[-1] == "/mine"
    assert changed["APPTAINER_BIND"] == f"/data,{job.root}"
    assert "SINGULARITY_BIND" not in changed
    shells = ("PWD", "OLDPWD", "SHLVL", "_")
    left = {n: value for n, value in shims.without_shims(changed).items() if n not in shells}
    assert left == users


@pytest.mark.parametrize(
    ("users", "bound"),
    [
        ({}, {"APPTAINER_BIND": "RUN", "SINGULARITY_BIND": "RUN"}),
        ({"SINGULARITY_BIND": "/data"}, {"SINGULARITY_BIND": "/data,RUN"}),
        (
            {"APPTAINER_BIND": "/a", "SINGULARITY_BIND": "/b"},
            {"APPTAINER_BIND": "/a,RUN", "SINGULARITY_BIND": "/b,RUN"},
        ),
    ],
)
def test_a_container_sees_what_the_user_has_named_and_the_run(
    tmp_path: Path, users: dict[str, str], bound: dict[str, str]
) -> None:
    """apptainer overlooks SINGULARITY_BIND where APPTAINER_BIND is there."""
    job = RunDirectory(tmp_path / "a run")
    script = f"{shims.exports(job, tmp_path / 'step')}\nexec env -0"
    begun = {**users, "PATH": os.environ["PATH"]}
    told = subprocess.run(["sh", "-c", script], env=begun, capture_output=True, text=True, check=True).stdout
    changed = dict(line.split("=", 1) for line in told.rstrip("\0").split("\0"))
    expected = {name: value.replace("RUN", str(job.root)) for name, value in bound.items()}
    assert {name: value for name, value in changed.items() if name.endswith("_BIND")} == expected
    left = shims.without_shims(changed)
    assert {name: value for name, value in left.items() if name.endswith("_BIND")} == users


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("apptainer exec --nv image.sif python -u train.py", "python"),
        ("/opt/bin/singularity -q exec -e -B /a:/b --env A=1 ./image.sif numactl -N0 python x.py", "numactl"),
        ("apptainer exec env /opt/conda/bin/python3.11 -m pkg", "/opt/conda/bin/python3.11"),
        ("apptainer run image.sif bash -c x", "bash"),
        ("apptainer exec image.sif ./train.sh", "./train.sh"),
        ("apptainer exec image.sif torchrun train.py", "torchrun"),
        ("shifter --image=docker:x python train.py", "python"),
        ("shifter python train.py", "python"),
        ("apptainer exec image.sif nvidia-smi", None),
        ("apptainer pull image.sif docker://python", None),
        ("python train.py apptainer exec image python", None),
    ],
)
def test_the_command_of_a_container(command: str, found: str | None) -> None:
    """An image file begins like a script."""
    files = {"./image.sif": "#!/usr/bin/env run-singularity\n", "./train.sh": "#!/bin/sh\npython x.py\n"}
    files["image.sif"] = files["./image.sif"]
    words = command.split()
    place = in_container(words, lambda name: files.get(name, ""))
    assert (words[place] if place else None) == found


def test_a_container_that_hides_the_hosts_variables_is_told_where_it_is(tmp_path: Path) -> None:
    job, step = RunDirectory(tmp_path / "a run"), tmp_path / "step"
    step.mkdir()
    (step / "node").write_text(node_command(job, step, {}, 1, tmp_path / "s", {}, contained=True))
    here = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", str(step / "node"), "env"], env=here, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert {f"{prefix}_SLURMD_NODENAME=n1" for prefix in ("APPTAINERENV", "SINGULARITYENV")} <= set(
        done.stdout.splitlines()
    )
    (step / "contained").write_text(container_command(job, step))
    image = {"SLURM_JOB_ID": "7", "PYTHONPATH": "/the/images", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", str(step / "contained"), "env"], env=image, capture_output=True, text=True, check=True
    )  # fmt: skip
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert told["PYTHONPATH"] == f"{shims.hook(job)}:/the/images"
    assert (told[shims.JOB_VARIABLE], told[shims.STEP_VARIABLE]) == ("7", str(step))


def test_a_steps_command_finds_ours_whatever_became_of_its_variables(tmp_path: Path) -> None:
    job, step = RunDirectory(tmp_path / "a run"), tmp_path / "step"
    step.mkdir()
    (step / "node").write_text(node_command(job, step, {"SLURM_NNODES": "2"}, 1, tmp_path / "spares", {}))
    tell = ["sh", str(step / "node"), "sh", "-c", "env; exit 3"]
    bare = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1", "PATH": os.environ["PATH"]}
    done = subprocess.run(tell, env=bare, capture_output=True, text=True, check=False)
    assert (done.returncode, (step / "ended-n1").read_text()) == (3, "3\n")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert (told["SLURM_NNODES"], told["PYTHONPATH"]) == ("2", str(shims.hook(job)))
    assert told["PATH"] == f"{shims.folder(job)}:{os.environ['PATH']}"
    assert shims.in_the_script(told)
    spare = {**bare, "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}
    done = subprocess.run(tell, env=spare, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, (step / "ended-n2").read_text()) == (0, "", "0\n")
    assert "SLURM_NODEID=1" in (tmp_path / "spares").read_text()


@pytest.mark.parametrize("words", [["--auto-resume=1"], ["--auto-resume", "1"], ["-Y1", "-N2"]])
def test_options_that_only_the_installed_srun_knows_pass_in_their_place(
    tmp_path: Path, words: list[str]
) -> None:
    program = tmp_path / "srun"
    shims.write_program(program, "#!/bin/sh\necho '  -Y, --auto-resume=N  [site] resume'\n")
    found = parse([*words, "python", "t.py"], str(program))
    assert found is not None
    assert found.command == ["python", "t.py"]
    assert [word for given in found.options for word in given.words] == words


# A run directory may be called so.
ODD = 'a run|with & \'s "and" $so} (on) [a-z] * .. #1;'


def launched(tmp_path: Path, *command: str, **environment: str) -> list[str]:
    """What our front end for launchers got, of a Python in which the hook is there."""
    job = RunDirectory(tmp_path / ODD)
    shims.write(job, f"/..{sys.executable}")  # another Python, whose jurymast is the fake
    fake = tmp_path / "fake" / "jurymast" / "script"
    fake.mkdir(parents=True, exist_ok=True)
    (fake.parent / "__init__.py").touch()
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text("import sys, json\nprint(json.dumps(sys.argv[1:]))\n")
    users = {**os.environ, "PYTHONPATH": str(fake.parents[1]), "SLURM_JOB_ID": "7"}
    values = shims.with_shims(users, job)
    done = subprocess.run(
        command, env={**values, **environment}, capture_output=True, text=True, check=True, timeout=30
    )
    told: list[str] = json.loads(done.stdout)
    return told


def test_python_becomes_our_front_end_for_a_launcher(tmp_path: Path) -> None:
    module = [sys.executable, "-u", "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "t.py"]
    assert launched(tmp_path, *module) == ["torchrun", "--nnodes", "2", "t.py"]
    program = tmp_path / "torchrun"
    program.write_text(f"#!{sys.executable}\nprint('torch itself')\n")
    program.chmod(0o700)
    assert launched(tmp_path, str(program), "a b") == ["torchrun", "a b"]
    ours = shims.folder(RunDirectory(tmp_path / ODD))
    path = f"{ours}:{tmp_path}:{ours}:/usr/bin:/bin"
    told = launched(tmp_path, str(ours / "torchrun"), "x", PATH=path, PYTHONPATH=str(tmp_path / "fake"))
    assert told == ["torchrun", "x"]


@pytest.mark.parametrize("around", [("", ""), ("{}:", ""), ("", ":{}"), ("{}:{}:", ":{}:{}")])
def test_our_torchrun_takes_itself_out_of_path_whatever_the_run_is_called(
    tmp_path: Path, around: tuple[str, str]
) -> None:
    job = RunDirectory(tmp_path / ODD)
    shims.write(job, sys.executable)
    real = tmp_path / "real"
    real.mkdir()
    shims.write_program(real / "torchrun", '#!/bin/sh\necho "$PATH"\necho "$PYTHONPATH"\necho "$@"\n')
    ours = shims.folder(job)
    path = f"{real}:/usr/bin:{tmp_path / 'a run'}".join(one.replace("{}", str(ours)) for one in around)
    done = subprocess.run(
        [ours / "torchrun", "a  b"], env={"PATH": path, "PYTHONPATH": "/mine"}, text=True,
        capture_output=True, check=True, timeout=30,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"{real}:/usr/bin:{tmp_path / 'a run'}", f"{shims.hook(job)}:/mine", "a  b",
    ]  # fmt: skip


def test_a_script_finds_itself_whatever_its_path_and_that_of_the_run(tmp_path: Path) -> None:
    """The real scontrol is one that shows two jobs, of which the first is the script's, and then fails."""
    job, users = RunDirectory(tmp_path / ODD), f"/home/{ODD} & co/job.sbatch"
    submitted = f"{job.submission}/job.sh"
    shims.write(job, sys.executable, submitted, users)
    shims.write(job, sys.executable, submitted, "(null)")  # of a requeued job only the training is known
    real = tmp_path / "real"
    real.mkdir()
    rest = f" a\n\n   Command=/other{submitted}\nStdOut={submitted}\n\n"
    (tmp_path / "shown").write_text(f"   Command={submitted}{rest}")
    text = f'#!/bin/sh\necho "$*" >&2\ncat {shlex.quote(str(tmp_path / "shown"))}\nexit 3\n'
    shims.write_program(real / "scontrol", text)
    for words, told in ((["-o", "show", "job", "7"], users), (["show", "hostnames"], submitted)):
        done = subprocess.run(
            [shims.folder(job) / "scontrol", *words], text=True, capture_output=True, check=False, timeout=30,
            env={"PATH": f"{shims.folder(job)}:{real}:/usr/bin:/bin"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (3, " ".join(words) + "\n")
        assert done.stdout == f"   Command={told}{rest}"


def test_a_job_that_the_script_submits_has_nothing_of_ours(tmp_path: Path) -> None:
    program = tmp_path / "torchrun"
    program.write_text(f"#!{sys.executable}\nprint('[\"torch itself\"]')\n")
    program.chmod(0o700)
    assert launched(tmp_path, str(program), SLURM_JOB_ID="8") == ["torch itself"]
    (tmp_path / "srun").write_text("#!/bin/sh\necho '[\"Slurm itself\"]'\n")
    (tmp_path / "srun").chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = launched(tmp_path, "bash", "-c", "srun hostname", SLURM_JOB_ID="8", PATH=path)
    assert told == ["Slurm itself"]
    assert launched(tmp_path, "bash", "-c", "srun hostname", PATH=path) == ["srun", "hostname"]


def test_a_launcher_of_somebodys_own_is_ours_once_torch_is_to_run(tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch" / "distributed"
    fake.mkdir(parents=True)
    (fake.parent / "__init__.py").touch()
    (fake / "__init__.py").touch()
    (fake / "run.py").write_text("def run(args): print('torch itself')\n")
    own = tmp_path / "own.py"
    own.write_text(
        "import argparse, torch.distributed.run as run\n"
        "run.run(argparse.Namespace(nproc_per_node=4, nnodes='2:2', module=False, no_python=False,\n"
        "                           training_script='t.py', training_script_args=['a']))\n"
    )
    told = launched(tmp_path, sys.executable, str(own))
    assert told == ["torchrun", "--nproc-per-node", "4", "--nnodes", "2:2", "t.py", "a"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "torch.distributed.run", "x.py"], id="a launcher"),
        pytest.param(
            run_module("jurymast.script", "tasks", "2", "1", "{}", "x.py", python="x")[1:],
            id="tasks",
        ),
    ],
)
def test_a_python_without_jurymast_is_named_in_one_line(tmp_path: Path, command: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    job = RunDirectory(tmp_path)
    shims.write(job, sys.executable)
    python = tmp_path / "bare" / "bin" / "python"
    environment = shims.with_shims({"PATH": os.defpath, "SLURM_JOB_ID": "7"}, job)
    done = subprocess.run([python, *command], env=environment, capture_output=True, text=True, check=False)
    told = f"jurymast: error: no jurymast in {python}, which trains: install it there as well\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_python_of_the_scripts_own_goes_on(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import sys, json; print(json.dumps(['mine', 'sitecustomize' in sys.modules]))\n")
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "sitecustomize.py").write_text("import os; os.environ['SITE'] = 'theirs'\n")
    assert launched(tmp_path, sys.executable, str(own)) == ["mine", True]


@pytest.mark.parametrize(
    ("first", "words"),
    [("#!/bin/bash -l", ["/bin/bash", "-l"]), ("#! /usr/bin/env bash", ["/usr/bin/env", "bash"])],
)
def test_a_scripts_interpreter(tmp_path: Path, first: str, words: list[str]) -> None:
    (tmp_path / "job").write_text(f"{first}\necho\n")
    assert interpreter(tmp_path / "job") == words


def test_what_ranks_print_is_relayed_attempt_by_attempt(job: RunDirectory, tmp_path: Path) -> None:
    def prints(attempt: int, rank: int, text: str) -> None:
        path = job.rank_log(attempt, rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    job.attempt_file.write_text("1")
    prints(1, 0, "of an earlier life\n")
    srun = parse(["-o", str(tmp_path / "out"), "x"])
    assert srun is not None
    output = Output(srun, {})
    with relayed(job, output, after=1):
        job.attempt_file.write_text("3")
        prints(2, 1, "second\n")
        prints(3, 0, "third, ")
        prints(3, 0, "to its end")
    output.close()
    assert (tmp_path / "out").read_text() == "second\nthird, to its end"


@pytest.fixture
def job(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "20261120-134501-train-x7f3")
    directory.create()
    write_atomically(directory.policy_file, b"")
    directory.save_plan(
        RunPlan(
            run=directory.root.name, name="train", directory=str(directory.root), cluster="slurm", active=2,
            spares=1, ranks_per_node=1, script="job.sbatch", batch=True,
        )
    )  # fmt: skip
    return directory


def training(*arguments: str) -> Training:
    return Training(
        script="t.py", arguments=arguments, module=False, ranks=8, directory="/work", python="python"
    )


def cancel(run: RunDirectory) -> None:
    """Its journal, as a supervisor leaves it."""
    journal = JournalWriter(run.journal, 1)
    for event in [*first_events(run, 1.0, "1"), ev.Asked(t=2.0, what="cancel", by="me")]:
        journal.event(event)
    journal.close()


def test_each_training_of_a_script_is_a_run_of_its_own(job: RunDirectory) -> None:
    trainings = Trainings(job, "7.0")
    first, ended = trainings.claim(training("a"))
    assert (first.root, ended) == (job.root, None)
    beside, _ = trainings.claim(training("b"))
    assert beside.root.name == f"{job.root.name}-2"
    assert beside.plan().run == beside.root.name
    same_at_the_same_time, _ = trainings.claim(training("a"))
    assert same_at_the_same_time.root.name == f"{job.root.name}-3"
    trainings.told(first, ["n2"])
    again, _ = trainings.claim(training("a"))
    assert again.root.name == f"{job.root.name}-4"
    assert Trainings(job, "7.0").lost() == {"n2"}
    assert Trainings(job, "7.1").lost() == set()


def test_a_requeued_scripts_trainings_go_on_where_they_were(job: RunDirectory) -> None:
    trainings = Trainings(job, "7.0")
    done, _ = trainings.claim(training("a"))
    trainings.told(done)
    going_on, _ = trainings.claim(training("b"))
    life = Trainings(job, "7.1")
    assert life.claim(training("b"))[0].root == going_on.root
    assert life.claim(training("a"))[0].root not in (done.root, going_on.root)  # the script had heard of it


@pytest.mark.parametrize("damage", [b"", b'{"run": "', bytes(100), b"[1]", b'{"run": 3}'])
def test_a_training_whose_entry_is_damaged_goes_on_in_its_run(job: RunDirectory, damage: bytes) -> None:
    trainings = Trainings(job, "7.0")
    runs = {}
    for name in ("a", "b"):
        runs[name], _ = trainings.claim(training(name))
        runs[name].save_plan(training(name).plan(job.plan(), runs[name]))
    for name in ("a", "b"):
        (trainings._folder / f"{training(name).key}-1.json").write_bytes(damage)
    life = Trainings(job, "7.1")
    assert life.claim(training("b"))[0].root == runs["b"].root
    assert life.claim(training("c"))[0].root not in [run.root for run in runs.values()]
    assert life.claim(training("a"))[0].root == runs["a"].root


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a run to another user needs root")
def test_names_that_others_have_taken_beside_a_script_s_run_are_none_of_its_runs(job: RunDirectory) -> None:
    """The script's second training could not start, or had the result that somebody else had written."""
    trainings = Trainings(job, "7.0")
    trainings.claim(training("a"))
    theirs = RunDirectory(f"{job.root}-2")
    theirs.create()
    theirs.save_plan(training("b").plan(job.plan(), theirs))
    cancel(theirs)
    Path(f"{job.root}-3").symlink_to("nowhere")
    for place in (theirs.root, *theirs.root.rglob("*")):
        os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    run, code = trainings.claim(training("b"))
    assert (run.root, code) == (Path(f"{job.root}-4"), None)
    (trainings._folder / f"{training('b').key}-1.json").write_bytes(b"damaged")
    run.save_plan(training("c").plan(job.plan(), run))
    run, code = Trainings(job, "7.1").claim(training("b"))
    assert (run.root, code) == (Path(f"{job.root}-5"), None)


def test_an_end_that_the_script_has_not_heard_of_is_told_and_not_repeated(job: RunDirectory) -> None:
    run, _ = Trainings(job, "7.0").claim(training("a"))
    cancel(run)
    same, code = Trainings(job, "7.1").claim(training("a"))
    assert (same.root, code) == (run.root, RunCancelledError.exit_code)


def test_a_launcher_that_does_not_find_us_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = ["python", "-I", "-m", "torch.distributed.run", "train.py"]
    warn_if_unreached(tmp_path, launcher)  # srun did not start it
    (tmp_path / NUMBER_FILE).touch()
    warn_if_unreached(tmp_path, ["python", "prepare.py"])
    assert capsys.readouterr().err == ""
    warn_if_unreached(tmp_path, launcher)
    assert "no launcher in this step found jurymast" in capsys.readouterr().err
    (tmp_path / REACHED).touch()
    warn_if_unreached(tmp_path, ["torchrun", "--nnodes=1", "train.py"])
    assert capsys.readouterr().err == ""
    for reached in ("", "trainings", "steps"):
        job = RunDirectory(tmp_path / f"run-{reached}")
        (job.submission / reached).mkdir(parents=True)
        warn_if_none_reached(job, "unset PYTHONPATH\npython -m torch.distributed.run train.py\n")
        assert ("no launcher in this script found" in capsys.readouterr().err) is (not reached)
    for text in ("cat <<'END' > b.sh\ntorchrun a.py\nEND\nsbatch b.sh\n", "# torchrun\npython a.py\n"):
        warn_if_none_reached(RunDirectory(tmp_path / "another"), text)
        assert capsys.readouterr().err == ""


def test_a_step_whose_script_is_gone_waits_for_nothing() -> None:
    """Slurm has killed the shell of a job that is requeued, and not found what that had started."""
    words = "import os; from jurymast.script import step; print(os.getpid(), flush=True); step._await_end()"
    script = f"{sys.executable} -c {shlex.quote(words)} & wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        waiting = psutil.Process(int(shell.stdout.readline()))
        shell.kill()
        waiting.wait(60.0)


@pytest.mark.parametrize("of_the_script", [{}, {"SLURM_STEP_ID": "-5"}], ids=["before 26.05", "26.05"])
def test_a_launcher_that_the_script_calls_itself_starts_a_step(
    job: RunDirectory, tmp_path: Path, of_the_script: dict[str, str]
) -> None:
    Allocation("7", 0, ("n1", "n2", "n3"), "n1", 0.0).save(job)
    write_json(true_variables_file(job), {})
    shims.write_program(tmp_path / "srun", '#!/bin/sh\necho srun "$@"\n')
    users = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **of_the_script}
    done = subprocess.run(
        run_module("jurymast.script", "torchrun", "train.py"), env=shims.with_shims(users, job),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("srun "), done.stderr
    assert "--nodes=3 " in done.stdout
