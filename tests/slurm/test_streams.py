"""What tasks read, and what they print while a line of it has no end yet. For the first there is nothing to
compare with: with a file for each task, srun 22.05, 24.11 and 26.05 hang or break off."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.slurm_runs import submit_script
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 800.0
READS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=out
#JURYMAST train: yes
export SRUN_CPUS_PER_TASK=1
for n in 0 1 2 3; do echo "text $n" > in.$n; done
for n in 1 2; do echo "text of n$n" > in-n$n; done
echo 'import os, sys; print(sys.argv[1], os.environ[sys.argv[2]], "reads", input(), flush=True)' > reads.py
srun --overlap -i in.%t python reads.py task SLURM_PROCID
srun --overlap -i in-%N python reads.py on SLURMD_NODENAME
"""
# A bar and dots; and each way in which their process is started, with where both must be seen as they grow.
GROWS = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --output=out
#JURYMAST train: yes
export SRUN_CPUS_PER_TASK=1
cat > bar.py <<END
import os, sys, time
print("Loading..", end="", flush=True)
print("\\r  0%|  | 0/9", end="\\r 10%|# | 1/9", file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print(". done", flush=True)
END
seen() {
  for _ in {1..1200}; do
    if grep -qs "$2" "$3" && grep -qs "1/9" "$4"; then
      echo "seen: $1"
      break
    fi
    sleep 0.1
  done
  touch "$1"
  wait
}
torchrun --standalone --nproc-per-node=1 bar.py launcher > launcher.out 2> launcher.err &
seen launcher Loading launcher.out launcher.err
srun -u -o of.%t -e err.%t python bar.py unbuffered &
seen unbuffered Loading of.0 err.0
srun -n1 -e one torchrun --standalone --nproc-per-node=1 bar.py bar &
seen bar "" one one
"""


def lines(cluster: Cluster, work: Path, script: str) -> list[str]:
    run = submit_script(cluster, work, script)
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    return sorted(re.findall(r"^(?:task|on|seen).*$", (work / "out").read_text(), re.MULTILINE))


def test_each_task_reads_the_file_that_is_named_for_it(cluster: Cluster, tmp_path: Path) -> None:
    found = lines(cluster, cluster.shared / tmp_path.name, READS)
    nodes = [f"on n{node} reads text of n{node}" for node in (1, 1, 2, 2)]
    assert found == [*nodes, *(f"task {task} reads text {task}" for task in range(4))]


def test_lines_are_seen_while_they_grow(cluster: Cluster, tmp_path: Path) -> None:
    """With a launcher that the script itself starts, also those that no bar has begun: nobody would hold them
    back without us."""
    found = lines(cluster, cluster.shared / tmp_path.name, GROWS)
    assert found == ["seen: bar", "seen: launcher", "seen: unbuffered"]
