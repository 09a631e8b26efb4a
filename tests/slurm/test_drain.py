"""A bad node leaves the run, the site drains it after its own look, and it is back once it is repaired."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jurymast.cluster.verdicts import verdict
from jurymast.core.state.findings import HARDWARE, Finding, Verdict
from jurymast.report.which_run import find_run
from support.fake_gpus import FakeGpus, build
from support.runs import SCRIPTS
from support.slurm_runs import SlurmRun, running_cluster
from support.waiting import ASK_POLL_S, wait_until
from testcluster import Cluster
from testcluster.settings import SITE_LOG

pytestmark = [pytest.mark.slurm]

NODES = 4
LIMIT_S = 240.0
DOUBT_S = 5.0  # so long a run keeps a bad node; three minutes unless the policy says otherwise
NOBODY = 65534
GPU_LOST = Finding(
    probe="nvidia", code="gpu-lost", verdict=Verdict.BAD, kind=HARDWARE, message="made up", device="gpu3"
)


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """One with the site's pieces: beside the session's, whose nodes nobody checks."""
    with running_cluster(
        place.with_name(f"{place.name}-site"), nodes=NODES, site=True, purge=True
    ) as running:
        yield running


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[dict[str, FakeGpus]]:
    """Eight healthy GPUs a node, of which the job's probes and root's hear the same."""
    folder = cluster.layout.library
    library = folder if (folder / "libnvidia-ml.so.1").exists() else build(folder)
    found = {
        name: FakeGpus(folder, library=library, state=folder / f"state.{name}") for name in cluster.nodes
    }
    yield found
    for one in found.values():
        one.clear()


def site_log(cluster: Cluster, node: str) -> str:
    path = cluster.machine(node).path(SITE_LOG)
    return path.read_text() if path.exists() else ""


def look(cluster: Cluster, name: str) -> None:
    """The site's look at a node, before Slurm has its next one; nothing if Slurm has one just now."""
    check = str(cluster.layout.health_check)
    cluster.exec(name, [check], env={"SLURMD_NODENAME": name}, root=True, cwd="/")


def wait_looking(what: str, cluster: Cluster, name: str, condition: Callable[[], Any]) -> Any:
    """As `wait_until`, with looks at the node."""

    def looked() -> Any:
        look(cluster, name)
        return condition()

    return wait_until(what, looked, LIMIT_S, ASK_POLL_S)


def node(cluster: Cluster, name: str) -> tuple[str, str]:
    """(Slurm's state, reason) of a node."""
    told = cluster.slurm(["sinfo", "--noheader", "--Node", f"--nodes={name}", "--format=%T|%E"])
    state, _, reason = told.splitlines()[0].partition("|")
    return state, reason


def submit(cluster: Cluster, folder: Path, *options: str) -> tuple[int, str, str]:
    policy = cluster.shared / f"{folder.name}.yaml"
    spool = cluster.layout.verdicts
    policy.write_text(
        f"nodes_policy: {{bad: drain, spool: {spool}, together: {DOUBT_S:g}s}}\nhealth: {{preflight: off}}\n"
    )
    policy.chmod(0o644)
    library = cluster.layout.library
    environment = {
        "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": f"{library}/state.%n",
    }  # fmt: skip
    command = [str(cluster.python.parent / "jurymast"), "submit", "--runs", str(cluster.shared / folder.name)]
    command += ["--policy", str(policy), "--parsable", *options, "--", str(SCRIPTS / "train_tiny.py")]
    command += ["--steps", "100000", "--step-time", "0.05", "--save-every", "20 steps"]
    done = cluster.login(command, env=environment, timeout_s=240, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.torch
def test_a_lost_gpu_is_swapped_out_drained_and_back_after_its_repair(
    cluster: Cluster, gpus: dict[str, FakeGpus], tmp_path: Path
) -> None:
    code, told, error = submit(cluster, tmp_path, "--nodes", "2", "--spares", "1")
    assert code == 0, error
    job = told.strip()
    run = SlurmRun(cluster, find_run(job, cluster.shared / tmp_path.name).root, int(job))
    state = run.wait_saved(40)
    victim = next(name for name in state.placement if name != state.host)
    wait_until("the job in root's book", lambda: job in _jobs_seen(cluster, victim), LIMIT_S)  # by Slurm
    gpus[victim].xid(3, 79)
    gpus[victim].set(gpu=3, lost=1)
    state = run.wait("the swap", lambda s: bool(s.incidents) and s.incident is None)
    incident = state.incidents[0]
    assert (incident.cause, incident.node, incident.action) == ("gpu_bad", victim, "swap"), run.story()
    assert victim in state.excluded
    wait_looking("the drain", cluster, victim, lambda: node(cluster, victim)[0].startswith("drain"))
    _, reason = node(cluster, victim)
    assert reason.startswith("jurymast: [hardware] code=gpu-lost gpu=3 "), reason
    assert f"job={job} ts=" in reason
    wait_until("its return to Slurm", lambda: node(cluster, victim)[0] == "drained", LIMIT_S, ASK_POLL_S)
    left = cluster.slurm(["scontrol", "show", "hostnames", cluster.job(int(job))["NodeList"]]).split()
    assert victim not in left
    assert len(left) == 2
    step = run.state().step
    run.wait_step(step + 20)  # the job goes on without it
    assert [name for name in cluster.nodes if node(cluster, name)[1] != "none"] == [victim]

    gpus[victim].clear()
    assert node(cluster, victim)[0] == "drained"
    cluster.fault("repaired", victim)
    back = ("none", "jurymast: back in service")  # 24.11 takes no empty reason
    returned = [("idle", word) for word in back]
    wait_looking("its return", cluster, victim, lambda: node(cluster, victim) in returned)

    code, told, error = submit(cluster, tmp_path, "--nodes", "2", "--dry-run")
    assert (code, f"--exclude={victim}" in told) == (0, True), error
    assert f"{victim} is excluded until " in error
    jurymast = str(cluster.python.parent / "jurymast")
    rows = json.loads(
        cluster.login([jurymast, "nodes", "--json", "--runs", str(cluster.shared / tmp_path.name)]).stdout
    )
    assert [(row["node"], row["strikes"], row["last_cause"]) for row in rows if row["excluded"]] == [
        (victim, 1, "gpu_bad")
    ]


def _jobs_seen(cluster: Cluster, name: str) -> dict[str, Any]:
    """What root's health check remembers: who had jobs on the node."""
    path = cluster.machine(name).path("/run/jurymast-site/jobs.json")
    seen: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return seen


class Spool:
    """Leaves verdicts for one node, as its users would; `job` runs there."""

    def __init__(self, cluster: Cluster, node: str, job: int) -> None:
        self._cluster = cluster
        self._node = node
        boot_id = cluster.exec(node, ["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()
        self.honest = {**verdict(node, boot_id, str(job), "a-run", GPU_LOST, time.time())}

    def seal(self, *, uid: int | None = None, ttl_s: int = 600, **changes: Any) -> str:
        """A credential around the honest verdict with `changes`, by the user or another."""
        values = {**self.honest, "nonce": os.urandom(16).hex(), **changes}
        command = ["munge", f"--ttl={ttl_s}"]
        if uid is not None:
            command = ["setpriv", f"--reuid={uid}", "--clear-groups", *command]
        return self._cluster.exec(self._node, command, input=json.dumps(values), root=uid is not None).stdout

    def drop(self, name: str, content: str) -> None:
        """By a rename, as ours are left: a look of the node's own may come at any moment."""
        spool = self._cluster.layout.verdicts
        part, whole = spool / f".{name}.part", spool / f"{self._node}.{name}"
        self._cluster.exec(self._node, ["tee", str(part)], input=content)
        self._cluster.exec(self._node, ["mv", str(part), str(whole)])

    def wait_empty(self) -> None:
        """Until root has taken all."""
        spool = self._cluster.layout.verdicts
        wait_looking(
            "an empty spool", self._cluster, self._node, lambda: not list(spool.glob(f"{self._node}.*"))
        )


@pytest.fixture
def busy(cluster: Cluster, gpus: dict[str, FakeGpus]) -> Spool:
    """The spool of a node that serves a job of the user; the job is the node's only one."""
    job = cluster.sbatch("#!/bin/sh\nsleep 1000\n", "--nodes=1", "--exclusive")
    name = cluster.wait_job(job, "RUNNING")["NodeList"]
    wait_looking("the job in root's book", cluster, name, lambda: str(job) in _jobs_seen(cluster, name))
    return Spool(cluster, name, job)


# What each verdict is, and what root's log says of it. The GPU is really lost, but for the last one.
LIES: list[tuple[str, dict[str, Any], str]] = [
    ("another-user", {"uid": NOBODY}, f"uid {NOBODY}: job .* is not theirs"),
    ("another-job", {"job": "99999"}, "job 99999 is not theirs"),
    ("another-node", {"node": "n99"}, "it is about node n99"),
    ("another-boot", {"boot_id": "not-this-one"}, "it is about another boot"),
    ("another-kind", {"kind": "network"}, "root's own probes do not find gpu-lost gpu3"),
    ("no-nonce", {"nonce": "../../etc/passwd"}, "it was used before"),
    ("no-text", {"code": ["gpu-lost"]}, "a verdict of another version"),
    ("expired", {"ttl_s": 1}, "munge: it has expired"),
]


def test_lies_are_refused_and_the_node_stays_as_it_was(
    cluster: Cluster, gpus: dict[str, FakeGpus], busy: Spool
) -> None:
    name = str(busy.honest["node"])
    gpus[name].set(gpu=3, lost=1)
    expired = busy.seal(ttl_s=1)
    for title, changes, _ in LIES:
        busy.drop(title, expired if title == "expired" else busy.seal(**changes))
    busy.drop("garbage", "MUNGE:AwQFAAA:" + "A" * 100)
    busy.drop("large", "x" * 20_000)
    spool = cluster.layout.verdicts
    cluster.exec(name, ["ln", "-s", "/etc/shadow", str(spool / f"{name}.link")])
    cluster.exec(name, ["mkfifo", str(spool / f"{name}.pipe")])
    busy.wait_empty()
    told = wait_until("all refusals", lambda: _told(cluster, name, len(LIES) + 4), LIMIT_S)
    for _, _, words in LIES:
        assert _matches(words, told), f"{words}\n{told}"
    for words in ("not a credential of this cluster", "20000 bytes", "link: ", "not an ordinary file"):
        assert words in told
    assert "shadow" not in told
    assert node(cluster, name)[1] == "none"
    assert "drained" not in told


def test_a_made_up_finding_and_a_replay_are_refused(
    cluster: Cluster, gpus: dict[str, FakeGpus], busy: Spool
) -> None:
    """The node is healthy when its own user calls it bad; when it breaks, the old word no longer counts."""
    name = str(busy.honest["node"])
    credential = busy.seal(nonce=busy.honest["nonce"])
    busy.drop("first", credential)
    busy.wait_empty()
    wait_until("a refusal", lambda: "do not find gpu-lost gpu3" in site_log(cluster, name), LIMIT_S)
    gpus[name].set(gpu=3, lost=1)
    busy.drop("replayed", credential)
    busy.drop("sealed-again", busy.seal(nonce=busy.honest["nonce"]))
    busy.wait_empty()
    for words in ("munge: it was used before", r"uid \d+: it was used before"):  # in either order
        wait_until(words, lambda words=words: _matches(words, site_log(cluster, name)), LIMIT_S)  # type: ignore[misc]
    assert node(cluster, name)[1] == "none"


def test_the_reason_of_somebody_else_stays(cluster: Cluster, gpus: dict[str, FakeGpus], busy: Spool) -> None:
    name = str(busy.honest["node"])
    cluster.slurm(["scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=new disk, ask Ada"])
    gpus[name].set(gpu=3, lost=1)
    busy.drop("honest", busy.seal())
    busy.wait_empty()
    wait_until("its word", lambda: "by somebody else: new disk, ask Ada" in site_log(cluster, name), LIMIT_S)
    cluster.fault("repaired", name)
    gpus[name].clear()
    wait_looking("another look", cluster, name, _another_look(cluster, name))
    assert node(cluster, name)[1] == "new disk, ask Ada"


@pytest.fixture
def one_an_hour(cluster: Cluster) -> Iterator[None]:
    """The site drains one node an hour, as few as can be tested with four."""
    settings = cluster.layout.etc / "site.ini"
    before = settings.read_text()
    settings.write_text(before.replace("[drain]\n", "[drain]\nmax_per_hour = 1\n"))
    yield
    settings.write_text(before)


@pytest.mark.usefixtures("one_an_hour")
def test_beyond_the_site_s_limit_a_bad_node_stays_and_somebody_is_told(
    cluster: Cluster, gpus: dict[str, FakeGpus], busy: Spool
) -> None:
    name = str(busy.honest["node"])
    other = next(other for other in cluster.nodes if other != name)
    gpus[name].set(gpu=3, lost=1)
    # Or it would be let back, also by a look that began before: its boot is another than its reason's.
    gpus[other].set(gpu=3, lost=1)
    wait_looking("another look", cluster, other, _another_look(cluster, other))
    out(cluster, other, time.time())
    busy.drop("one-too-many", busy.seal())
    busy.wait_empty()
    words = "ALERT: not drained, because max_per_hour = 1 is reached: jurymast: "
    wait_until("the alert", lambda: words in site_log(cluster, name), LIMIT_S)
    assert node(cluster, name)[1] == "none"
    out(cluster, other, time.time() - 3700.0)
    busy.drop("an-hour-later", busy.seal())
    wait_looking("the drain", cluster, name, lambda: node(cluster, name)[0].startswith("drain"))
    assert node(cluster, name)[1].startswith("jurymast: [hardware] code=gpu-lost gpu=3 ")


def out(cluster: Cluster, name: str, at: float) -> None:
    """The site drained the node at that time (seconds since the epoch)."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    reason = f"jurymast: [hardware] code=gpu-lost gpu=3 job=1 ts={stamp} boot=an-earlier-one"
    cluster.slurm(["scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}"])


def _another_look(cluster: Cluster, name: str) -> Callable[[], bool]:
    """True once the health check has begun and ended a look after now: it writes its book at each."""
    book = cluster.machine(name).path("/run/jurymast-site/jobs.json")
    seen = {book.stat().st_mtime_ns}

    def looked() -> bool:
        seen.add(book.stat().st_mtime_ns)
        return len(seen) > 2

    return looked


def _told(cluster: Cluster, name: str, refusals: int) -> str:
    text = site_log(cluster, name)
    return text if text.count("verdict refused") >= refusals else ""


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.DOTALL) is not None
