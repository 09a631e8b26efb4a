"""Reads Slurm's view of the cluster; parses formats that every supported release prints alike."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

SQUEUE_FORMAT = "%A|%P|%j|%u|%T|%M|%D|%r|%N|%B"
_NODE = re.compile(r"^NodeName=(\S+) .*?\bState=(\S+)", re.MULTILINE)
# Slurm's own fields of a job: its name stands before them, what else its owner wrote after them.
_OWN = re.compile(r" UserId=\S+\(\d+\) GroupId=\S+ (.*?)(?: Features=| Command=| WorkDir=|$)", re.DOTALL)
_USABLE = frozenset({"IDLE", "ALLOCATED", "MIXED"})


@dataclass(frozen=True)
class Job:
    """A line of squeue; texts are Slurm's own, ``elapsed`` is [days-][hours:]minutes:seconds."""

    id: int
    partition: str
    name: str
    user: str
    state: str
    elapsed: str
    node_count: int
    reason: str
    nodes: str
    batch_host: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def parse_jobs(text: str) -> list[Job]:
    """Jobs from ``squeue --noheader --format SQUEUE_FORMAT``."""
    jobs: list[Job] = []
    for line in text.splitlines():
        # A job's name may contain the separator: it is what remains between the fixed fields.
        identity, partition, rest = line.split("|", 2)
        name, user, state, elapsed, count, reason, nodes, batch_host = rest.rsplit("|", 7)
        jobs.append(
            Job(int(identity), partition, name, user, state, elapsed, int(count), reason, nodes, batch_host)
        )
    return jobs


def parse_job(text: str) -> dict[str, str]:
    """Slurm's own fields in ``scontrol --oneliner show job``; a value with spaces is cut at the first."""
    own = _OWN.search(text)
    return dict(word.split("=", 1) for word in own[1].split() if "=" in word) if own else {}


def parse_node_states(text: str) -> dict[str, str]:
    """State of every node, such as IDLE or DOWN+NOT_RESPONDING, from ``scontrol --oneliner show node``."""
    return {match[1]: match[2].rstrip("*") for match in _NODE.finditer(text)}


def usable(state: str) -> bool:
    """Whether Slurm would start a job there, or has one there, and hears from the node."""
    words = state.split("+")
    return words[0] in _USABLE and not {"NOT_RESPONDING", "DRAIN", "FAIL", "MAINT"} & set(words)
