"""One look at this machine through its probes: for `jurymast health`, and as a command for root.

A site's health check runs `python -m jurymast.health.once` as root: it needs only Python, this package and
what the probes themselves import. It prints what `jurymast health --json` prints, but for `schema`; options
give the site's own limits, since no policy is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jurymast.core.judges.own_health import ProbeLooked
from jurymast.core.state.findings import Finding, Verdict
from jurymast.health.probe import READINGS, Context, granted_gpus
from jurymast.health.watcher import ProbeWatcher, names_to_ask
from jurymast.reference import installed, thresholds, xid_of, xids

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
    return view(watcher.findings(), watcher.probes, context)


async def _watch(watcher: ProbeWatcher) -> None:
    try:
        await watcher.run()
    finally:
        await watcher.close()


def proven(finding: Finding, readings: Mapping[str, str]) -> Finding:
    """The finding as far as one look at a machine proves it. A message about an Xid that a user's program can
    cause on a healthy GPU is suspect, not bad, unless `readings` say otherwise: otherwise any user could have
    a node drained. If the GPU is broken, the driver's own state shows it as well."""
    entry = xid_of(finding.code)
    if entry is None or not entry.by_program or str(entry.code) in readings:
        return finding
    if finding.verdict is not Verdict.BAD:
        return finding
    said = f"{finding.message}; a program can cause this on a GPU that works"
    return replace(finding, verdict=Verdict.SUSPECT, message=said)


def view(found: Sequence[Finding], probes: Mapping[str, ProbeLooked], context: Context) -> dict[str, Any]:
    """What the commands print: the findings as far as they are proven, and the verdict that follows."""
    findings = [proven(finding, context.xid) for finding in found]
    verdicts = {finding.verdict for finding in findings}
    if Verdict.BAD in verdicts:
        code = CRITICAL
    elif Verdict.SUSPECT in verdicts:
        code = WARNING
    else:
        code = OK if any(probe.state == "looked" for probe in probes.values()) else UNKNOWN
    return {
        "node": context.node,
        "verdict": (Verdict.OK, Verdict.SUSPECT, Verdict.BAD, Verdict.UNKNOWN)[code].value,
        "exit_code": code,
        "probes": [{"name": name, "state": probe.state} for name, probe in sorted(probes.items())],
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
