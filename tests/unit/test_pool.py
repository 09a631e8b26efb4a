"""A pool of waiting nodes: which one suits a run, how it is taken, kept, and given up."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast import foreign
from jurymast.cluster import pool as pools
from jurymast.cluster import refill
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.pool import PoolClaim, PoolDirectory, Waiting
from jurymast.core.judges.pool import (
    LEAST_LEFT_S,
    TAKEN_LIMIT_S,
    PoolMember,
    PoolNeed,
    best,
    unsuitable,
    why_end,
)
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Effect, Record, TopUpPool
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.core.supervision.pooling import LOOK_S, Pooling
from jurymast.core.supervision.refilling import SmallJob
from jurymast.errors import ClusterUnavailableError, SubmissionError
from jurymast.supervisor.claiming import claim
from support.commands import Place
from support.stories import START, Story

POOLED = Settings(refill=True, pool_nodes=2, pool_directory="/pool")


def member(job: str = "7", node: str = "n7", **changes: object) -> PoolMember:
    known = {
        "partition": "main", "account": "vision", "root": "ext4", "options": ("--mem=8G", "--qos=high"),
        "ends_at": None, "since": START,
    }  # fmt: skip
    return PoolMember(job=job, node=node, **{**known, **changes})  # type: ignore[arg-type]


def need(**changes: object) -> PoolNeed:
    known = {
        "partition": "main", "account": "vision", "root": "ext4", "options": ("--qos=high", "--mem=8G"),
        "left_s": math.inf, "exclude": frozenset({"n1"}),
    }  # fmt: skip
    return PoolNeed(**{**known, **changes})  # type: ignore[arg-type]


# ---- which one suits


def test_a_member_like_the_runs_own_nodes_suits_it() -> None:
    assert unsuitable(member(), need(), START) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"partition": "debug"}, "its partition is debug, not main"),
        ({"account": ""}, "its account is unknown, not vision"),
        ({"root": "overlay"}, "its root is overlay"),
        ({"node": "n1"}, "the run has this node already"),
        ({"options": ("--mem=8G",)}, "submitted with --mem=8G"),
        ({"options": ("--mem=8G", "--qos=low")}, "--qos=low"),
        ({"options": ("--mem=8G", "--qos=high", "--exclusive")}, "--exclusive"),
        ({"options": ("--mem=7G", "--qos=high")}, "--mem=7G"),
        ({"ends_at": START + LEAST_LEFT_S - 1.0}, "Slurm ends it in 599 s"),
    ],
)
def test_one_that_lacks_something_does_not(changes: dict[str, object], why: str) -> None:
    told = unsuitable(member(**changes), need(), START)  # type: ignore[arg-type]
    assert why in told


@pytest.mark.parametrize(
    ("has", "wants", "suits"),
    [
        ("--mem=16G", "--mem=8192", True),
        ("--mem=0", "--mem=2T", True),
        ("--mem=8G", "--mem=0", False),
        ("--gres=gpu:8", "--gres=gpu:4", True),
        ("--gres=gpu:h100:8", "--gres=gpu:4", False),
        ("--gpus-per-node=4", "--gpus-per-node=8", False),
        ("--cpus-per-task=8", "--cpus-per-task=4", False),
    ],
)
def test_of_memory_and_gpus_a_member_may_have_more(has: str, wants: str, suits: bool) -> None:
    """Of anything else only the same: its ranks would see something else than the others."""
    told = unsuitable(member(options=(has,)), need(options=(wants,)), START)
    assert (told == "") is suits, told


def test_a_run_that_ends_soon_may_take_one_that_ends_soon() -> None:
    assert unsuitable(member(ends_at=START + 90.0), need(left_s=80.0), START) == ""


def test_the_one_is_taken_that_lasts_just_long_enough() -> None:
    short, fitting, endless = (
        member("1", "n2", ends_at=START + 3000.0),
        member("2", "n3", ends_at=START + 9000.0),
        member("3", "n4"),
    )
    wants = need(left_s=8000.0)
    assert best([short, endless, fitting], wants, START) == fitting
    assert best([short, endless], wants, START) == endless
    assert best([short, member("4", "n5", ends_at=START + 2000.0)], wants, START) == short
    assert best([member(node="n1")], wants, START) is None


# ---- when one ends


def test_a_member_ends_when_no_run_needs_it_or_the_one_that_took_it_is_gone() -> None:
    assert why_end(1000.0, 950.0, 60.0, taken_s=None) == ""
    assert "no run has used the pool for 60 s" in why_end(1011.0, 950.0, 60.0, taken_s=None)
    assert why_end(2000.0, 950.0, 60.0, taken_s=1.0) == "", "the claim follows"
    assert "gone" in why_end(2000.0, 2000.0, 60.0, taken_s=TAKEN_LIMIT_S + 1.0)


# ---- how one is taken


class Shelf:
    """A pool in memory. `gone`: others take these first; `dumb`: these never answer."""

    def __init__(self, *members: PoolMember, gone: Sequence[str] = (), dumb: Sequence[str] = ()) -> None:
        self.members, self.gone, self.dumb = members, gone, dumb
        self.taken: list[str] = []
        self.ended: list[str] = []

    def now(self) -> float:
        return START

    async def need(self) -> PoolNeed:
        return need()

    async def waiting(self) -> Sequence[PoolMember]:
        return self.members

    async def take(self, job: str) -> bool:
        if job not in self.gone:
            self.taken.append(job)
        return job not in self.gone

    async def tell(self, member: PoolMember) -> None:
        assert self.taken[-1] == member.job

    async def answered(self, job: str) -> bool:
        return job not in self.dumb

    async def withdraw(self, job: str) -> bool:
        return True

    async def end(self, job: str) -> None:
        self.ended.append(job)
        raise ClusterUnavailableError("slurmctld is away")


def test_a_run_takes_a_member_that_no_other_run_has_taken() -> None:
    shelf = Shelf(member("1", "n1"), member("2", "n2"), member("3", "n3"), gone=["2"])
    assert asyncio.run(claim(shelf, 5)) == SmallJob(5, "3", "n3")
    assert shelf.taken == ["3"]


def test_without_a_member_that_suits_it_gets_none() -> None:
    assert asyncio.run(claim(Shelf(), 5)) is None
    assert asyncio.run(claim(Shelf(member("1", "n1"), member("2", "n2"), gone=["2"]), 5)) is None


def test_a_member_that_does_not_answer_is_ended_and_its_number_is_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come as that small job after all."""
    monkeypatch.setattr("jurymast.supervisor.claiming.ANSWER_LIMIT_S", 0.01)
    shelf = Shelf(member("2", "n2"), member("3", "n3"), dumb=["2"])
    with pytest.raises(SubmissionError, match="n2, which waited in the pool as job 2"):
        asyncio.run(claim(shelf, 5))
    assert (shelf.taken, shelf.ended) == (["2"], ["2"])


# ---- the files


@pytest.fixture
def place(tmp_path: Path) -> PoolDirectory:
    made = PoolDirectory(str(tmp_path / "pool"))
    made.make()
    return made


def sign(place: PoolDirectory, one: PoolMember) -> None:
    place.file(one.job, pools.WAITING).write_text(
        json.dumps({name: getattr(one, name) for name in one.__struct_fields__})
    )


def test_a_sign_can_be_taken_once(place: PoolDirectory) -> None:
    sign(place, member())
    assert place.members() == [member()]
    assert [place.take("7"), place.take("7")] == [True, False]
    assert place.members() == []
    assert place.members(pools.TAKEN) == [member()]


def test_what_is_no_sign_of_this_user_is_passed_over(place: PoolDirectory) -> None:
    sign(place, member("1"))
    place.file("2", pools.WAITING).write_text("{}")
    place.file("3", pools.WAITING).write_text(json.dumps({"job": "1"}))
    sign(place, member("4"))
    place.file("4", pools.WAITING).rename(place.file("5", pools.WAITING))  # of another job
    sign(place, member("6"))
    place.file("6", pools.WAITING).chmod(0o666)
    (place.root / "x.waiting").write_text("{}")
    place.file("8", pools.WAITING).symlink_to(place.file("1", pools.WAITING))
    assert [one.job for one in place.members()] == ["1"]
    place.root.chmod(0o777)
    with pytest.raises(foreign.NotOurs):
        place.members()


def test_the_answer_and_the_withdrawal_of_a_claim_exclude_each_other(place: PoolDirectory) -> None:
    sign(place, member())
    place.tell(member(), PoolClaim(run="r", directory="/r", number=1, key="1.0"))
    assert not place.answered("7")
    assert [place.withdraw("7"), place.withdraw("7")] == [True, False]
    assert place.answered("7")
    assert json.loads(place.claims.read_text())["run"] == "r"


def test_one_process_holds_the_lease_until_it_is_gone_for_long(place: PoolDirectory) -> None:
    with place.leased() as first, place.leased() as second:
        assert (first, second) == (True, False)
        assert place.lease.exists(), "who did not get it has not removed it"
    long_ago = time.time() - 2 * pools.LEASE_S
    with place.leased():
        os.utime(place.lease, (long_ago, long_ago))
        with place.leased() as third:
            assert not third, "it has only removed the old one"
        with place.leased() as fourth:
            assert fourth
    assert [path.name for path in place.root.iterdir()] == []


def test_files_of_jobs_that_are_gone_are_removed(
    place: PoolDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = pools.job_name(str(place.root))
    queue = {"1": ("RUNNING", name), "2": ("PENDING", name), "3": ("COMPLETING", name), "4": ("RUNNING", "x")}
    monkeypatch.setattr(pools, "queued", lambda: queue)
    for job in ("1", "3", "4", "9"):
        sign(place, member(job))
    place.file("9", "log").write_text("why it ended")
    assert pools.sweep(place) == ["1", "2"]
    assert sorted(path.name for path in place.root.iterdir()) == [
        "1.waiting", "3.waiting", "4.waiting", "9.log",
    ]  # fmt: skip
    long_ago = time.time() - 2 * pools.LOG_KEPT_S
    os.utime(place.file("9", "log"), (long_ago, long_ago))
    pools.sweep(place)
    assert not place.file("9", "log").exists()


# ---- what is submitted


def plan(root: Path | str = "/pool", **changes: object) -> RunPlan:
    made = RunPlan(
        run="r", name="r", directory="/runs/r", cluster="slurm", active=2, spares=0, ranks_per_node=1,
        script="train.py", settings=replace(POOLED, pool_directory=str(root)),
        sbatch_options=("--account=vision", "--mem=8G", "--nodes=2", "--time=2:00:00", "--qos=high"),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


ALLOCATION = Allocation("5", 0, ("n1", "n2"), "n1", 0.0, partition="main", account="vision")


def test_a_member_is_asked_for_like_a_node_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refill, "outlive_memory", list)
    words = pools.command(plan(), ALLOCATION, ["n1", "n2"])
    for word in (
        "--account=vision", "--mem=8G", "--qos=high", "--partition=main", "--exclude=n[1-2]", "--nodes=1",
        "--time=2:00:00", "--nice=100", "--chdir=/pool", f"--job-name={pools.job_name('/pool')}",
    ):  # fmt: skip
        assert word in words
    assert words[-1].endswith("jurymast.cluster.pool /pool 600.0 --mem=8G --qos=high")


def test_what_it_says_of_itself_suits_the_run_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ends_in_s", lambda _: 7000.0)
    wants = pools.need_of(plan(exclude=("n[8-9]",)), ALLOCATION, ["n1"])
    assert ({*wants.exclude}, wants.left_s) == ({"n1", "n8", "n9"}, 7000.0)
    shown = member(options=wants.options, root=refill.root_file_system())
    assert unsuitable(shown, wants, START) == ""


def test_an_agent_from_a_pool_sees_nothing_of_the_run_that_asked_for_the_node() -> None:
    own = {"SECRET": "of another run", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4", "TMPDIR": "/tmp/7",
           "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    told = {"TOKEN": "own", "SLURM_JOB_ID": "5", "TMPDIR": "/tmp/5", "CUDA_VISIBLE_DEVICES": "1"}
    seen = refill.variables_in(own, told, 1, 2, pooled=True)
    assert {name: seen.get(name) for name in (*own, "TOKEN")} == {
        "SECRET": None, "SLURM_JOB_ID": "5", "SLURM_CPUS_ON_NODE": "4", "TMPDIR": "/tmp/7",
        "CUDA_VISIBLE_DEVICES": "0", "TOKEN": "own",
    }  # fmt: skip


# ---- what runs in a member


@pytest.fixture
def waiting(place: PoolDirectory, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(pools, "ends_in_s", lambda _: math.inf)
    made = Waiting(str(place.root), 60.0, ["--mem=8G"])
    made.show()
    return made


def test_a_member_shows_what_it_is_and_learns_what_it_is_for(place: PoolDirectory, waiting: Waiting) -> None:
    place.use()
    (shown,) = place.members()
    assert (shown.job, shown.node, shown.options, shown.ends_at) == ("7", "n7", ("--mem=8G",), None)
    assert place.file("7", pools.WAITING).stat().st_mode & 0o777 == 0o600
    assert place.take("7")
    told = PoolClaim(run="r", directory="/runs/r", number=3, key="5.0")
    place.tell(shown, told)
    assert waiting.wait() == told


def test_a_member_whose_pool_nobody_has_used_for_long_ends(place: PoolDirectory, waiting: Waiting) -> None:
    place.use()
    long_ago = time.time() - 120.0
    os.utime(place.used, (long_ago, long_ago))
    assert waiting.wait() is None


def test_a_member_answers_only_a_claim_that_stands(
    place: PoolDirectory, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(pools, "run_command", lambda words, _: asked.append(words))
    told = PoolClaim(run="r", directory="/runs/r", number=3, key="5.0")
    place.tell(member(), told)
    assert [waiting.answer(told, plan()), waiting.answer(told, plan())] == [True, False]
    assert asked[0] == ["scontrol", "update", "JobId=7", "JobName=jurymast-refill-r-3"]


# ---- when a run fills it


class Keeping:
    def __init__(self) -> None:
        self.story = Story(active=2, spares=0, settings=POOLED).running()
        self.story.state.pooled = True
        self.machine = Pooling(self.story.state)

    def tick(self, seconds: float = 0.1) -> list[Effect]:
        self.story.wait(seconds)
        return self.machine.on_time(self.story.t)

    def notes(self, jobs: Sequence[str], why: str = "") -> list[str]:
        told = self.machine.on_topped_up(jobs, why, self.story.t)
        return [
            one.event.message for one in told if isinstance(one, Record) and isinstance(one.event, ev.Noted)
        ]


def test_a_run_fills_its_pool_when_it_begins_now_and_then_and_when_it_took_a_node() -> None:
    keeping = Keeping()
    assert keeping.tick() == [TopUpPool(("n1", "n2"))]
    assert keeping.tick(2 * LOOK_S) == [], "the first is not answered yet"
    assert keeping.notes(["7"]) == ["pool: job 7 was submitted, to wait for any run"]
    assert len(keeping.tick()) == 1
    assert keeping.notes([]) == []
    assert keeping.tick(LOOK_S - 1.0) == []
    keeping.machine.on_claimed()
    assert len(keeping.tick()) == 1


def test_a_run_does_not_fill_it_while_it_recovers_or_ends() -> None:
    keeping = Keeping()
    keeping.story.lost("n2")
    assert keeping.tick() == []
    ending = Keeping()
    ending.story.feed(ev.Signalled(t=ending.story.t, signal="preempted"))
    assert ending.tick() == []


def test_what_keeps_a_pool_from_being_filled_is_told_once() -> None:
    keeping = Keeping()
    told = []
    for why in ("too many jobs", "too many jobs", "", "too many jobs"):
        keeping.tick(LOOK_S)
        told += keeping.notes([], why)
    assert told == ["pool: too many jobs"] * 2


# ---- what people see of it

QUEUE = """
case "$*" in
*--format=%i*) printf '%s\\n' "7|RUNNING|$NAME" "8|PENDING|$NAME" "9|RUNNING|$NAME" "10|RUNNING|other";;
*) echo "$@" >> told;;
esac
"""


class Site(Place):
    """With a pool."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.pool = PoolDirectory(str(root / "pool"))
        self.pool.make()
        (root / "team.yaml").write_text(
            f"nodes_policy: {{refill: on}}\npool: {{directory: {root / 'pool'}, nodes: 3}}\n"
        )
        for name in ("squeue", "scancel"):
            self.program(name, f"NAME={pools.job_name(str(root / 'pool'))}\n{QUEUE}")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_command_shows_what_waits_and_who_took_what(site: Site) -> None:
    sign(site.pool, member("7", ends_at=START + 9000.0))
    sign(site.pool, member("5"))
    site.pool.tell(member("4", "n4"), PoolClaim(run="20261117-1", directory="/r", number=1, key="1.0"))
    with site.pool.claims.open("a") as file:
        file.write("{damaged\n")
    view = site.json("pool", "--directory", str(site.pool.root))
    assert [(one["job"], one["state"], one["node"]) for one in view["members"]] == [
        ("7", "waiting", "n7"), ("8", "queued", None), ("9", "starting", None),
    ]  # fmt: skip
    assert [(one["run"], one["node"], one["waited_s"] > 0) for one in view["claims"]] == [
        ("20261117-1", "n4", True)
    ]
    assert not site.pool.file("5", pools.WAITING).exists(), "of a job that is gone"
    shown = site.good("pool", "--policy", "team.yaml")
    assert "waiting" in shown
    assert "20261117-1" in shown


def test_the_command_ends_what_waits_and_nothing_else(site: Site) -> None:
    sign(site.pool, member("7"))
    assert "ended: 7, 8, 9" in site.good("pool", "end", "--policy", "team.yaml")
    assert (site.root / "told").read_text().split() == ["7", "8", "9"]
    assert site.pool.members() == []


def test_the_command_says_what_is_wrong(site: Site) -> None:
    nowhere = site.run("pool")
    assert (nowhere.returncode, "no pool.directory" in nowhere.stderr) == (64, True), nowhere.stderr
    missing = site.run("pool", "--directory", "/nowhere")
    assert "pool.directory /nowhere is not there" in missing.stderr
    site.pool.root.chmod(0o777)
    others = site.run("pool", "--directory", str(site.pool.root))
    assert "not private to this user" in others.stderr
