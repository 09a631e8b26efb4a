"""Which accelerators are this job's: what Slurm granted, what variables name, what is there, and what the job
may open. Each is a count of its own, and only like is compared with like.

A GPU may be divided (NVIDIA's MIG, AMD's partitions), and Slurm may then count the parts. A variable chooses
among the GPUs that the job may open; it may name fewer than were granted, or some that do not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jurymast.core.state.findings import Verdict

# Set by Slurm itself, which counts what it grants; the others are the user's.
COUNT = "SLURM_GPUS_ON_NODE"
BY_SLURM = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Words that end such a list: CUDA and HIP see what is named before an invalid number, and Slurm sets
# NoDevFiles for a job without GPUs.
_ENDS = ("nodevfiles", "none", "void")


def granted_gpus(environment: Mapping[str, str]) -> int | None:
    """The number of GPUs, or parts of GPUs, that Slurm gave this job on this node, by the variables in
    `environment`; None if they do not say."""
    count = environment.get(COUNT, "")
    if count.isdigit():
        return int(count)
    named = (named_in(environment.get(variable)) for variable in BY_SLURM)
    return next((len(words) for words in named if words), None)


def named_in(value: str | None) -> list[str] | None:
    """The devices that a variable like CUDA_VISIBLE_DEVICES names, each once, up to the first word that names
    none; None if it is not set."""
    if value is None:
        return None
    found: dict[str, None] = {}
    for word in (part.strip() for part in value.split(",")):
        if word.startswith("-") or word.lower() in _ENDS:
            break
        if word:
            found[word] = None
    return list(found)


def may_open(*files: Path) -> bool | None:
    """Whether this process may open one of these device files, by its rights and its device cgroup, which
    access(2) asks, too; None if there is none of them."""
    there = [file for file in files if file.exists()]
    return any(os.access(file, os.R_OK | os.W_OK) for file in there) if there else None


UNSURE = "it cannot be told which GPUs of this machine are this job's"


def all_are_ours(granted: int | None, openable: int | None) -> bool:
    """Whether GPUs (or parts) that no variable names are all this job's. Without a device cgroup, a job may
    open others' GPUs, too: of `openable`, only `granted` are its own. None: not known."""
    return granted is None or (openable is not None and granted >= openable)


@dataclass(frozen=True)
class Counts:
    """The GPUs of a node, each number None if it is not known. `granted`: by Slurm, in GPUs or in parts.
    `present`: all that exist; `openable`: those of them that this job may open; `parts`: into which the
    openable ones are divided, a whole GPU counted as one; `named`: by the variable that Slurm sets, `found`
    those of them that exist (both 0 if it names none, or parts)."""

    granted: int | None
    present: int
    openable: int
    parts: int | None
    named: int = 0
    found: int = 0

    def missing(self) -> tuple[Verdict, str] | None:
        """The verdict and the text if fewer GPUs are there than were granted; None if none is missing, or if
        that cannot be told."""
        granted = self.named if self.granted is None else self.granted
        there = self.found if self.granted is None else max(self.openable, self.parts or 0)
        if there < granted:
            if self.present >= granted > self.openable and self.granted is not None:
                said = f"{granted} GPUs were granted here, but only {self.openable} of {self.present}"
                return Verdict.UNKNOWN, f"{said} can be opened: are the rights to the device files missing?"
            if self.parts is None and self.openable and granted % self.openable == 0:
                said = f"{granted} GPUs or parts of GPUs were granted here, {self.openable} GPUs are present"
                return Verdict.UNKNOWN, f"{said}, and how they are divided cannot be seen"
            return Verdict.BAD, f"{there} of {granted} GPUs granted here are present"
        if self.openable > granted == self.named > self.found:
            # The job may open others' GPUs, too, so Slurm's numbers are those of the whole node.
            return Verdict.BAD, f"{self.found} of {granted} GPUs granted here are present"
        return None
