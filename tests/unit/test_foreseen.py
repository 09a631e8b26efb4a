"""What a dry run says of a batch script's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.cluster.sbatch import CommandLine, Given
from jurymast.script import shell
from jurymast.script.foreseen import foreseen

# What stands around the line, with what only looks as if it started something.
HEAD = """#!/bin/bash
#SBATCH -N2
module load cuda; pip install accelerate
WORK=$(pwd) HIDDEN="torchrun"
export LAUNCHER="torchrun \\
    --nproc-per-node 2 \\
    --nnodes $SLURM_NNODES \\
    "
OPTIONS="--wait=60 --kill-on-bad-exit=1"
if [ -n "$OWN" ]; then OPTIONS="--no-such-option"; fi
declare -a LIST=(
    --label  # its tasks
    --unbuffered
)
cat <<END > run.sh
srun torchrun train.py
END
echo "srun torchrun train.py" '`srun python train.py`'
"""
TAIL = "pkill -f torchrun; echo it's done\n"


@pytest.mark.parametrize(
    ("line", "protected", "why"),
    [
        ("srun torchrun --nnodes=$SLURM_NNODES train.py", True, "under the agents"),
        ("srun torchrun --nnodes=1 train.py", False, "without failure handling"),
        ("srun -i in.txt torchrun train.py", True, "its ranks read nothing, also with --input"),
        ("torchrun train.py", True, "as if srun preceded it"),
        ("colossalai run --nproc_per_node 4 train.py", False, "colossalai: starts its ranks by itself (ssh)"),
        ("FOO=1 exec deepspeed --hostfile h train.py", False, "deepspeed: starts its ranks by itself"),
        ("srun mpirun python train.py", False, "MPI starts the ranks"),
        ("python3 -u -m deepspeed.launcher.runner train.py", False, "deepspeed: starts its ranks by itself"),
        ("srun python -m horovod.runner train.py", False, "horovodrun: starts its ranks by itself"),
        ("srun singularity exec a.sif deepspeed train.py", False, "deepspeed: starts its ranks by itself"),
        ("srun bash -c 'cd x && deepspeed train.py'", False, "deepspeed: starts its ranks by itself"),
        ("srun bash -c 'cd x && mpirun python train.py'", False, "mpirun: MPI starts the ranks"),
        ("srun bash -c 'A=1 exec /opt/bin/mpirun.openmpi python train.py'", False, "MPI starts the ranks"),
        ("srun bash -c '(cd x; timeout 1h mpiexec -n 4 python train.py)'", False, "mpiexec: MPI starts"),
        ("srun env A=1 mpirun -n 4 python train.py", False, "mpirun: MPI starts the ranks"),
        ("srun singularity exec a.sif mpirun -n 4 python train.py", False, "mpirun: MPI starts the ranks"),
        (
            "srun timeout 1h sh -c 'sleep 1; python -m deepspeed train.py'",
            False,
            "deepspeed: starts its ranks",
        ),
        (
            "srun bash -c 'bash -c \"horovodrun -np 4 python train.py\"'",
            False,
            "horovodrun: starts its ranks",
        ),
        ("srun bash -c 'ray start --head --block'", False, "ray: Ray starts the ranks"),
        ("srun bash -c 'ssh $other torchrun train.py'", False, "ssh: starts it outside the job's steps"),
        ("srun bash -c 'echo no mpirun; torchrun train.py'", True, "under the agents"),
        ("srun bash -c 'which mpirun; torchrun train.py'", True, "under the agents"),
        ("srun bash -c 'if $A; then mpirun python train.py; else python train.py; fi'", None, "too little"),
        ("srun bash -c 'python prepare.py; mpirun -n 4 python train.py'", False, "mpirun: MPI starts"),
        ("timeout 1h mpirun -n 4 python train.py", False, "mpirun: MPI starts the ranks"),
        ("srun -n2 hostname deepspeed", False, "not a training"),
        ("torchx run -s slurm dist.ddp", False, "torchx: starts a job of its own"),
        ("python3 train.py -m deepspeed", False, "put `torchrun` before it"),
        ("srun --export=NONE python train.py", False, "no PATH by which to find python"),
        ("srun --export=A=1,B torchrun train.py", False, "no PATH by which to find torchrun"),
        ("srun --export=NONE /opt/bin/torchrun train.py", True, "under the agents"),
        ("srun --export=ALL,A=1 torchrun train.py", True, "under the agents"),
        ("srun --nodes=$SLURM_NNODES \\\n  python train.py", True, "`torch.distributed` in it shows"),
        ("srun python shard.py", False, "independent tasks"),
        ("srun --mpi=pmix python shard.py", False, "independent tasks"),
        ("srun --mpi=pmix python train.py", True, "`torch.distributed` in it shows"),
        ("srun --mpi=pmix python -m solver", False, "`--mpi=pmix` asks for an MPI, and nothing in it shows"),
        ("srun python elsewhere.py", None, "2 tasks, and the text shows too little"),
        ("srun python -m lm_eval --model hf", None, "`#JURYMAST train: yes` or `no` says which"),
        ("srun python -m torch_scripts.of_ours", None, "independent until one makes a process group"),
        ("srun python jax.py", True, "each task is a rank: `jax.distributed` in it shows a training"),
        ("srun -N1 -n1 python train.py", False, "not taken for a training"),
        ("srun --cpu_bind=v --accel-bind=gn python train.py", True, "`torch.distributed` in it shows"),
        ("/usr/bin/srun torchrun train.py", False, "by its full path"),
        ("python train.py", False, "runs once, on the first node"),
        # Variables, lists and quotes over several lines.
        ('srun $OPTIONS bash -c "$LAUNCHER $WORK/train.py"', True, "under the agents"),
        ('srun "${LIST[@]}" python ${SCRIPT:-train.py}', True, "`torch.distributed` in it shows"),
        ("srun bash -c '$LAUNCHER train.py' 2>&1 | tee log", True, "under the agents"),
        ("srun bash -c '$HIDDEN train.py'", False, "not a training"),
        ("srun --label bash -c '\n cd x\n torchrun train.py\n'", True, "under the agents"),
        ("srun $(which torchrun) train.py", True, "under the agents"),
        ('eval "$LAUNCHER train.py"', True, "as if srun preceded it"),
        ("srun $ELSEWHERE train.py", None, "is known only when it runs"),
        # Other commands around it.
        ("cd x && timeout 1h srun torchrun train.py > log &", True, "under the agents"),
        ("(cat hosts | xargs -I{} srun -N1 -n1 -w {} torchrun --nnodes=2 x.py)", True, "a part for one node"),
        ('ssh $host "cd $PWD; torchrun train.py"', False, "ssh: starts it outside the job's steps"),
        # Not on all nodes, or not one in each.
        ("srun --ntasks-per-node=4 torchrun train.py", False, "in each of 4 tasks a node"),
        ("srun -N1 -n1 torchrun train.py", False, "on one node of several"),
        ("srun -N $((N - 1)) -n $((N - 1)) torchrun train.py", None, "is known only when it runs"),
        # Accelerate, which uses torch's launcher only for several GPUs.
        ("srun accelerate launch --multi_gpu train.py", True, "under the agents"),
        ("srun accelerate launch --config_file fsdp.yaml train.py", True, "under the agents"),
        ("srun accelerate launch --config_file later.yaml train.py", True, "under the agents"),
        (
            "srun accelerate launch --config_file cpu.yaml train.py",
            False,
            "with cpu.yaml, which names no kind",
        ),
        ("accelerate launch --cpu -m lm_eval", False, "by itself, unseen, with --cpu"),
        ("accelerate launch \\\n -m lm_eval --model hf", False, "the job asks for none"),
        ("srun bash -c 'accelerate launch -m lm_eval; torchrun train.py'", True, "under the agents"),
        ("accelerate launch --num_processes 1 -m lm_eval", False, "with --num_processes=1"),
        ("python -m lm_eval --model hf", False, "runs once, on the first node"),
        ("torchrun --standalone train.py", False, "on the first node, without failure handling"),
        # Shell scripts that start it, or that cannot be read here.
        ("srun bash -c 'cd . && ./launch.sh'", True, "under the agents"),
        ("coproc srun torchrun train.py", True, "under the agents"),
        ("coproc NAME { srun torchrun train.py; }", True, "under the agents"),
        ("srun ./later.sh", None, "./later.sh cannot be read here"),
        ("srun my-wrapper python train.py", False, "my-wrapper is not known to start ranks"),
        ("bash -e launch.sh a", True, "`exec bash ./inner.sh` in it: `torchrun train.py` in it: a launcher"),
        ("source ./inner.sh", True, "`torchrun train.py` in it"),
        ("./launch.sh", True, "as if srun preceded it"),
        ("bash -eo pipefail later.sh", None, "later.sh cannot be read here"),
        ("nohup ./later.sh > log &", None, "./later.sh cannot be read here"),
        # Text for another shell, and what prints words.
        ("bash -lc 'srun python train.py'", True, "`srun python train.py` in it: each task is a rank"),
        ("eval $RUN train.py", None, "`$RUN train.py` in it: what $RUN stands for is known only"),
        ("trap 'srun torchrun train.py' USR1", True, "`srun torchrun train.py` in it: a launcher"),
        ("if true; then\n{\n:\n}\nelse srun python shard.py\nfi", False, "independent tasks"),
        ("$RUN python train.py", None, "what $RUN stands for is known only when it runs"),
        ('"${RUN[@]}" train.py', None, "what ${RUN[@]} stands for"),
        ("done_at=$(srun torchrun train.py)", True, "under the agents"),
        ('echo "first `srun python shard.py` last"', False, "independent tasks"),
    ],
)
def test_what_happens_to_a_line(
    line: str, protected: bool | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch.distributed\n")
    Path("fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    Path("cpu.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    Path("shard.py").write_text("import numpy\n")
    Path("jax.py").write_text("import numpy\njax.distributed.initialize()\n")
    Path("launch.sh").write_text("#!/bin/sh\n# not here: srun\nexec bash ./inner.sh\n")
    Path("inner.sh").write_text("#!/bin/sh\ntorchrun train.py\n")
    Path("launch.sh").chmod(0o755)
    (found,) = foreseen(f"{HEAD}{line}\necho done # python x.py\n{TAIL}", CommandLine(), 2)
    before = line.partition("else")[0].count("\n") if "else" in line else 0
    assert found.line == HEAD.count("\n") + 1 + before
    assert found.protected is protected, found
    assert why in found.why


@pytest.mark.parametrize("option", ["gres=gpu:4", "gpus-per-node=4"])
def test_accelerate_uses_torchs_launcher_where_there_are_gpus(option: str) -> None:
    name, _, value = option.partition("=")
    asked = CommandLine(options=[Given(name, value, (f"--{option}",))])
    (found,) = foreseen("accelerate launch -m lm_eval", asked, 2)
    assert found.protected


def test_what_the_script_says_of_its_tasks_counts() -> None:
    for train, protected in (("yes", True), ("no", False)):
        (found,) = foreseen("srun -N2 python shard.py", CommandLine(), 2, train)
        assert (found.protected, found.why.endswith(f"`train: {train}`")) == (protected, True)


LAUNCH = "python -u -m torch.distributed.run --nnodes 2 train.py"


@pytest.mark.parametrize(
    ("lines", "protected"),
    [
        (f"export PYTHONPATH=/repo\n{LAUNCH} 2>&1 | tee log", False),
        (f'export L="{LAUNCH}"\nexport PYTHONPATH=$REPO\n$L', False),
        (f"PYTHONPATH=. {LAUNCH}", False),
        (f"PYTHONPATH=/repo\nexport PYTHONPATH\nbash -c '{LAUNCH}'", False),
        (f"srun bash -c 'export PYTHONPATH=/repo; {LAUNCH}'", False),
        ("python -I -m torch.distributed.run --nnodes 2 train.py", False),
        ("python -uS -m torch.distributed.run --nnodes 2 train.py", False),
        (f"module purge; unset LD_PRELOAD PYTHONPATH\n{LAUNCH}", False),
        (f"unsetenv PYTHONPATH\n{LAUNCH}", False),
        (f"env -u PYTHONPATH {LAUNCH}", False),
        (f'env -i HOME="$HOME" PATH="$PATH" {LAUNCH}', False),
        (f"srun bash -c 'unset PYTHONPATH; {LAUNCH}'", False),
        # It is extended, is not exported, or hides nothing.
        (f"export PYTHONPATH=/repo:$PYTHONPATH\n{LAUNCH}", True),
        (f'export PYTHONPATH="/repo${{PYTHONPATH:+:$PYTHONPATH}}"\n{LAUNCH}', True),
        (f"srun bash -c 'export PYTHONPATH=/repo:$PYTHONPATH; {LAUNCH}'", True),
        (f"PYTHONPATH=. python prepare.py\n{LAUNCH}", True),
        (f"export PYTHONPATH=/repo\nsrun {LAUNCH}", True),
        (f"unset PYTHONPATH\nsrun {LAUNCH}", True),
        (f"PYTHONPATH=. srun {LAUNCH}", True),
        (f"env -u PYTHONPATH srun {LAUNCH}", True),
        (f"srun --export=ALL,PYTHONPATH=/repo {LAUNCH}", True),
        (f"PYTHONPATH=. srun bash -c 'PYTHONPATH=. {LAUNCH}'", False),
        (f"srun env -i PATH=$PATH {LAUNCH}", False),
        (f"env -i PATH=$PATH srun {LAUNCH}", False),
        (f"unset PYTHONHOME\nenv -u DISPLAY {LAUNCH}", True),
        (f"env -i PATH=$PATH python prepare.py\n{LAUNCH}", True),
        ("export PYTHONPATH=/repo\ntorchrun --nnodes 2 train.py", True),
    ],
)
def test_a_launcher_whose_python_cannot_find_jurymast_is_not_protected(lines: str, protected: bool) -> None:
    last = foreseen(f"#!/bin/bash\n{lines}\n", CommandLine(), 2)[-1]
    assert last.protected is protected, last.why
    assert protected or "jurymast" in last.why


@pytest.mark.parametrize(
    ("chosen", "protected"),
    [
        ("if [ -d x ]; then export PYTHONPATH=/repo; fi", None),
        ("if [ -d x ]; then PYTHONPATH=/repo; else unset PYTHONPATH; fi", None),
        ("case $H in a) unset PYTHONPATH;; esac", None),
        ("if true; then\n export PYTHONPATH=/repo:$PYTHONPATH\nfi", True),
        ("if true; then export PYTHONPATH=/repo; fi\nexport PYTHONPATH=/repo:$HOOK", False),
    ],
)
def test_whether_a_launcher_finds_jurymast_may_be_the_scripts_choice(
    chosen: str, protected: bool | None
) -> None:
    last = foreseen(f"#!/bin/bash\n{chosen}\n{LAUNCH}\n", CommandLine(), 2)[-1]
    assert last.protected is protected, last.why
    assert protected is not None or last.why.startswith("only the running script knows whether PYTHONPATH")


@pytest.mark.parametrize(
    ("line", "site", "differs"),
    [
        ("srun --task-prolog=/p.sh --ntasks=8 python train.py", "TaskProlog", ""),  # before each rank
        (
            "srun --task-prolog=/p.sh --ntasks=8 apptainer exec i.sif python train.py",
            "TaskProlog",
            "--task-prolog and TaskProlog: once on each node, spares",
        ),
        ("srun --container-image=i --task-prolog=/p -n8 python train.py", "", "--task-prolog: once on"),
        (
            "time srun -n8 --task-epilog e singularity exec i python -m x",
            "TaskEpilog",
            "--task-epilog and TaskEpilog: once on",
        ),
        ("srun -n8 --container-image=i python train.py", "TaskEpilog", "not for each of its 4 tasks"),
        ("time srun -n8 --task-epilog e python -m x", "TaskProlog TaskEpilog", ""),
        ("srun --ntasks=8 python train.py", "", ""),
        ("srun --task-prolog=p.sh -N2 torchrun train.py", "TaskProlog", ""),  # one task a node
        ("/bin/srun --task-prolog=p.sh --ntasks=8 python train.py", "TaskProlog", ""),  # srun's own
    ],
)
def test_programs_around_tasks_that_run_once_on_each_node_are_told(
    line: str, site: str, differs: str
) -> None:
    (found,) = foreseen(f"{HEAD}{line}\n{TAIL}", CommandLine(), 2, around=site.split())
    assert (bool(found.differs), differs in found.differs) == (bool(differs), True), found.differs


@pytest.mark.parametrize(
    "hostile",
    [
        'echo "' + '"$("' * 3000,
        "echo " + '$(echo "' * 3000,
        "echo " + "${A:-" * 5000,
        "A=(" * 5000,
        'echo "' + "${A:-x" * 3000 + '"',
        "".join(f"cat <<E{number}\n" for number in range(5000)),
        "echo " + "a" * 2_000_000,
        'A="' + "x" * 8000 + '"\n' + "srun torchrun $A\n" * 1000,
    ],
)
def test_a_script_that_would_take_long_to_read_is_read_in_part_and_that_is_said(hostile: str) -> None:
    first, *_, last = foreseen(f"srun torchrun train.py\n{hostile}\n", CommandLine(), 2)
    assert (first.line, first.protected) == (1, True)
    assert last.protected is None
    assert "the script is too long to be read beforehand" in last.why


def test_a_command_of_many_words_is_not_searched_for_what_it_starts() -> None:
    """Each `uv run` in it might be the one before a script."""
    many = "bash -c '" + "uv run " * 20_000 + "'"
    found = foreseen(f"{many}\nsrun torchrun train.py\n", CommandLine(), 2)
    assert [one.protected for one in found] == [None, True]
    assert len(found[0].command) <= 80


def test_variables_put_into_each_other_have_an_end() -> None:
    values = {"A": "$B" * 2000, "B": "$C" * 2000, "C": "x" * 2000}
    assert len(shell.spelled_out("$A" * 2000, values)) < 1 << 24
