"""What is nobody's node's fault costs no node: on a real cluster, with NVIDIA's real bindings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState, TierState
from jurymast.rundir import write_atomically
from support.fake_gpus import FakeGpus, build
from support.outputs import checked
from support.runs import SCRIPTS, result
from support.slurm_runs import SlurmRun, jurymast
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 240.0
SHARE_MIB = 48
NVML_ERROR_UNKNOWN = 999
ENDLESS = ("--steps", "100000", "--step-time", "0.05", "--save-every", "20 steps")


@pytest.fixture(scope="module")
def library(cluster: Cluster) -> Path:
    return build(cluster.layout.library)


@pytest.fixture
def gpus(cluster: Cluster, library: Path) -> dict[str, FakeGpus]:
    """Eight healthy GPUs a node. The last has an error of no meaning, to be waited for: see `looked`."""
    found = {
        name: FakeGpus(library, library=library, state=library / f"state.{name}") for name in cluster.nodes
    }
    for one in found.values():
        one.fail("nvmlDeviceGetRemappedRows", NVML_ERROR_UNKNOWN, gpu=7)
    return found


@pytest.fixture
def share(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Shared storage of its own, as the nodes see it: small enough to be filled."""
    place = cluster.shared / f"{tmp_path.name}-share"
    place.mkdir(exist_ok=True)
    with cluster.small_share(place, SHARE_MIB):
        yield place


@pytest.fixture
def out(cluster: Cluster, tmp_path: Path) -> Path:
    """Where the script leaves its result."""
    path = cluster.shared / f"{tmp_path.name}.json"
    path.unlink(missing_ok=True)
    return path


def submit(
    cluster: Cluster, runs: Path, *options: str, script: str, arguments: tuple[str, ...]
) -> tuple[str, int]:
    """(The run's directory as the nodes see it, its job.)"""
    policy = cluster.shared / f"{runs.name}.yaml"
    policy.write_text("health: {preflight: off}\n")
    policy.chmod(0o644)
    library = cluster.layout.library
    environment = {"OMP_NUM_THREADS": "1", "FAKE_NVML_STATE": f"{library}/state.%n"}
    if library.exists():
        environment["LD_LIBRARY_PATH"] = str(library)
    command = [
        str(cluster.python.parent / "jurymast"),
        "submit",
        "--runs",
        str(runs),
        "--policy",
        str(policy),
    ]
    command += ["--json", *options, "--", str(SCRIPTS / script), *arguments]
    done = cluster.login(command, env=environment, timeout_s=240, check=False)
    assert done.returncode == 0, done.stderr
    told = checked(
        json.loads(done.stdout), "submit"
    )  # the run's directory may be where only the nodes see it
    return str(told["directory"]), int(told["slurm_job"])


def seen(cluster: Cluster, path: str | Path) -> Path:
    """A path of the nodes' as the host reaches it, whatever is mounted there."""
    return cluster.machine("login").path(str(path))


def fill(place: Path) -> Path:
    """Not a byte more goes into this file system until the file returned is removed."""
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    usage = os.statvfs(place)
    assert usage.f_bfree == 0
    return filler


def blames_nobody(run: SlurmRun, state: RunState) -> None:
    """All nodes are where they were when the run began, in its first allocation."""
    started = next(e for e in run.events() if isinstance(e, ev.WorkersStarted))
    assert started.node in state.placement, run.story()
    assert (state.excluded, state.blames, state.restarts) == ({}, [], 0), run.story()
    roles = sorted(node.role.value for node in state.nodes.values() if node.name not in state.placement)
    assert roles == ["spare"] * state.spares, run.story()


def looked(run: SlurmRun, nodes: Iterable[str]) -> None:
    """The probes there have been through all GPUs: from now on they hear of events."""
    wait_until("a first look", lambda: found(run, "nvml-error") >= set(nodes), LIMIT_S)


def found(run: SlurmRun, code: str) -> set[str]:
    return {e.node for e in run.events() if isinstance(e, ev.HealthFound) and e.code == code}


def test_a_sympathetic_xid_on_three_nodes_blames_none_and_tells_people(
    cluster: Cluster, tmp_path: Path, gpus: dict[str, FakeGpus]
) -> None:
    directory, job = submit(
        cluster, cluster.shared / tmp_path.name, "--nodes", "4", "--spares", "1",
        script="train_tiny.py", arguments=ENDLESS,
    )  # fmt: skip
    run = SlurmRun(cluster, Path(directory), job)
    before = run.wait_saved(50)
    three = before.placement[1:]
    looked(run, three)
    for code in (43, 45):
        for name in three:
            gpus[name].xid(2, code)
        alert_of(run, code, three)
        state = run.wait_step(run.state().step + 40)
        assert (state.incidents, state.attempt, state.placement) == ([], 1, before.placement), run.story()
        blames_nobody(run, state)
    code_told, told, _ = jurymast(cluster, "status", directory)
    assert (code_told, "so none is blamed" in told) == (0, True), told


def alert_of(run: SlurmRun, code: int, nodes: Sequence[str]) -> None:
    words = f"xid-{code} on many nodes within 180 s"
    state = run.wait("the alert", lambda s: any(words in alert.message for alert in s.alerts))
    assert "so none is blamed" in state.alerts[-1].message
    wait_until("the Xid of every node", lambda: found(run, f"xid-{code}") == set(nodes), LIMIT_S)


def test_a_page_fault_of_the_program_s_restarts_in_place(
    cluster: Cluster, tmp_path: Path, gpus: dict[str, FakeGpus]
) -> None:
    """Xid 31, then CUDA's own words from the rank: an illegal address is the program's doing."""
    orders = cluster.shared / f"{tmp_path.name}-orders"
    cluster.login(["mkdir", str(orders)])
    directory, job = submit(
        cluster, cluster.shared / tmp_path.name, "--nodes", "2", "--spares", "1", script="train_tiny.py",
        arguments=(*ENDLESS, "--orders", str(orders), "--until", str(orders / "end")),
    )  # fmt: skip
    run = SlurmRun(cluster, Path(directory), job)
    before = run.wait_saved(50)
    victim = before.placement[1]
    looked(run, [victim])
    gpus[victim].xid(0, 31)
    run.wait("the Xid in the journal", lambda s: victim in found(run, "xid-31"))
    write_atomically(orders / "rank-1", b"cuda", mode=0o644)
    run.wait("the next attempt", lambda s: s.attempt == 2)
    (orders / "end").touch()
    state = run.wait_end()
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.action, incident.node) == ("gpu_exception", "restart", victim), (
        run.story()
    )
    assert "an illegal memory access" in incident.evidence
    assert "xid-31 on gpu0: Xid 31: a GPU memory page fault: an illegal address" in incident.evidence
    assert (incident.step_restored or 0) >= 20
    assert state.placement == before.placement
    blames_nobody(run, state)
    _, told, _ = jurymast(cluster, "status", directory)
    assert "gpu_exception" in told
    assert "xid-31" in told


@pytest.mark.parametrize("writes", ["rank 0", pytest.param("run directory", marks=pytest.mark.long)])
def test_a_script_that_finds_the_shared_storage_full_costs_no_spare(
    cluster: Cluster, tmp_path: Path, share: Path, out: Path, writes: str
) -> None:
    """It saves by itself, and dies; in the last case what the run itself writes finds no room, either."""
    train: tuple[str, ...] = ("--steps", "250", "--step-time", "0.04", "--checkpoints", str(share / "own"))
    train += ("--each-rank",) if writes != "rank 0" else ()
    runs = share if writes == "run directory" else cluster.shared / tmp_path.name
    directory, job = submit(
        cluster, runs, "--nodes", "2", "--spares", "1",
        script="train_plain.py", arguments=(*train, "--out", str(out)),
    )  # fmt: skip
    run = SlurmRun(cluster, seen(cluster, directory), job)
    before = run.wait_step(20)
    filler = fill(seen(cluster, share))
    if writes == "run directory":
        first = set(run.pids(before.placement[0]))
        wait_until("the end of the first attempt", lambda: not _alive(cluster, before.placement[0], first))
    else:
        run.wait("the cause", lambda s: bool(s.incidents) and bool(s.incidents[0].action))
        _, told, _ = jurymast(cluster, "status", directory)
        assert "storage_full" in told, told
        assert "unexpected pos" in told, told  # torch.save does not pass the errno on
    filler.unlink()
    state = run.wait_end()
    assert state.exit_code == 0, run.story()
    assert {(i.cause, i.action, i.node) for i in state.incidents} == {("storage_full", "restart", "")}, (
        run.story()
    )
    assert state.placement == before.placement
    blames_nobody(run, state)
    assert result(out)["steps"] == 250


def _alive(cluster: Cluster, node: str, pids: set[int]) -> bool:
    return any(process.node_pid in pids for process in cluster.machine(node).processes())


@pytest.mark.parametrize("everything", [True, pytest.param(False, marks=pytest.mark.long)])
def test_training_goes_on_while_the_shared_tier_is_full(
    cluster: Cluster, tmp_path: Path, share: Path, out: Path, everything: bool
) -> None:
    """To its end, if need be. `everything`: nor is there room for the journal and the ranks' logs."""
    # What it prints is more than the log's last page may have room for.
    train = ("--steps", "2000", "--step-time", "0.005", "--save-every", "100 steps", "--out", str(out))
    runs = share if everything else cluster.shared / tmp_path.name
    directory, job = submit(
        cluster, runs, "--nodes", "2", "--spares", "0", "--hold", script="train_tiny.py", arguments=train
    )
    if not everything:
        checkpoints = Path(directory, "checkpoints")
        checkpoints.rmdir()
        checkpoints.symlink_to(share)
    cluster.slurm(["scontrol", "release", str(job)])
    run = SlurmRun(cluster, seen(cluster, directory), job)
    run.wait_saved(100)
    filler = fill(seen(cluster, share))
    wait_until("the end of the training", out.exists, 2 * LIMIT_S)
    if not everything:
        wait_until("the gap", lambda: shared(run).failures > 0, LIMIT_S)
        assert "no space left" in shared(run).error.lower()
        _, told, _ = jurymast(cluster, "status", directory)
        assert "copying to the shared tier failed" in told
        assert "no space left" in told.lower()
    else:
        assert "step 2000 " not in run.directory.rank_log(1, 0).read_text(), "there was room"
    filler.unlink()
    state = run.wait_end()
    assert (state.exit_code, state.incidents) == (0, []), run.story()
    wait_until("last copy", lambda: shared(run).step == 2000, LIMIT_S)
    blames_nobody(run, state)


def shared(run: SlurmRun) -> TierState:
    return run.state().saved.get("shared", TierState())
