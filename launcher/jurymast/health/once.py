"""One look at this machine through its probes: for `jurymast health`, and as a command for root.

A site's health check runs `python -m jurymast.health.once` as root: it needs only Python, this package and
what the probes themselves import. It prints what `jurymast health --json` prints; options give the site's own
limits, since no policy is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from jurymast.core.nodes.findings import Verdict
from jurymast.health.probe import READINGS, Context, granted_gpus, installed
from jurymast.health.watcher import ProbeWatcher, names_to_ask
from jurymast.reference import thresholds, xids

# Nagios' exit codes.
OK, WARNING, CRITICAL, UNKNOWN = range(4)
# How far back the kernel's log is read, in seconds.
LOG_S = 3600.0


def look(
    names: Collection[str],
    *,
    limits: dict[str, float],
    readings: dict[str, str],
    data_paths: tuple[str, ...] = (),
    local_path: str = "",
) -> dict[str, Any]:
    """Return what the probes `names` find now; `limits` and `readings` of Xids override the packaged ones."""
    context = Context(
        node=socket.gethostname(), thresholds=limits, xid=readings, data_paths=data_paths,
        local_path=os.path.expandvars(local_path), gpus=granted_gpus(os.environ),
        started_at=time.time() - LOG_S,
    )  # fmt: skip
    watcher = ProbeWatcher(context, names, lambda finding: None, once=True)
    asyncio.run(_watch(watcher))
    return _view(watcher, context.node)


async def _watch(watcher: ProbeWatcher) -> None:
    try:
        await watcher.run()
    finally:
        await watcher.close()


def _view(watcher: ProbeWatcher, node: str) -> dict[str, Any]:
    findings = watcher.findings()
    verdicts = {finding.verdict for finding in findings}
    if Verdict.BAD in verdicts:
        code = CRITICAL
    elif Verdict.SUSPECT in verdicts:
        code = WARNING
    else:
        code = OK if any(probe.state == "looked" for probe in watcher.probes.values()) else UNKNOWN
    return {
        "node": node,
        "verdict": (Verdict.OK, Verdict.SUSPECT, Verdict.BAD, Verdict.UNKNOWN)[code].value,
        "exit_code": code,
        "probes": [{"name": name, "state": probe.state} for name, probe in sorted(watcher.probes.items())],
        "findings": [finding.to_json() for finding in findings],
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Exit with UNKNOWN: argparse's own code would mean that the node is bad."""
        self.exit(UNKNOWN, f"{self.prog}: error: {message}\n")


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in thresholds():
        raise argparse.ArgumentTypeError(f"there is no threshold {name}")
    return name, float(value)


def _reading(text: str) -> tuple[str, str]:
    code, _, word = text.partition("=")
    if code not in map(str, xids()) or word not in READINGS:
        raise argparse.ArgumentTypeError(f"{text} is not CODE=READING, like 94=ok")
    return code, word


def main(words: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="jurymast.health.once", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--probe", action="append", choices=installed(), help="run only this probe; may be repeated"
    )
    parser.add_argument(
        "--off", action="append", choices=installed(), default=[], help="leave out this probe"
    )
    parser.add_argument("--threshold", type=_limit, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--xid", type=_reading, action="append", default=[], metavar="CODE=READING",
        help=f"READING: {', '.join(READINGS)}",
    )  # fmt: skip
    given = parser.parse_args(words)
    names = given.probe or names_to_ask(given.off)
    view = look(names, limits=dict(given.threshold), readings=dict(given.xid))
    print(json.dumps(view, indent=1))
    return int(view["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
