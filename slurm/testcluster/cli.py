"""The command line: ``cluster up | down | status | login | exec | fault | repair | leftovers``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from testcluster.cluster import Cluster, resolved
from testcluster.errors import ClusterError
from testcluster.settings import (
    DEFAULT_DIR,
    DEFAULT_SLURMD_TIMEOUT_S,
    DIR_VARIABLE,
    SCRATCH,
    SLURM_CHOICES,
    SLURM_SYSTEM,
    SLURM_VARIABLE,
)

_EXIT_ERROR = 1
_FAULTS_WITHOUT_OPTIONS = {
    "crash": "end every process of the node at once; peers see connection resets",
    "power-loss": "cut the node's link, then end every process: nothing more is heard from it",
    "partition": "cut a machine's link; its processes go on",
    "heal": "undo partition and slow",
    "freeze": "stop every process of the node",
    "thaw": "undo freeze",
    "repaired": "give the node a new boot id, as after a repair; its processes go on",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = list(sys.argv[1:] if argv is None else argv)
    head, tail = words, []
    if "--" in words:
        cut = words.index("--")
        head, tail = words[:cut], words[cut + 1 :]
    arguments = _parser().parse_args(head)
    if tail:
        if not hasattr(arguments, "command"):
            print("cluster: only login and exec take a command after --", file=sys.stderr)
            return 2
        arguments.command = [*arguments.command, *tail]
    try:
        code: int = arguments.run(arguments)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return _EXIT_ERROR
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=None, help=f"default: ${DIR_VARIABLE}, {DEFAULT_DIR}")
    parser = argparse.ArgumentParser(prog="cluster", description="A real Slurm cluster on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands, common)
    down = commands.add_parser("down", parents=[common], help="remove the cluster")
    down.add_argument("--purge", action="store_true", help="remove its files too, and an unused user")
    down.add_argument("--force", action="store_true", help="even if a process is using it")
    down.set_defaults(run=_down)
    status = commands.add_parser("status", parents=[common], help="list the machines")
    status.add_argument("--json", action="store_true")
    status.set_defaults(run=_status)
    login = commands.add_parser("login", parents=[common], help="run a command or a shell on the login host")
    _add_command_options(login)
    login.add_argument("command", nargs=argparse.REMAINDER)
    login.set_defaults(run=_login)
    execute = commands.add_parser("exec", parents=[common], help="run a command inside a node")
    execute.add_argument("node")
    _add_command_options(execute)
    execute.add_argument("command", nargs="*", help="put -- before it when it has options")
    execute.set_defaults(run=_exec)
    repair = commands.add_parser("repair", parents=[common], help="bring nodes back")
    repair.add_argument("nodes", nargs="*", metavar="NODE")
    repair.add_argument("--all", action="store_true", help="end all jobs, and mend and clean every node")
    repair.set_defaults(run=_repair)
    leftovers = commands.add_parser("leftovers", parents=[common], help="what jobs have left behind")
    leftovers.add_argument("--json", action="store_true")
    leftovers.set_defaults(run=_leftovers)
    _add_fault(commands, common)
    return parser


def _add_up(commands: Any, common: argparse.ArgumentParser) -> None:
    up = commands.add_parser("up", parents=[common], help="build the cluster, replacing what is left")
    up.add_argument("--nodes", type=int, default=6)
    up.add_argument("--cpus", type=int, default=8, help="processors that Slurm sees on a node")
    up.add_argument("--gpus", type=int, default=8, help="stand-in GPUs that Slurm sees on a node")
    up.add_argument(
        "--slurm", choices=SLURM_CHOICES, default=None, help=f"default: ${SLURM_VARIABLE}, {SLURM_SYSTEM}"
    )
    up.add_argument("--slurmd-timeout", type=int, default=DEFAULT_SLURMD_TIMEOUT_S, metavar="SECONDS")
    up.add_argument("--python", type=Path, default=None, help="the Python that jobs use (the repository's)")
    up.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="more of slurm.conf")
    up.add_argument("--site", action="store_true", help="with the health check of slurm/site, every 20 s")
    up.add_argument("--ipv6", action="store_true", help="without any IPv4 address")
    up.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct answers")
    up.add_argument("--json", action="store_true")
    up.set_defaults(run=_up)


def _add_command_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cwd", type=Path, default=None, help="default: the shared directory")
    parser.add_argument("--root", action="store_true", help="as root instead of the unprivileged user")


def _add_fault(commands: Any, common: argparse.ArgumentParser) -> None:
    fault = commands.add_parser("fault", help="break something, and print when")
    kinds = fault.add_subparsers(required=True, metavar="KIND", dest="kind")
    for kind, text in _FAULTS_WITHOUT_OPTIONS.items():
        plain = kinds.add_parser(kind, parents=[common], help=text)
        plain.add_argument("target", metavar="NODE")
        plain.set_defaults(run=_fault, options=())
    kill = kinds.add_parser("kill", parents=[common], help="signal processes of a node")
    kill.add_argument("target", metavar="NODE")
    which = kill.add_mutually_exclusive_group(required=True)
    which.add_argument("--pid", type=int, help="as the node numbers it")
    which.add_argument("--match", help="pattern: command line, or a NAME=value of its environment")
    kill.add_argument("--signal", default="KILL")
    kill.set_defaults(run=_fault, options=("pid", "match", "signal"))
    part = kinds.add_parser("part", parents=[common], help="lose all that two machines send to each other")
    part.add_argument("target", metavar="NODE")
    part.add_argument("--other", required=True, metavar="NODE")
    part.set_defaults(run=_fault, options=("other",))
    slow = kinds.add_parser("slow", parents=[common], help="delay a machine's packets")
    slow.add_argument("target", metavar="NODE")
    slow.add_argument("--delay-ms", type=float, default=0.0, help="in each direction")
    slow.add_argument("--rate-mbit", type=float, default=None, help="of each direction")
    slow.add_argument("--off", action="store_true")
    slow.set_defaults(run=_fault, options=("delay_ms", "rate_mbit", "off"))
    full = kinds.add_parser("disk-full", parents=[common], help="leave no space on a node-local disk")
    full.add_argument("target", metavar="NODE")
    full.add_argument("--path", default=SCRATCH)
    full.add_argument("--off", action="store_true")
    full.set_defaults(run=_fault, options=("path", "off"))
    restart = kinds.add_parser(
        "slurmctld-restart", parents=[common], help="kill slurmctld and start it again"
    )
    restart.add_argument("--crash", action="store_true", help="stop it by SIGKILL")
    restart.set_defaults(run=_fault, target=None, options=("crash",))
    repair = kinds.add_parser("repair", parents=[common], help="bring the node back")
    repair.add_argument("nodes", nargs="+", metavar="NODE")
    repair.set_defaults(run=_repair, all=False)


def _up(arguments: argparse.Namespace) -> int:
    cluster = Cluster.up(
        arguments.nodes,
        cpus=arguments.cpus,
        gpus=arguments.gpus,
        slurm=arguments.slurm,
        directory=arguments.dir,
        slurmd_timeout_s=arguments.slurmd_timeout,
        python=arguments.python,
        conf=arguments.conf,
        site=arguments.site,
        ipv6=arguments.ipv6,
        accounting=arguments.accounting,
    )
    if arguments.json:
        print(
            json.dumps(
                {"nodes": cluster.nodes, "shared": str(cluster.shared), "slurm": cluster.options.slurm}
            )
        )
    else:
        print(f"{len(cluster.nodes)} nodes are up; shared storage is {cluster.shared}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    Cluster(resolved(arguments.dir)).down(force=arguments.force, purge=arguments.purge)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    rows = Cluster.attach(arguments.dir).status()
    if arguments.json:
        print(json.dumps(rows))
        return 0
    print(f"{'NAME':6} {'ADDRESS':12} {'SLURM':24} {'INIT':>7} {'SLURMD':>7} CONDITION")
    for row in rows:
        pids = f"{row['init_pid']:>7} {row['slurmd_pid'] or '-':>7}"
        print(f"{row['name']:6} {row['address']:12} {row['slurm'] or '-':24} {pids} {_condition(row)}")
    return 0


def _condition(row: dict[str, Any]) -> str:
    words = [] if row["alive"] else ["dead"]
    words += ["link down"] if row["link"] == "down" else []
    words += [word for word in ("frozen", "slow") if row[word]]
    words += [f"{disk} full" for disk in row["full_disks"]]
    return ", ".join(words) or "up"


def _login(arguments: argparse.Namespace) -> int:
    _enter("login", arguments)


def _exec(arguments: argparse.Namespace) -> int:
    _enter(arguments.node, arguments)


def _enter(name: str, arguments: argparse.Namespace) -> NoReturn:
    for item in arguments.env:
        if "=" not in item:
            raise ClusterError(f"--env wants NAME=VALUE, not {item!r}")
    environment = dict(item.split("=", 1) for item in arguments.env)
    cluster = Cluster.attach(arguments.dir)
    command = arguments.command or ["bash"]
    argv = cluster.enter_argv(name, command, env=environment, cwd=arguments.cwd, root=arguments.root)
    sys.stdout.flush()
    os.execv(argv[0], argv)


def _repair(arguments: argparse.Namespace) -> int:
    cluster = Cluster.attach(arguments.dir)
    if arguments.all:
        for line in cluster.repair_all():
            print(f"removed {line}")
    elif arguments.nodes:
        cluster.repair(*arguments.nodes)
    else:
        raise ClusterError("repair what? Name nodes, or give --all")
    return 0


def _leftovers(arguments: argparse.Namespace) -> int:
    found = Cluster.attach(arguments.dir).leftovers()
    print(json.dumps(found) if arguments.json else "\n".join(found) or "nothing")
    return 0


def _fault(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in arguments.options}
    fault = Cluster.attach(arguments.dir).fault(arguments.kind, arguments.target, **options)
    print(json.dumps(fault.to_json()))
    return 0
