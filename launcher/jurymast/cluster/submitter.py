"""Who submits a job, and where it goes, as its options say, or else as Slurm takes it; and its policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from jurymast import foreign
from jurymast.cluster.sbatch import CommandLine
from jurymast.cluster.slurm import partitions
from jurymast.errors import ClusterUnavailableError
from jurymast.jobs import run_command
from jurymast.policy.resolve import Resolved, pairs_layer, resolve
from jurymast.policy.site import layers_below, layers_of, over


class JobsSubmitter:
    """`given`: the user, account, QOS and partition (a comma list) as far as they are named. Slurm is asked
    for the others only when somebody wants to know. With `slurm` off there is none to ask. `unknown`: what it
    could not say, and why."""

    def __init__(self, given: Mapping[str, str | None], *, clusters: str = "", slurm: bool = True) -> None:
        self._given = {what: name for what, name in given.items() if name}
        self._clusters, self._slurm = clusters, slurm
        self.unknown: dict[str, str] = {}

    def names(self, what: str) -> tuple[str, ...]:
        """The user, the account, the QOS or the partitions of the job; none if that is not known."""
        if what not in self._given:
            self._given[what] = self._asked(what)
        return tuple(filter(None, self._given[what].split(",")))

    def _asked(self, what: str) -> str:
        if what == "user":
            return foreign.user_name(os.geteuid())
        if not self._slurm:
            return ""
        try:
            return {"account": self._account, "qos": self._qos, "partition": self._partition}[what]()
        except ClusterUnavailableError as error:
            self.unknown[what] = str(error)
            return ""

    def _partition(self) -> str:
        return ",".join(name for name, one in partitions(self._clusters).items() if one.default)

    def _account(self) -> str:
        return _only(row[0] for row in self._associations)

    def _qos(self) -> str:
        accounts, partitions = self.names("account"), ("", *self.names("partition"))
        rows = [row for row in self._associations if row[1] in accounts and row[2] in partitions]
        # An association with a partition is the closer one.
        return _only(row[3] for row in rows if row[2]) or _only(row[3] for row in rows)

    @cached_property
    def _associations(self) -> list[list[str]]:
        """(default account, account, partition, default QOS) of the user's associations."""
        form = "format=DefaultAccount,Account,Partition,DefaultQOS"
        where = [f"cluster={self._clusters}"] if self._clusters else []
        command = ["sacctmgr", "--noheader", "--parsable2", "show", "user", self.names("user")[0]]
        return [line.split("|") for line in run_command([*command, "withassoc", *where, form]).splitlines()]


def _only(found: Iterable[str]) -> str:
    """The name on which all of these agree. Clusters may differ, and then it is not known."""
    names = {name for name in found if name}
    return names.pop() if len(names) == 1 else ""


def submitter_of(told: CommandLine, cluster: str) -> JobsSubmitter:
    """The submitter of a job with all these options, to Slurm or to the local cluster."""
    given = {what: told.last(what) for what in ("account", "qos", "partition")}
    return JobsSubmitter(given, clusters=told.last("clusters", "cluster") or "", slurm=cluster == "slurm")


def policy_for(
    submitter: JobsSubmitter, file: Path | None, spares: int | str | None = None, *, own: bool = True
) -> tuple[Resolved, list[str]]:
    """The policy in force for this submitter: the site's and its teams', with `own` the user's, that of the
    file or else of $JURYMAST_POLICY, these spares and the defaults. Also notes for people. Raises
    PolicyError."""
    layers = layers_below(os.environ, submitter, own=own)
    notes = [
        f"no team of the site's file is found by the {what}: {why}" for what, why in submitter.unknown.items()
    ]
    layers = over(layers, layers_of(file, os.environ))
    if spares is not None:
        layers.append(pairs_layer("command line", [("spares", spares)]))
    return resolve(layers), notes
