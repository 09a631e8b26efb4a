"""The cluster: bringing it up and down, running commands on it, and mending it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testcluster import control, freezer, processes, slurmconf, software, state
from testcluster.errors import ClusterError, DeadlineError
from testcluster.faults import Fault, Faults
from testcluster.inspection import Inspector
from testcluster.machines import Builder, Machine
from testcluster.network import Network, any_netns
from testcluster.processes import wait_until
from testcluster.settings import (
    CONTROLLER,
    DEFAULT_DIR,
    DEFAULT_SLURMD_TIMEOUT_S,
    DIR_VARIABLE,
    LOGIN,
    MAX_NODES,
    MIB,
    SCRATCH,
    SLURM_CHOICES,
    SLURM_SYSTEM,
    SLURM_VARIABLE,
    USER,
    Layout,
    Options,
    netns_prefix,
)
from testcluster.visibility import compile_for_all, default_python

_HERE = Path(__file__).resolve().parent
_UP_DEADLINE_S = 180.0
_DOWN_DEADLINE_S = 60.0
_REPAIR_DEADLINE_S = 180.0
_COMMAND_DEADLINE_S = 180.0
_STRAYS_DEADLINE_S = 20.0
# Each question starts two processes and waits for slurmctld: those of three clusters would fill a processor.
_SLURM_POLL_S = 0.3
_REASON = "testcluster: replaced"


class Cluster:
    """A cluster whose state is in ``directory``. Get one with ``Cluster.up`` or ``Cluster.attach``."""

    def __init__(self, directory: Path = DEFAULT_DIR) -> None:
        self.layout = Layout(directory)
        self.prefix = netns_prefix(directory)
        self.network = Network(self.prefix, self.layout.spool)
        self._lock = state.Lock(self.layout)
        self._saved: state.Saved | None = None
        self._stamp: int | None = None
        self._faults = Faults(self)
        self._inspector = Inspector(self)
        self._shares: list[Path] = []

    # --- life ---

    @classmethod
    def up(
        cls,
        nodes: int = 6,
        *,
        cpus: int = 8,
        gpus: int = 8,
        slurm: str | None = None,
        directory: Path | None = None,
        slurmd_timeout_s: int = DEFAULT_SLURMD_TIMEOUT_S,
        python: Path | None = None,
        conf: Sequence[str] = (),
        site: bool = False,
        ipv6: bool = False,
        accounting: bool = False,
    ) -> Cluster:
        """Build a cluster, in place of whatever is left in that directory.

        ``slurm``: the release (default: $JURYMAST_TESTCLUSTER_SLURM, else the system's);
        ``python``: the one for jobs (default: the repository's own); ``conf``: more lines for slurm.conf;
        ``site``: with the health check of slurm/site; ``ipv6``: no machine has an IPv4
        address, not even loopback's; ``accounting``: with slurmdbd and a database, so that sacct answers.
        """
        software.require_root_linux()
        if not 1 <= nodes <= MAX_NODES:
            raise ClusterError(f"nodes must be 1 to {MAX_NODES}, not {nodes}")
        slurm = slurm or os.environ.get(SLURM_VARIABLE) or SLURM_SYSTEM
        if slurm not in SLURM_CHOICES:
            raise ClusterError(f"no Slurm {slurm!r}: choose from {', '.join(SLURM_CHOICES)}")
        options = Options(
            nodes=nodes,
            cpus=cpus,
            gpus=gpus,
            slurm=slurm,
            slurmd_timeout_s=slurmd_timeout_s,
            python=str((python or default_python()).absolute()),
            conf=tuple(conf),
            site=site,
            ipv6=ipv6,
            accounting=accounting,
        )
        with state.host_lock():
            software.ensure_packages(slurm, accounting=accounting)
            base = software.ensure_base(slurm)
            compile_for_all(Path(options.python))
            cluster = cls(resolved(directory))
            cluster._prepare_directory()
            cluster._lock.take()
            try:
                cluster._remove_everything()
                cluster._create(options, base)
            except BaseException:
                with contextlib.suppress(ClusterError):
                    cluster._remove_everything()
                cluster._lock.free()
                raise
        return cluster

    @classmethod
    def attach(cls, directory: Path | None = None) -> Cluster:
        """The cluster that is up in this directory."""
        cluster = cls(resolved(directory))
        cluster._saved = state.load(cluster.layout)
        if cluster._saved is None:
            raise ClusterError(f"no cluster is up in {cluster.layout.directory}")
        return cluster

    def down(self, *, force: bool = False, purge: bool = False) -> None:
        """Remove everything but files. Being down already is fine.

        ``force`` takes the cluster away from a process that uses it; ``purge`` removes the directory too, and
        with the last cluster of the host the user.
        """
        software.require_root_linux()
        if self.layout.directory.exists() and not force:
            self._lock.take()
        try:
            self._remove_everything()
        finally:
            self._lock.free()
        if purge:
            if self.layout.directory.exists():
                shutil.rmtree(self.layout.directory)
            with state.host_lock():
                # Other clusters on this host run their jobs as the same user.
                if not any_netns():
                    software.remove_user()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # --- what it consists of ---

    @property
    def saved(self) -> state.Saved:
        """The running cluster's record."""
        if self._saved is None:
            raise ClusterError(f"no cluster is up in {self.layout.directory}")
        # Another process may have repaired a node meanwhile.
        stamp = state.stamp(self.layout)
        if stamp not in (None, self._stamp):
            self._saved = state.load(self.layout) or self._saved
            self._stamp = stamp
        return self._saved

    @property
    def options(self) -> Options:
        """What ``up`` was asked for."""
        return self.saved.options

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return [name for name in self.saved.machines if name not in (CONTROLLER, LOGIN)]

    @property
    def shared(self) -> Path:
        """Shared storage: the same path on the host, the login host and every node."""
        return self.layout.shared

    @property
    def home(self) -> Path:
        """Home of the unprivileged user, on shared storage."""
        return self.layout.home

    @property
    def python(self) -> Path:
        """The Python that the unprivileged user can run everywhere in the cluster."""
        return Path(self.options.python)

    def machine(self, name: str) -> Machine:
        """A machine by name: a node, ``ctl`` or ``login``."""
        if name not in self.saved.machines:
            raise ClusterError(f"no machine {name!r}: choose from {', '.join(self.saved.machines)}")
        return self.saved.machines[name]

    def address(self, name: str) -> str:
        """IP address of a machine."""
        return self.machine(name).address

    def disk_bytes(self, path: str) -> int:
        """Size of a node-local disk when it is not filled by a fault."""
        options = self.options
        sizes = {SCRATCH: options.scratch_mib, "/tmp": options.tmp_mib, "/dev/shm": options.shm_mib}
        if path not in sizes:
            raise ClusterError(f"{path} is not a node-local disk: choose from {', '.join(sizes)}")
        return sizes[path] * MIB

    @contextlib.contextmanager
    def small_share(self, path: Path, size_mib: int, *, image: Path | None = None) -> Iterator[Path]:
        """Make an empty directory on shared storage a small file system of its own, the same on the login
        host and all nodes: in memory, or ext4 in a file `image` that is made for it, which `fsfreeze` can
        have hang. Gives the path at which the host reaches it."""
        if image is not None:
            with image.open("wb") as file:
                file.truncate(size_mib << 20)
            subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        names = [LOGIN, *self.nodes]
        self._share(path, str(image or size_mib), names)
        self._shares.append(path)
        try:
            yield self.machine(LOGIN).path(str(path))
        finally:
            self._shares.remove(path)
            for name in names:
                if self.machine(name).alive:
                    self.exec(name, ["umount", "--lazy", str(path)], cwd="/", root=True, check=False)

    def _share(self, path: Path, what: str, names: Sequence[str]) -> None:
        inits = [str(self.machine(name).init) for name in names]
        script = [sys.executable, "-I", "-S", str(_HERE / "small_share.py"), str(path), what]
        done = subprocess.run([*script, *inits], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{path}: {done.stderr.strip().splitlines()[-1]}")

    # --- running commands ---

    def login(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        input: str | None = None,
        timeout_s: float = _COMMAND_DEADLINE_S,
        check: bool = True,
        root: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host as the unprivileged user, and capture its output."""
        return self._run(LOGIN, argv, env, cwd, input, timeout_s, check, root)

    def exec(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        input: str | None = None,
        timeout_s: float = _COMMAND_DEADLINE_S,
        check: bool = True,
        root: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a machine, outside any Slurm job."""
        return self._run(name, argv, env, cwd, input, timeout_s, check, root)

    def popen_login(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        root: bool = False,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on the login host; its process id, signals and exit code are the command's own."""
        return self.popen_exec(LOGIN, argv, env=env, cwd=cwd, root=root, **popen)

    def popen_exec(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        root: bool = False,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command inside a machine, outside any Slurm job; signals are passed on to it."""
        return subprocess.Popen(self.enter_argv(name, argv, env=env, cwd=cwd, root=root), **popen)

    def enter_argv(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        root: bool = False,
    ) -> list[str]:
        """The host's command line that runs ``argv`` inside a machine."""
        machine = self.machine(name)
        if not machine.alive:
            raise ClusterError(f"{name} is dead: repair it first")
        user = software.ensure_user()
        specification = {
            "init": machine.init,
            "cgroup": machine.cgroup,
            "own_pids": machine.own_pids,
            "uid": None if root else user.pw_uid,
            "gid": None if root else user.pw_gid,
            "cwd": str(cwd or self.shared),
            "env": {**self.environment(root=root), **(env or {})},
        }
        script = [sys.executable, "-I", "-S", str(_HERE / "enter.py")]
        return [*script, json.dumps(specification), *argv]

    def environment(self, *, root: bool = False) -> dict[str, str]:
        """The environment a command starts with: nothing of the host's but the terminal type."""
        name = "root" if root else USER
        environment = {
            "PATH": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/root" if root else str(self.home),
            "USER": name,
            "LOGNAME": name,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.layout.slurm_conf),
        }
        if "TERM" in os.environ:
            environment["TERM"] = os.environ["TERM"]
        return environment

    # --- Slurm ---

    def slurm(self, argv: Sequence[str], *, timeout_s: float = _COMMAND_DEADLINE_S) -> str:
        """Run a Slurm command as root, who is Slurm's administrator here, and return its output."""
        return self.login(argv, root=True, cwd="/", timeout_s=timeout_s).stdout

    def squeue(self) -> list[control.Job]:
        """Every job that Slurm has not ended."""
        return control.parse_jobs(self.slurm(["squeue", "--noheader", "--format", control.SQUEUE_FORMAT]))

    def job(self, job_id: int) -> dict[str, str]:
        """Slurm's own fields of a job (JobState, NodeList, BatchHost, ...); kept 5 minutes after its end."""
        return control.parse_job(self.slurm(["scontrol", "--oneliner", "show", "job", str(job_id)]))

    def sbatch(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> int:
        """Submit a batch script as the unprivileged user, and return the job's id."""
        done = self.login(["sbatch", "--parsable", *options], input=script, env=env)
        return int(done.stdout.strip().split(";")[0])

    def wait_job(self, job_id: int, *states: str, deadline_s: float = _COMMAND_DEADLINE_S) -> dict[str, str]:
        """Wait until the job is in one of these states (RUNNING, COMPLETED, ...), and return its record."""
        record: dict[str, str] = {}

        def reached() -> bool:
            record.update(self.job(job_id))
            return record["JobState"] in states

        try:
            wait_until(reached, deadline_s, f"job {job_id}", _SLURM_POLL_S)
        except DeadlineError:
            now = f"{record.get('JobState')} ({record.get('Reason')})"
            raise ClusterError(
                f"job {job_id} is {now} after {deadline_s:g} s, not {'/'.join(states)}"
            ) from None
        return record

    def node_states(self) -> dict[str, str]:
        """Slurm's state of every node, such as IDLE or DOWN+NOT_RESPONDING."""
        return control.parse_node_states(self.slurm(["scontrol", "--oneliner", "show", "node"]))

    def wait_idle(self, names: Iterable[str] | None = None, *, deadline_s: float = _UP_DEADLINE_S) -> None:
        """Wait until Slurm calls these nodes (default: all) IDLE."""
        wanted = list(self.nodes if names is None else names)
        self._wait_nodes(wanted, lambda node_state: node_state == "IDLE", deadline_s)

    def restart_slurmctld(self, *, crash: bool = False) -> None:
        """Stop slurmctld, start it again, and wait until it answers.

        ``crash`` stops it by SIGKILL: it then forgets what it had not yet saved, say a job just submitted.
        """
        controller = self.machine(CONTROLLER)
        before = self._slurmctld_pids()
        number = signal.SIGUSR2 if crash else signal.SIGUSR1
        if not processes.send(controller.init, controller.ticks, number):
            raise ClusterError("the controller machine is dead: down and up again")

        def answers() -> bool:
            now = self._slurmctld_pids()
            return bool(now) and not set(now) & set(before) and self._slurmctld_answers()

        wait_until(answers, _UP_DEADLINE_S, "slurmctld to answer", _SLURM_POLL_S)

    # --- faults and repair ---

    def fault(self, kind: str, target: str | None = None, **options: Any) -> Fault:
        """Apply a fault: see ``Faults`` for kinds and options."""
        return self._faults.apply(kind, target, **options)

    def repair(self, *names: str) -> None:
        """Bring these nodes back as after a change of hardware: new namespaces, empty disks, IDLE in Slurm.

        A job that ran there loses the node, as it would when a machine reboots.
        """
        for name in names:
            if name not in self.nodes:
                raise ClusterError(f"no node {name!r}: choose from {', '.join(self.nodes)}")
        if not names:
            return
        for name in names:
            self.machine(name).kill()
        ended = [self.machine(name) for name in names]
        wait_until(
            lambda: not any(one.alive for one in ended), _DOWN_DEADLINE_S, f"{', '.join(names)} to end"
        )
        self.slurm(["scontrol", "update", f"NodeName={','.join(names)}", "State=DOWN", f"Reason={_REASON}"])
        self.network.remove(names)
        known = self.options.addresses
        self.network.add([(name, known[name]) for name in names])
        started = {machine.name: machine for machine in self._builder().start(names)}
        saved = self.saved
        self._saved = state.Saved(saved.options, saved.base, {**saved.machines, **started})
        state.save(self.layout, self._saved)
        for path in self._shares:
            self._share(path, "again", [LOGIN, *names])
        self._wait_nodes(names, control.usable, _REPAIR_DEADLINE_S, resume=True)

    def _cancel_all(self) -> bool:
        """Cancel all jobs that do not end yet: one that ends may have submitted another, or be requeued by
        its own process although it was cancelled. Returns whether there were any at all."""
        jobs = self.squeue()
        if going := [str(job.id) for job in jobs if job.state != "COMPLETING"]:
            self.login(["scancel", *going], root=True, check=False)
        return bool(jobs)

    def repair_all(self) -> list[str]:
        """End all jobs, mend what is broken, and clean up; returns what ended jobs had left behind.

        Afterwards every node is healthy and IDLE. For use between tests: what is returned was found after the
        jobs had been cancelled (SIGTERM, and SIGKILL ``KillWait`` later), did not end by itself, and has been
        removed. Slurm sees a job's end before the last killed process has given back its memory, which
        takes seconds on a busy machine.
        """
        for name in (CONTROLLER, LOGIN):
            self.fault("heal", name)
        if not self._slurmctld_answers():
            self.restart_slurmctld()
        ending = self._cancel_all()
        self.repair(*self._inspector.broken())
        if ending:
            try:
                wait_until(
                    lambda: not self._cancel_all(), _REPAIR_DEADLINE_S, "the jobs to end", _SLURM_POLL_S
                )
            except DeadlineError as error:
                raise DeadlineError("\n".join([f"{error}; left are:", *self.leftovers()])) from error
        with contextlib.suppress(DeadlineError):
            wait_until(lambda: not self.leftovers(), _STRAYS_DEADLINE_S, "the last processes", _SLURM_POLL_S)
        strays = self.leftovers()
        if strays:
            self._inspector.clean()
        self._inspector.empty_disks()
        self._wait_nodes(self.nodes, lambda found: found == "IDLE", _REPAIR_DEADLINE_S, resume=True)
        return strays

    def leftovers(self) -> list[str]:
        """What no job should leave: the user's processes, files in /dev/shm, mounts, jobs. One line each."""
        return self._inspector.leftovers()

    def status(self) -> list[dict[str, Any]]:
        """One record a machine, for ``status``."""
        return self._inspector.status()

    def processes(self, name: str) -> list[processes.Process]:
        """Every process of a machine except its first."""
        return self.machine(name).processes()

    # --- inner ---

    def _run(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: Path | str | None,
        input: str | None,
        timeout_s: float,
        check: bool,
        root: bool,
    ) -> subprocess.CompletedProcess[str]:
        shown = f"{shlex.join(argv)} on {name}"
        full = self.enter_argv(name, argv, env=env, cwd=cwd, root=root)
        source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        try:
            done = subprocess.run(
                full, capture_output=True, text=True, timeout=timeout_s, check=False, **source
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{shown}: no end after {timeout_s:g} s") from None
        if check and done.returncode != 0:
            output = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise ClusterError(f"{shown}: exit code {done.returncode}: {output}")
        return done

    def _prepare_directory(self) -> None:
        layout = self.layout
        user = software.ensure_user()
        layout.directory.mkdir(parents=True, exist_ok=True)
        layout.directory.chmod(0o755)
        for directory in (layout.etc, layout.log, layout.spool, layout.new_root, layout.shared):
            directory.mkdir(exist_ok=True)
            directory.chmod(0o755)
        layout.shared.chmod(0o1777)
        layout.home.mkdir(parents=True, exist_ok=True)
        layout.home.parent.chmod(0o755)
        layout.home.chmod(0o700)
        os.chown(layout.home, user.pw_uid, user.pw_gid)

    def _create(self, options: Options, base: Path) -> None:
        layout = self.layout
        for directory in (layout.spool, layout.log):
            shutil.rmtree(directory)
            directory.mkdir()
        known = options.addresses
        for name in [*known, "slurmctld"]:
            (layout.spool / name).mkdir()
        slurmconf.write_all(layout, options, software.slurm_release(base))
        slurmconf.write_munge_key(layout)
        if options.accounting:
            software.make_database(layout.database)
        self._saved = state.Saved(options, base, {})
        builder = self._builder()
        self.network.create(list(known.items()))
        started = {machine.name: machine for machine in builder.start(list(known))}
        self._saved = state.Saved(options, base, started)
        state.save(layout, self._saved)
        wait_until(self._slurmctld_answers, _UP_DEADLINE_S, "slurmctld to answer", _SLURM_POLL_S)
        self._wait_nodes(self.nodes, control.usable, _UP_DEADLINE_S)
        self.login([str(self.python), "-c", "import ctypes, ssl, sqlite3"])

    def _builder(self) -> Builder:
        return Builder(self.layout, self.options, self.saved.base, self.network, self.prefix)

    def _wait_nodes(
        self, names: Iterable[str], wanted: Callable[[str], bool], deadline_s: float, *, resume: bool = False
    ) -> None:
        pending = set(names)
        states: dict[str, str] = {}

        def ready() -> bool:
            states.update(self.node_states())
            if resume:
                self._resume([name for name in pending if {"DOWN", "DRAIN"} & set(states[name].split("+"))])
            pending.difference_update([name for name in pending if wanted(states.get(name, ""))])
            return not pending

        try:
            wait_until(ready, deadline_s, "the nodes", _SLURM_POLL_S)
        except DeadlineError:
            shown = ", ".join(f"{name} is {states.get(name, 'unknown')}" for name in sorted(pending))
            raise ClusterError(f"after {deadline_s:g} s: {shown} (logs: {self.layout.log})") from None

    def _resume(self, names: Sequence[str]) -> None:
        if names:
            # Refused when the node has come back by itself meanwhile; the next look tells.
            update = ["scontrol", "update", f"NodeName={','.join(names)}", "State=RESUME"]
            self.login(update, root=True, check=False)

    def _slurmctld_answers(self) -> bool:
        done = self.login(["scontrol", "ping"], root=True, cwd="/", check=False)
        return done.returncode == 0 and " UP" in done.stdout

    def _slurmctld_pids(self) -> list[int]:
        return [item.pid for item in self.processes(CONTROLLER) if "slurmctld -D" in item.command]

    def _remove_everything(self) -> None:
        saved = self._saved or state.load(self.layout)
        for machine in saved.machines.values() if saved else []:
            machine.kill()
        # Whatever a lost state file does not name is found by its namespaces and cgroups.
        spaces = [processes.namespace_of(path) for path in self.network.existing()]
        for group in freezer.remaining(self.prefix):
            freezer.thaw(group, list)

        def stray() -> list[int]:
            return sorted({*processes.in_namespaces("net", spaces), *freezer.members(self.prefix)})

        processes.kill_all(stray, _DOWN_DEADLINE_S)
        self.network.remove_all()
        freezer.remove_all(self.prefix)
        self.layout.state_file.unlink(missing_ok=True)
        self._saved = None
        left = self._inspector.remains(spaces)
        if left:
            raise ClusterError(f"down left: {'; '.join(left)}")


def resolved(directory: Path | None) -> Path:
    """The cluster's directory: the one given, else the environment's, else the default."""
    return Path(directory or os.environ.get(DIR_VARIABLE) or DEFAULT_DIR).resolve()
