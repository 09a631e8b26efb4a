"""Writes slurm.conf and the machines' own /etc files into the cluster's directory."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from testcluster.settings import (
    CLUSTER_NAME,
    CONTROLLER,
    DEBUG_NODES,
    DEBUG_PARTITION,
    PARTITION,
    SITE_LOG,
    SLURMCTLD_PORT,
    SLURMD_PORT,
    SLURMDBD_PORT,
    USER,
    Layout,
    Options,
    node_name,
)

_REAL_MEMORY_MIB = 65536
_DEFAULT_MESSAGE_TIMEOUT_S = 10
_LEAST_MESSAGE_TIMEOUT_S = 2
_CGROUPS_OPTIONAL = (23, 11)
_NULL_DEVICE = os.makedev(1, 3)
_MUNGE_KEY_BYTES = 1024
# Each takes half a second of a processor on each node.
_HEALTH_CHECK_INTERVAL_S = 20
_SITE = Path(__file__).resolve().parents[1] / "site"


def write_all(layout: Layout, options: Options, release: tuple[int, ...]) -> None:
    """Write every configuration file; ``release`` is Slurm's, such as (22, 5, 8)."""
    layout.slurm_conf.write_text(slurm_conf(layout, options))
    (layout.etc / "gres.conf").write_text(_gres_conf(layout, options))
    (layout.etc / "cgroup.conf").write_text(_cgroup_conf(release))
    (layout.etc / "hosts").write_text(_hosts(options))
    (layout.etc / "passwd").write_text(_passwd(layout))
    # Newer systems' `su`, by which Slurm asks for a user's environment, refuses who has no line there.
    (layout.etc / "shadow").write_text(f"{USER}:*:20000:0:99999:7:::\nroot:*:20000:0:99999:7:::\n")
    (layout.etc / "shadow").chmod(0o600)
    if options.site:
        _write_site(layout, options)
    if options.accounting:
        _write_slurmdbd_conf(layout, options)


def slurm_conf(layout: Layout, options: Options) -> str:
    """Text of slurm.conf."""
    lines = [
        f"ClusterName={CLUSTER_NAME}",
        f"SlurmctldHost={CONTROLLER}({options.addresses[CONTROLLER]})",
        f"SlurmctldPort={SLURMCTLD_PORT}",
        f"SlurmdPort={SLURMD_PORT}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",
        "GresTypes=gpu",
        # An idle node gets its job at once: the defaults wait up to 3 s after sbatch and 30 s for backfill.
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",
        # A request that a partition can never meet is refused rather than queued for ever.
        "EnforcePartLimits=ALL",
        "FirstJobId=101",  # told apart from numbers of ranks and nodes
        "ReturnToService=2",
        "KillWait=2",
        # A test on a busy machine may ask late how a job ended.
        "MinJobAge=7200",
        f"SlurmdTimeout={options.slurmd_timeout_s}",
        # slurmctld's round of pings lasts until the deadest node has failed, and it books the others' answers
        # up to 2 s later: where that takes two thirds of SlurmdTimeout, healthy nodes go DOWN as well.
        f"MessageTimeout={_message_timeout_s(options.slurmd_timeout_s)}",
        "TCPTimeout=1",
        # The cluster may run where the hard limits of root cannot be raised.
        "PropagateResourceLimits=NONE",
        f"StateSaveLocation={layout.spool}/slurmctld",
        f"SlurmdSpoolDir={layout.spool}/%n",
        "SlurmctldPidFile=/run/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd.%n.log",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        *options.conf,
    ]
    if options.ipv6:
        lines.append("CommunicationParameters=EnableIPv6,DisableIPv4")
    if options.accounting:
        lines.append("AccountingStorageType=accounting_storage/slurmdbd")
        lines.append(f"AccountingStorageHost={options.addresses[CONTROLLER]}")
        lines.append(f"AccountingStoragePort={SLURMDBD_PORT}")
    if options.site:
        lines += [f"HealthCheckProgram={layout.health_check}", "HealthCheckNodeState=ANY"]
        lines.append(f"HealthCheckInterval={_HEALTH_CHECK_INTERVAL_S}")
    gres = f" Gres=gpu:{options.gpus}" if options.gpus else ""
    for index in range(options.nodes):
        lines.append(
            f"NodeName={node_name(index)} NodeAddr={options.addresses[node_name(index)]} CPUs={options.cpus}"
            f" RealMemory={_REAL_MEMORY_MIB}{gres} State=UNKNOWN"
        )
    common = "MaxTime=INFINITE State=UP OverSubscribe=NO"
    every = ",".join(node_name(index) for index in range(options.nodes))
    few = ",".join(node_name(index) for index in range(min(DEBUG_NODES, options.nodes)))
    lines.append(f"PartitionName={PARTITION} Nodes={every} Default=YES {common}")
    lines.append(f"PartitionName={DEBUG_PARTITION} Nodes={few} Default=NO {common}")
    return "\n".join(lines) + "\n"


def write_munge_key(layout: Layout) -> None:
    """Make the cluster's munge key; munged insists on its owner and on closed directories."""
    owner = pwd.getpwnam("munge")
    directory = layout.munge_key.parent
    directory.mkdir(mode=0o700, exist_ok=True)
    layout.munge_key.unlink(missing_ok=True)
    descriptor = os.open(layout.munge_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "wb") as key:
        key.write(os.urandom(_MUNGE_KEY_BYTES))
    for path in (directory, layout.munge_key):
        os.chown(path, owner.pw_uid, owner.pw_gid)


def _write_site(layout: Layout, options: Options) -> None:
    """The site's pieces, as slurm/site/README.md has them, with a place for a test's NVML."""
    layout.library.mkdir(exist_ok=True)
    layout.verdicts.mkdir(exist_ok=True)
    layout.verdicts.chmod(0o1733)
    settings = layout.etc / "site.ini"
    command = f"{options.python} -I -m jurymast.health.once --probe nvidia"
    settings.write_text(
        f"[health]\ncommand = {command}\n[verdicts]\nspool = {layout.verdicts}\n[drain]\nmax_fraction = 0.5\n"
        f"[files]\nstate = /run/jurymast-site\nlog = {SITE_LOG}\n"
        f"[slurm]\nconf = {layout.slurm_conf}\n"
    )
    settings.chmod(0o644)
    layout.health_check.write_text(
        "#!/bin/sh\n# jurymast's health check\n"
        f"export LD_LIBRARY_PATH={layout.library} FAKE_NVML_STATE={layout.library}/state.%n\n"
        f"exec {options.python} -I {_SITE / 'healthcheck'} --config {settings}\n"
    )
    layout.health_check.chmod(0o755)


def _write_slurmdbd_conf(layout: Layout, options: Options) -> None:
    lines = [
        "AuthType=auth/munge",
        f"DbdHost={CONTROLLER}",
        f"DbdAddr={options.addresses[CONTROLLER]}",
        f"DbdPort={SLURMDBD_PORT}",
        "SlurmUser=root",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",  # by its socket, as root, whom the database knows by that
        "StorageUser=root",
        "StorageLoc=slurm_acct_db",
        "PidFile=/run/slurmdbd.pid",
        f"LogFile={layout.log}/slurmdbd.log",
    ]
    conf = layout.etc / "slurmdbd.conf"
    conf.write_text("\n".join(lines) + "\n")
    conf.chmod(0o600)


def _message_timeout_s(slurmd_timeout_s: int) -> int:
    return min(_DEFAULT_MESSAGE_TIMEOUT_S, max(_LEAST_MESSAGE_TIMEOUT_S, slurmd_timeout_s // 3))


def _gres_conf(layout: Layout, options: Options) -> str:
    if not options.gpus:
        return ""
    # Slurm takes a GPU's number from the end of its file's name, and wants a device: more /dev/null stand in.
    directory = layout.etc / "gpu"
    directory.mkdir(exist_ok=True)
    for index in range(options.gpus):
        device = directory / f"gpu{index}"
        device.unlink(missing_ok=True)
        os.mknod(device, stat.S_IFCHR | 0o666, _NULL_DEVICE)
    numbers = f"[0-{options.gpus - 1}]" if options.gpus > 1 else "0"
    return f"Name=gpu File={directory}/gpu{numbers}\n"


def _cgroup_conf(release: tuple[int, ...]) -> str:
    # Nothing here uses cgroups, yet slurmd loads a plugin. Before 23.11 only that for version 1 starts on any
    # host: that for version 2 wants systemd, and the default looks for a mounted tree.
    return f"CgroupPlugin={'disabled' if release >= _CGROUPS_OPTIONAL else 'cgroup/v1'}\n"


def _hosts(options: Options) -> str:
    loopback = ["::1 localhost ip6-localhost"]
    if options.ipv6:
        return "\n".join([*loopback, *(f"{it} {name}" for name, it in options.addresses.items())]) + "\n"
    lines = ["127.0.0.1 localhost", *loopback]
    # Sockets that speak both versions of IP look their peers up by the mapped address.
    lines += [f"{prefix}{it} {name}" for name, it in options.addresses.items() for prefix in ("", "::ffff:")]
    return "\n".join(lines) + "\n"


def _passwd(layout: Layout) -> str:
    lines: list[str] = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == USER:
            fields[5] = str(layout.home)
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"
