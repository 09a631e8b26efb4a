"""What a dry run says of a batch script's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.cluster.sbatch import CommandLine
from jurymast.script.foreseen import foreseen

HEAD = "#!/bin/bash\n#SBATCH -N2\nmodule load cuda\n"


@pytest.mark.parametrize(
    ("line", "protected", "why"),
    [
        ("srun torchrun --nnodes=$SLURM_NNODES train.py", True, "under the agents"),
        ("srun torchrun --nnodes=1 train.py", False, "without failure handling"),
        ("torchrun train.py", True, "as if srun preceded it"),
        ("FOO=1 exec deepspeed --hostfile h train.py", False, "deepspeed: starts its ranks by itself"),
        ("srun mpirun python train.py", False, "MPI starts the ranks"),
        ("srun --nodes=$SLURM_NNODES \\\n  python train.py", True, "`torch.distributed` in it shows"),
        ("srun python shard.py", False, "independent tasks"),
        ("srun python elsewhere.py", True, "its text does not show which"),
        ("srun -N1 -n1 python train.py", False, "not a training"),
        ("/usr/bin/srun torchrun train.py", False, "by its full path"),
        ("python train.py", False, "runs once, on the first node"),
    ],
)
def test_what_happens_to_a_line(
    line: str, protected: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch.distributed\n")
    Path("shard.py").write_text("import numpy\n")
    (found,) = foreseen(f"{HEAD}{line}\necho done # python x.py\n", CommandLine(), 2)
    assert (found.line, found.protected) == (4, protected), found
    assert why in found.why


def test_what_the_script_says_of_its_tasks_counts() -> None:
    for train, protected in (("yes", True), ("no", False)):
        (found,) = foreseen("srun -N2 python shard.py", CommandLine(), 2, train)
        assert (found.protected, found.why.endswith(f"`train: {train}`")) == (protected, True)
