"""Jobs that train by themselves on the test cluster, launched by sbatch or by jurymast, and the faults that
strike them, each at a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jurymast.report.which_run import find_run
from support.outputs import checked
from support.runs import SCRIPTS
from support.slurm_runs import hurried, jurymast
from testcluster import Cluster
from testcluster.processes import wait_until

LIMIT_S = 240.0
JOB = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --output=log-%j.out --open-mode=append --requeue
#JURYMAST --train yes
srun --kill-on-bad-exit python $TRAIN . $1 || scontrol requeue $SLURM_JOB_ID
"""


EACH = 40  # steps from a fault to the next one
Faults = Sequence[tuple[str, int]]  # what happens, to the node of which rank


class Job:
    """A job whose command line is `words`, submitted from a directory of its own."""

    def __init__(self, cluster: Cluster, work: Path, *words: str, script: str = JOB) -> None:
        self.cluster, self.work = cluster, work
        cluster.login(["mkdir", "-p", str(work)])
        (work / "job.sbatch").write_text(script)
        done = cluster.login(
            list(words), cwd=work, timeout_s=LIMIT_S,
            env={
                "PATH": f"{cluster.python.parent}:/usr/bin:/bin", "JURYMAST_RUNS": str(work / "runs"),
                "TRAIN": str(SCRIPTS / "train_by_itself.py"),
            },
        )  # fmt: skip
        self.number = int(done.stdout.strip())

    def step(self) -> int:
        """The newest step that was ever done."""
        file = self.work / "steps"
        return max(map(int, file.read_text().split()), default=0) if file.exists() else 0

    def wait_step(self, step: int) -> None:
        wait_until(lambda: self._reached(step), LIMIT_S, f"step {step} of {self.number}", 0.5)

    def _reached(self, step: int) -> bool:
        if self.step() >= step:
            return True
        assert hurried(self.cluster, self.number)["JobState"] != "COMPLETED"
        return False

    def strike(self, kind: str, rank: int) -> None:
        node, pid = (self.work / f"rank-{rank}").read_text().split()
        if kind == "kill":
            self.cluster.fault("kill", node, pid=int(pid), signal="KILL")
        else:
            self.cluster.fault(kind, node)

    @property
    def directory(self) -> Path:
        return find_run(str(self.number), self.work / "runs").root

    def report(self, *words: str) -> dict[str, Any]:
        of = str(self.number) if words else str(self.directory)
        code, told, error = jurymast(self.cluster, "report", of, "--json", *words)
        assert code == 0, error
        found: dict[str, Any] = checked(json.loads(told), "report", of, *words)
        return found

    def play(self, faults: Faults, each: int = EACH) -> None:
        """Let each fault strike, and the job end."""
        for number, (kind, rank) in enumerate(faults, 1):
            self.wait_step(each * number + 5)
            self.strike(kind, rank)
        self.wait_step(each * (len(faults) + 1))
        self.cluster.wait_job(self.number, "COMPLETED", deadline_s=LIMIT_S)
        wait_until(lambda: self.report("--slurm")["state"] == "completed", LIMIT_S, "the accounts", 1.0)
