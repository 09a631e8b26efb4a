"""Every class that an incident's cause can have: what happened, whose restart budget pays, what to do.

`category` is the row of Llama 3's table of unplanned interruptions (arXiv 2407.21783, table 5) that the
class belongs to, "" for what that table has no row for. It says what is looked at, not how much is found.
"""

from __future__ import annotations

from dataclasses import dataclass

from jurymast.core.nodes import findings

INFRASTRUCTURE = "infrastructure"
APPLICATION = "application"
NOBODY = "nobody"  # it was a choice: somebody asked for it, or a swap pays

GPU = "Faulty GPU, HBM3 or SRAM memory, GPU system processor, thermal, silent data corruption"
NETWORK = "Network switch, cable, network interface"
HOST = "Host maintenance, host memory, system reboot, power, disks, other host problems"
SOFTWARE = "Software bug, dependency"
WATCHDOG = "NCCL watchdog timeouts"
FILESYSTEM = "Filesystem mount, storage"


@dataclass(frozen=True)
class CauseClass:
    """`charged`: infrastructure, application or nobody. `todo`: for whoever is on call, after what jurymast
    has already done."""

    name: str
    charged: str
    category: str
    meaning: str
    todo: str


_CLASSES = (
    CauseClass("node_lost", INFRASTRUCTURE, HOST, "a node went silent: power, kernel or network",
               "have the node looked at before it serves again"),
    CauseClass("node_crash", INFRASTRUCTURE, HOST, "a node's agent ended or was started anew",
               "look at the node's log: who ended the agent?"),
    CauseClass("fabric_fault", INFRASTRUCTURE, NETWORK, "many nodes lost their network at once",
               "look at the switch, the fabric manager and the power feed; no node is blamed"),
    CauseClass("common_fault", INFRASTRUCTURE, "", "many nodes reported the same fault at once",
               "look for what these nodes share; no node is blamed"),
    CauseClass("allocation_lost", INFRASTRUCTURE, HOST, "the whole allocation ended without a word",
               "ask Slurm why the job ended (sacct)"),
    CauseClass("gpu_bad", INFRASTRUCTURE, GPU, "a GPU, its memory or its links are broken",
               "drain the node; it needs a reset, a reboot or a repair"),
    CauseClass("gpu_suspect", INFRASTRUCTURE, GPU, "a GPU behaves as one that is about to break",
               "nothing: the node is tested before it is used again"),
    CauseClass("network_bad", INFRASTRUCTURE, NETWORK, "a node's network device is broken",
               "check the cable, the port and the device of that node"),
    CauseClass("network_suspect", INFRASTRUCTURE, NETWORK, "a node's network device is down or flaps",
               "check the cable and the port; the ranks can do without the device for now"),
    CauseClass("host_bad", INFRASTRUCTURE, HOST, "a node's machine is broken: driver, memory, disk or clock",
               "drain the node and have it looked at"),
    CauseClass("host_suspect", INFRASTRUCTURE, HOST, "a node's machine is not well",
               "nothing: the node is tested before it is used again"),
    CauseClass("gpu_unavailable", INFRASTRUCTURE, GPU, "a rank could not use its GPU",
               "check the driver and the fabric manager of that node"),
    CauseClass("worker_killed", INFRASTRUCTURE, HOST, "a rank was killed from outside",
               "look at the node's kernel log: who killed it?"),
    CauseClass("worker_terminated", INFRASTRUCTURE, HOST, "a rank was asked to end, and not by jurymast",
               "ask who sent the SIGTERM: a node's epilog, a user, a preemption"),
    CauseClass("bus_error", INFRASTRUCTURE, HOST, "a rank read mapped memory that nothing backed",
               "check the file system that the rank maps files of"),
    CauseClass("shm_full", INFRASTRUCTURE, HOST, "/dev/shm of a node was full",
               "remove what others left in /dev/shm there, or have data loaders use less of it"),
    CauseClass("host_died", INFRASTRUCTURE, SOFTWARE, "a node's torchrun host died with its ranks",
               "look at the node's agent log"),
    CauseClass("rank_frozen", INFRASTRUCTURE, HOST, "a rank's process stood still",
               "ask who stopped the process, or what it waits for in the kernel"),
    CauseClass("hang", INFRASTRUCTURE, WATCHDOG, "no rank stepped any more",
               "compare what the ranks waited in: the one that differs is the lead"),
    CauseClass("restore_failed", INFRASTRUCTURE, NETWORK, "a rank's image could not be brought to its node",
               "look at the network between the nodes named"),
    CauseClass("collective_timeout", INFRASTRUCTURE, WATCHDOG, "the watchdog ended a collective",
               "compare what the ranks waited in: the one that differs is the lead"),
    CauseClass("communication", INFRASTRUCTURE, NETWORK, "ranks lost each other, and nothing else was seen",
               "if it comes again, look at the network between the ranks named"),
    CauseClass("storage_full", INFRASTRUCTURE, FILESYSTEM, "shared storage is full or over quota",
               "make room; no node is at fault and none was swapped"),
    CauseClass("storage_failed", INFRASTRUCTURE, FILESYSTEM, "shared storage failed or was too slow",
               "look at the file system; no node is blamed"),
    CauseClass("disk_full", INFRASTRUCTURE, HOST, "a node's own disk is full",
               "make room on that node"),
    CauseClass("disk_failed", INFRASTRUCTURE, HOST, "a node's own disk failed",
               "drain the node and replace the disk"),
    CauseClass("out_of_memory", APPLICATION, SOFTWARE, "a rank used more memory than its job has",
               "ask for more memory (--mem), or have data loaders use less"),
    CauseClass("gpu_out_of_memory", APPLICATION, SOFTWARE, "a rank used more memory than its GPU has",
               "a smaller batch, or more sharding"),
    CauseClass("gpu_exception", APPLICATION, SOFTWARE, "the training's GPU code used an illegal address",
               "run once with CUDA_LAUNCH_BLOCKING=1 to see where"),
    CauseClass("import_failed", APPLICATION, SOFTWARE, "a module or library could not be loaded",
               "repair the environment that the script runs in"),
    CauseClass("worker_exception", APPLICATION, SOFTWARE, "the training's code raised an exception",
               "read the traceback"),
    CauseClass("worker_exit", APPLICATION, SOFTWARE, "the training's code ended a rank with an exit code",
               "read that rank's log"),
    CauseClass("worker_crash", APPLICATION, SOFTWARE, "the training's code crashed a rank",
               "read that rank's log; a core dump tells more"),
    CauseClass("straggler", NOBODY, HOST, "a node slowed all others down",
               "nothing: the node is tested before it is used again"),
    CauseClass("restart_asked", NOBODY, "", "somebody asked for a restart", ""),
    CauseClass("drain_asked", NOBODY, "", "somebody took a node out", ""),
    CauseClass("rollback_asked", NOBODY, "", "somebody went back to an older checkpoint", ""),
)  # fmt: skip
CAUSES = {cause.name: cause for cause in _CLASSES}

# What a finding comes to as a cause, by its kind.
_OF_KIND = {findings.HARDWARE: "gpu", findings.NETWORK: "network", findings.HOST: "host"}
FROM_FINDINGS = frozenset(f"{name}_{verdict}" for name in _OF_KIND.values() for verdict in ("bad", "suspect"))


def of_finding(finding: findings.Finding) -> str:
    """The class of an incident that this finding, bad or suspect, is the cause of. KeyError: it is of a kind
    that no node answers for."""
    part = _OF_KIND[finding.kind]
    if part == "gpu" and not (finding.code.startswith(("xid-", "gpu-")) or finding.device.startswith("gpu")):
        part = "host"  # broken memory of the machine is hardware, too
    return f"{part}_{finding.verdict.value}"


def meaning(name: str) -> str:
    """One sentence without its full stop; "" for a class of another version."""
    return CAUSES[name].meaning if name in CAUSES else ""
