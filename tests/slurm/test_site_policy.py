"""Policies that a site gives its teams, and keys that it locks, for users of real Slurm accounts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.errors import PolicyError
from support.slurm_runs import ACCOUNTS, running_cluster
from testcluster import Cluster

pytestmark = pytest.mark.slurm

SITE = """\
spares: 0
teams:
  - {account: vision, policy: vision.yaml}
  - {qos: urgent, partition: main, policy: urgent.yaml}
locked:
  - {keys: [nodes_policy.bad, checkpoint.tiers.shared.keep], unless: {account: operations}}
"""
VISION = "spares: 1\ncheckpoint: {cadence: 10m}\n"
URGENT = "spares: 2\n"
MINE = "nodes_policy: {bad: report}\n"
# By user, all of them on any Debian: the default account, and its QOS.
USERS = {"games": ("vision", "normal"), "news": ("speech", "urgent"), "mail": ("operations", "normal")}


class Site:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.place = cluster, cluster.shared / "site"
        self.partition = cluster.slurm(["sinfo", "--noheader", "--format=%R"]).split()[0]
        self.place.mkdir(exist_ok=True)
        site = SITE.replace("partition: main", f"partition: {self.partition}")
        files = {"site.yaml": site, "vision.yaml": VISION, "urgent.yaml": URGENT, "mine.yaml": MINE}
        for name, text in files.items():
            (self.place / name).write_text(text)
        (self.place / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N1\nsrun hostname\n")
        self.place.chmod(0o755)
        self._add("qos", "urgent")
        for user, (account, qos) in USERS.items():
            self._add("account", account)
            own = f"account={account}", f"qos=normal,{qos}", f"defaultqos={qos}"
            self._add("user", user, *own)

    def _add(self, *words: str) -> None:
        self.cluster.slurm(["sacctmgr", "--immediate", "--quiet", "add", *words])

    def as_user(self, user: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [
            "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups",
            str(self.cluster.python.parent / "jurymast"), *words,
        ]  # fmt: skip
        variables = {"JURYMAST_SITE": str(self.place / "site.yaml"), "HOME": "/nonexistent"}
        return self.cluster.login(command, env=variables, cwd=self.place, check=False, root=True)

    def shown(self, user: str, *words: str) -> tuple[object, object]:
        """(spares, cadence) of the policy in force."""
        done = self.as_user(user, "policy", "show", "--json", *words)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        values = json.loads(done.stdout)["values"]
        return values["spares"], values["checkpoint"]["cadence"]


@pytest.fixture(scope="module")
def site(place: Path) -> Iterator[Site]:
    with running_cluster(place, "accounts", nodes=4, **ACCOUNTS) as running:
        yield Site(running)


def test_each_user_gets_the_policy_of_the_account_that_slurm_would_take(site: Site) -> None:
    found = {user: site.shown(user) for user in USERS}
    assert found == {"games": (1, "10m"), "news": (2, "auto"), "mail": (0, "auto")}
    assert site.shown("mail", "--account", "vision") == (1, "10m")
    assert site.shown("news", "--qos", "normal") == (0, "auto")
    assert site.shown("news", "--partition", f"{site.partition},other") == (0, "auto")


def test_a_job_s_own_options_come_before_slurm_s_defaults(site: Site) -> None:
    for words, spares in (([], 1), (["--account=speech"], 0), (["--account=speech", "--qos=urgent"], 2)):
        done = site.as_user(
            "games", "submit", "--dry-run", "--json", "--runs=/tmp/runs", *words, "job.sbatch"
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["plan"]["spares"] == spares


def test_a_locked_key_is_refused_except_for_whom_the_site_says(site: Site) -> None:
    where = f"{site.place}/site.yaml:6"
    refused = f"jurymast: error: mine.yaml:1: nodes_policy.bad: is locked by {where}; leave it out\n"
    for user in USERS:
        done = site.as_user(
            user, "submit", "--dry-run", "--runs=/tmp/runs", "--policy=mine.yaml", "job.sbatch"
        )
        if user == "mail":
            assert done.returncode == 0, done.stderr
        else:
            assert (done.returncode, done.stderr) == (PolicyError.exit_code, refused)


def test_an_account_that_slurm_cannot_tell_is_no_team_s(site: Site) -> None:
    """`uucp` has no association: the site's own policy is in force."""
    assert site.shown("uucp") == (0, "auto")
