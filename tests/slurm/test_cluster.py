"""The test cluster behaves as a cluster of machines does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from jurymast.cluster.lift import size_changes
from testcluster import Cluster, ClusterError
from testcluster.processes import wait_until

pytestmark = pytest.mark.slurm

LIMIT_S = 240.0

_CLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "cluster"
_SLEEP_EVERYWHERE = "#!/bin/bash\nexec srun --no-kill --kill-on-bad-exit=0 --wait=0 sleep 600\n"


def _reachable(cluster: Cluster, name: str) -> bool:
    script = f"exec 3<>/dev/tcp/{cluster.address(name)}/6818"
    argv = ["timeout", "0.5", "bash", "-c", script]
    return cluster.login(argv, check=False).returncode == 0


def _sleepers(cluster: Cluster, node: str) -> int:
    commands = [process.command for process in cluster.processes(node) if process.uid != 0]
    return sum(command in ("sleep 600", "/usr/bin/sleep 600") for command in commands)


def _sleeping(cluster: Cluster, *nodes: str) -> bool:
    return all(_sleepers(cluster, node) for node in nodes)


class TestJobs:
    def test_srun_runs_on_four_nodes_as_the_unprivileged_user(self, cluster: Cluster) -> None:
        output = cluster.login(["srun", "--nodes=4", "bash", "-c", "hostname; id -un"]).stdout.split()
        assert sorted(output) == ["jurymast-test"] * 4 + ["n1", "n2", "n3", "n4"]

    def test_a_job_sees_its_gpus(self, cluster: Cluster) -> None:
        show = "echo $CUDA_VISIBLE_DEVICES"
        eight = cluster.login(["srun", "--nodes=2", "--gpus-per-node=8", "bash", "-c", show]).stdout.split()
        assert eight == ["0,1,2,3,4,5,6,7"] * 2
        two = cluster.login(["srun", "--nodes=1", "--gpus-per-node=2", "bash", "-c", show]).stdout.strip()
        assert two == "0,1"

    def test_the_debug_partition_has_two_nodes(self, cluster: Cluster) -> None:
        output = cluster.login(["srun", "--partition=debug", "--nodes=2", "hostname"]).stdout.split()
        assert sorted(output) == ["n1", "n2"]
        refused = cluster.login(["srun", "--partition=debug", "--nodes=3", "hostname"], check=False)
        assert refused.returncode != 0

    def test_the_repositorys_python_imports_torch_on_a_node(self, cluster: Cluster) -> None:
        pytest.importorskip("torch")
        script = "import os, torch; print(os.getuid() != 0, torch.ones(2).sum().item())"
        assert cluster.login(["srun", "python", "-c", script]).stdout.split() == ["True", "2.0"]

    def test_a_requeued_job_starts_when_its_owner_lifts_the_delay(self, cluster: Cluster) -> None:
        job = cluster.sbatch("#!/bin/bash\necho $SLURM_RESTART_COUNT\nsleep 600\n", "--requeue")
        cluster.wait_job(job, "RUNNING")
        cluster.login(["scontrol", "requeue", str(job)])
        cluster.wait_job(job, "PENDING")
        # Not in the second of the requeue: slurmd would take the new start for the job it has just revoked.
        cluster.login(["scontrol", "update", f"JobId={job}", "StartTime=now+2"])
        assert cluster.wait_job(job, "RUNNING")["Restarts"] == "1"

    def test_a_requeued_job_starts_on_fewer_nodes_than_it_had(self, cluster: Cluster) -> None:
        """Slurm holds a job for ever whose tasks need more nodes than are left."""
        most = len(cluster.nodes) - 1
        job = cluster.sbatch(
            "#!/bin/bash\nsleep 600\n", "--requeue", f"--nodes={len(cluster.nodes)}", "--ntasks-per-node=1"
        )
        fields = cluster.wait_job(job, "RUNNING")
        cluster.login(["scontrol", "requeue", str(job)])
        cluster.wait_job(job, "PENDING")
        for change in [*size_changes(fields, f"1-{most}", "n1"), "StartTime=now+2"]:
            cluster.login(["scontrol", "update", f"JobId={job}", change])
        assert cluster.wait_job(job, "RUNNING")["NumNodes"] == str(most)

    def test_nothing_that_its_owner_writes_is_taken_for_a_job_s_state(self, cluster: Cluster) -> None:
        written = "x JobState=FAILED Restarts=9"
        job = cluster.sbatch("#!/bin/bash\nsleep 600\n", f"--comment={written}", f"--job-name={written}")
        assert cluster.wait_job(job, "RUNNING")["Restarts"] == "0"

    def test_the_unprivileged_user_may_not_drain_a_node(self, cluster: Cluster) -> None:
        drain = ["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test"]
        assert "Invalid user id" in cluster.login(drain, check=False).stderr
        cluster.login(drain, root=True)
        assert "DRAIN" in cluster.node_states()["n1"]


class TestMachines:
    def test_nodes_share_only_the_shared_directory(self, cluster: Cluster) -> None:
        for path in ("/dev/shm/x", "/tmp/x", "/scratch/x", f"{cluster.shared}/x"):
            cluster.exec("n1", ["touch", path])
        argv = ["bash", "-c", f"ls -d /dev/shm/x /tmp/x /scratch/x {cluster.shared}/x 2>/dev/null"]
        assert cluster.exec("n2", argv, check=False).stdout.split() == [f"{cluster.shared}/x"]
        assert cluster.login(argv, check=False).stdout.split() == [f"{cluster.shared}/x"]
        (cluster.shared / "x").unlink()
        cluster.exec("n1", ["rm", "/dev/shm/x"])

    def test_a_node_sees_only_its_own_processes(self, cluster: Cluster) -> None:
        lines = cluster.exec("n1", ["ps", "-e", "-o", "args="]).stdout.splitlines()
        daemons = [line for line in lines if line.startswith("slurmd ")]
        assert len(daemons) == 1
        assert daemons[0].endswith("-N n1")

    def test_exit_codes_and_signals_pass_through(self, cluster: Cluster) -> None:
        assert cluster.login(["bash", "-c", "exit 7"], check=False).returncode == 7
        assert cluster.exec("n1", ["bash", "-c", "exit 7"], check=False).returncode == 7
        for name, start in (("login", cluster.popen_login), ("n1", partial(cluster.popen_exec, "n1"))):
            running = start(["sleep", "600"])
            wait_until(partial(_sleeping, cluster, name), LIMIT_S, "the command to start")
            running.terminate()
            assert running.wait(timeout=LIMIT_S) in (-15, 143)

    def test_a_failed_command_names_itself_and_its_output(self, cluster: Cluster) -> None:
        with pytest.raises(ClusterError, match=r"on login: exit code 3: no luck"):
            cluster.login(["bash", "-c", "echo no luck >&2; exit 3"])


class TestFaults:
    def test_no_kill_keeps_a_job_running_through_a_power_loss(self, cluster: Cluster) -> None:
        job = cluster.sbatch(_SLEEP_EVERYWHERE, "--nodes=4", "--no-kill", "--requeue")
        cluster.wait_job(job, "RUNNING")
        wait_until(lambda: _sleeping(cluster, "n1", "n2", "n3", "n4"), LIMIT_S, "the tasks to start")
        fault = cluster.fault("power-loss", "n3")
        assert abs(time.time() - fault.time) < LIMIT_S
        wait_until(lambda: "DOWN" in cluster.node_states()["n3"], LIMIT_S, "Slurm to miss n3")
        record = cluster.job(job)
        assert record["JobState"] == "RUNNING"
        assert _sleeping(cluster, "n1", "n2", "n4")
        assert cluster.squeue()[0].nodes == "n[1-2,4]"

    def test_a_crashed_node_comes_back_empty(self, cluster: Cluster) -> None:
        cluster.exec("n2", ["touch", "/scratch/before"])
        cluster.fault("crash", "n2")
        wait_until(lambda: not cluster.processes("n2"), LIMIT_S, "n2's processes to end")
        cluster.repair("n2")
        assert cluster.node_states()["n2"] == "IDLE"
        assert cluster.exec("n2", ["ls", "/scratch"]).stdout == ""
        assert cluster.login(["srun", "--nodelist=n2", "hostname"]).stdout.strip() == "n2"

    def test_a_crash_resets_connections_and_a_power_loss_is_silent(self, cluster: Cluster) -> None:
        for kind, expected in (("crash", "closed"), ("power-loss", "silent")):
            listener = cluster.popen_exec(
                "n1", [*_python(cluster), _LISTEN], stdout=subprocess.PIPE, text=True
            )
            assert listener.stdout is not None
            listener.stdout.readline()
            peer = cluster.popen_exec(
                "n2", [*_python(cluster), _WAIT_FOR_END], stdout=subprocess.PIPE, text=True
            )
            assert peer.stdout is not None
            assert peer.stdout.readline().strip() == "connected"
            cluster.fault(kind, "n1")
            assert peer.communicate(timeout=LIMIT_S)[0].strip() == expected
            listener.communicate(timeout=5)
            cluster.repair("n1")

    def test_a_partitioned_node_goes_on_and_comes_back(self, cluster: Cluster) -> None:
        assert _reachable(cluster, "n2")
        init = cluster.machine("n2").init
        cluster.fault("partition", "n2")
        assert not _reachable(cluster, "n2")
        assert cluster.exec("n2", ["hostname"]).stdout.strip() == "n2"
        cluster.fault("heal", "n2")
        wait_until(lambda: _reachable(cluster, "n2"), LIMIT_S, "n2 to answer")
        assert cluster.machine("n2").init == init

    def test_a_frozen_node_stands_still(self, cluster: Cluster) -> None:
        counter = cluster.shared / "counter"
        script = f"while :; do echo >> {counter}; sleep 0.01; done"
        running = cluster.popen_exec("n3", ["bash", "-c", script])
        wait_until(lambda: counter.exists() and counter.stat().st_size > 3, LIMIT_S, "the counter")
        cluster.fault("freeze", "n3")
        frozen = counter.stat().st_size
        # A frozen node's kernel still takes connections; nobody answers on them.
        assert _reachable(cluster, "n3")
        assert counter.stat().st_size == frozen
        cluster.fault("thaw", "n3")
        wait_until(lambda: counter.stat().st_size > frozen, LIMIT_S, "the counter to go on")
        running.terminate()
        running.wait(timeout=LIMIT_S)
        counter.unlink()

    def test_a_frozen_node_can_lose_its_power(self, cluster: Cluster) -> None:
        cluster.fault("freeze", "n3")
        cluster.fault("power-loss", "n3")
        wait_until(lambda: not cluster.machine("n3").alive, LIMIT_S, "n3 to end")

    def test_kill_takes_one_rank_by_its_environment(self, cluster: Cluster) -> None:
        job = cluster.sbatch(_SLEEP_EVERYWHERE, "--nodes=2", "--ntasks-per-node=2", "--no-kill")
        cluster.wait_job(job, "RUNNING")
        wait_until(lambda: _sleepers(cluster, "n1") == 2, LIMIT_S, "the tasks to start")
        fault = cluster.fault("kill", "n1", match=r"^SLURM_PROCID=1$")
        assert len(fault.pids) == 1
        wait_until(lambda: _sleepers(cluster, "n1") == 1, LIMIT_S, "the task to end")
        with pytest.raises(ClusterError, match="no such process on n1"):
            cluster.fault("kill", "n1", match=r"^SLURM_PROCID=77$")

    def test_a_slow_link_delays_each_direction(self, cluster: Cluster) -> None:
        cluster.fault("slow", "n4", delay_ms=100)
        connect = [*_python(cluster), _CONNECT_TO_N4]
        cluster.login(connect)  # learns the hardware address
        assert float(cluster.login(connect).stdout) > 0.2
        cluster.fault("slow", "n4", off=True)
        # A busy machine is slow at times, but no slow link is ever quick.
        wait_until(lambda: float(cluster.login(connect).stdout) < 0.2, LIMIT_S, "a quick connection")

    def test_a_full_disk_refuses_data_until_it_is_freed(self, cluster: Cluster) -> None:
        write = ["bash", "-c", "echo something > /scratch/file"]
        cluster.exec("n5", write)
        cluster.fault("disk-full", "n5")
        refused = cluster.exec("n5", ["bash", "-c", "echo something > /scratch/other"], check=False)
        assert "No space left" in refused.stderr
        cluster.fault("disk-full", "n5", off=True)
        cluster.exec("n5", write)
        assert cluster.exec("n5", ["ls", "-A", "/scratch"]).stdout.split() == ["file", "other"]

    def test_slurmctld_restarts_under_a_running_job(self, cluster: Cluster) -> None:
        job = cluster.sbatch("#!/bin/bash\nsleep 600\n")
        cluster.wait_job(job, "RUNNING")
        cluster.fault("slurmctld-restart")
        assert cluster.job(job)["JobState"] == "RUNNING"
        cluster.fault("slurmctld-restart", crash=True)
        assert cluster.job(job)["JobState"] == "RUNNING"

    def test_repair_replaces_a_node_whose_slurmd_was_killed(self, cluster: Cluster) -> None:
        cluster.fault("kill", "n6", match="^slurmd -D")
        before = cluster.machine("n6").init
        assert cluster.repair_all() == []
        assert cluster.machine("n6").init != before

    def test_an_unknown_fault_or_node_is_named(self, cluster: Cluster) -> None:
        with pytest.raises(ClusterError, match="no fault 'meteor'"):
            cluster.fault("meteor", "n1")
        with pytest.raises(ClusterError, match="no machine 'n99'"):
            cluster.fault("crash", "n99")
        with pytest.raises(ClusterError, match="login is not a node"):
            cluster.fault("crash", "login")

    def test_a_slow_link_limits_the_rate_and_loses_nothing(self, cluster: Cluster) -> None:
        def seconds(rate: float | None) -> float:
            cluster.fault("slow", "n4", delay_ms=1, rate_mbit=rate)
            receiver = cluster.popen_exec(
                "n4", [*_python(cluster), _RECEIVE], stdout=subprocess.PIPE, text=True
            )
            assert receiver.stdout is not None
            receiver.stdout.readline()
            cluster.exec("n2", [*_python(cluster), _SEND_8_MB])
            received, took_s = receiver.communicate(timeout=LIMIT_S)[0].split()
            assert received == "8000000"
            return float(took_s)

        # 8 MB are 64 Mbit. On a busy machine they may take as long without a limit, but not each time.
        wait_until(lambda: seconds(None) < 0.7, 240.0, "a fast transfer")
        assert seconds(80.0) > 0.7


class TestCleaning:
    def test_what_a_job_leaves_behind_is_found_and_removed(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("testcluster.cluster._STRAYS_DEADLINE_S", 0.0)
        cluster.exec("n1", ["touch", "/dev/shm/left"])
        escaped = "setsid sleep 600 > /dev/null 2>&1 < /dev/null &"
        cluster.login(["srun", "--nodelist=n2", "bash", "-c", escaped], check=False)
        found = cluster.repair_all()
        assert "n1: /dev/shm/left" in found
        assert cluster.leftovers() == []

    def test_a_repaired_machine_has_the_small_shares_that_all_have(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        place = cluster.shared / tmp_path.name
        place.mkdir(exist_ok=True)
        with cluster.small_share(place, 16):
            cluster.exec("n1", ["touch", str(place / "here")])
            cluster.repair("n2")
            assert cluster.exec("n2", ["ls", str(place)]).stdout == "here\n"
        assert cluster.exec("n2", ["ls", str(place)]).stdout == ""

    def test_down_leaves_nothing_and_can_be_repeated(self, cluster: Cluster, tmp_path: Path) -> None:
        """A second cluster, side by side with the first, in a directory that is closed to other users."""
        before = _host_state(tmp_path)
        second = Cluster.up(nodes=2, directory=tmp_path / "second")
        assert sorted(second.login(["srun", "--nodes=2", "hostname"]).stdout.split()) == ["n1", "n2"]
        second.fault("freeze", "n1")
        second.fault("power-loss", "n2")
        inits = [machine.init for machine in second.saved.machines.values()]
        assert _netns_of(second)
        second.down()
        second.down()
        assert not _netns_of(second)
        assert not any(_alive(pid) for pid in inits)
        wait_until(lambda: _host_state(tmp_path) <= before, LIMIT_S, "the host to be as before")
        with pytest.raises(ClusterError, match="no cluster is up"):
            Cluster.attach(tmp_path / "second")

    def test_up_replaces_what_an_unclean_end_left(self, cluster: Cluster, tmp_path: Path) -> None:
        before = _host_state(tmp_path)
        directory = tmp_path / "second"
        up = [str(_CLUSTER), "up", "--nodes", "2", "--dir", str(directory)]
        subprocess.run(up, check=True, capture_output=True)
        (directory / "cluster.json").unlink()
        second = Cluster.up(nodes=1, directory=directory)
        assert second.nodes == ["n1"]
        refused = subprocess.run(up, check=False, capture_output=True, text=True)
        assert refused.returncode == 1
        assert f"in use by process {os.getpid()}" in refused.stderr
        second.down()
        assert not _netns_of(second)
        wait_until(lambda: _host_state(tmp_path) <= before, LIMIT_S, "the host to be as before")


class TestCommandLine:
    def test_status_login_exec_and_fault(self, cluster: Cluster) -> None:
        rows = json.loads(_cli(cluster, "status", "--json").stdout)
        assert [row["name"] for row in rows] == ["ctl", "login", *cluster.nodes]
        assert all(row["slurm"] == "IDLE" for row in rows if row["name"].startswith("n"))
        assert "n6" in _cli(cluster, "status").stdout
        done = _cli(cluster, "login", "--env", "A=b", "--", "bash", "-c", "echo $A; exit 4")
        assert (done.stdout, done.returncode) == ("b\n", 4)
        assert _cli(cluster, "exec", "n2", "--root", "--", "id", "-un").stdout == "root\n"
        before = time.time()
        fault = json.loads(_cli(cluster, "fault", "power-loss", "n2").stdout)
        assert fault["kind"] == "power-loss"
        assert before < fault["time"] < time.time()
        assert _cli(cluster, "repair", "n2").returncode == 0

    def test_errors_are_one_line(self, cluster: Cluster) -> None:
        done = _cli(cluster, "fault", "crash", "n99")
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("cluster: no machine 'n99'")


_CONNECT_TO_N4 = """
import socket, time
started = time.monotonic()
socket.create_connection(("n4", 6818))
print(time.monotonic() - started)
"""
_RECEIVE = """
import socket, time
listener = socket.create_server(("0.0.0.0", 5001))
print("listening", flush=True)
peer, _ = listener.accept()
started, total = time.monotonic(), 0
while chunk := peer.recv(1 << 20):
    assert chunk.count(b"x") == len(chunk)
    total += len(chunk)
print(total, time.monotonic() - started)
"""
_SEND_8_MB = """
import socket
socket.create_connection(("n4", 5001)).sendall(b"x" * 8_000_000)
"""
_LISTEN = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
peer, _ = listener.accept()
peer.recv(1)
"""
_WAIT_FOR_END = """
import socket
peer = socket.create_connection(("n1", 5000), timeout=120)
peer.settimeout(3)
print("connected", flush=True)
try:
    print("closed" if peer.recv(1) == b"" else "data")
except ConnectionResetError:
    print("closed")
except TimeoutError:
    print("silent")
"""


def _python(cluster: Cluster) -> list[str]:
    return [str(cluster.python), "-c"]


def _cli(cluster: Cluster, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = list(arguments)
    # Before the options of the machine's command, which follow "--".
    place = 1 if command == "fault" else 0
    words[place:place] = ["--dir", str(cluster.layout.directory)]
    argv = [sys.executable, str(_CLUSTER), command, *words]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=LIMIT_S)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _host_state(place: Path) -> set[str]:
    """The host's links, which those of other clusters join for a moment, and its mounts below this place:
    other tests mount something elsewhere."""
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    return links | {mount for mount in mounts if mount.startswith(f"{place}/")}


def _netns_of(cluster: Cluster) -> list[Path]:
    return list(Path("/run/netns").glob(f"{cluster.prefix}*"))
