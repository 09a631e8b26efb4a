"""Verdicts: how a run without privileges reports a bad node to the site.

A verdict is a small file in a spool directory of the site (owned by root, mode 1733: everybody may add a
file, nobody can list or read others' files). It contains a munge credential, so the site's health check,
which runs as root on the node, knows who wrote it and when. The health check never acts on a verdict alone:
root's own probes must find the same. See slurm/site/README.md.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jurymast.core.state.findings import Finding
from jurymast.errors import ClusterUnavailableError
from jurymast.jobs import run_command
from jurymast.rundir import write_atomically

VERSION = 1
# How long munge accepts the credential, in seconds: longer than most sites' HealthCheckInterval.
LIFETIME_S = 3600
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def verdict(node: str, boot_id: str, job: str, run: str, finding: Finding, at: float) -> dict[str, Any]:
    """The content of a verdict for the site's health check. `at`: seconds since the epoch."""
    return {
        "v": VERSION, "node": node, "boot_id": boot_id, "job": job, "run": run, "kind": finding.kind,
        "code": finding.code, "device": finding.device, "message": finding.message[:500], "at": at,
        "nonce": secrets.token_hex(16),
    }  # fmt: skip


def boot_id() -> str:
    """This machine's boot id, which is new with every boot; "" if the kernel does not give one."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def leave(spool: Path, values: Mapping[str, Any]) -> Path:
    """Seal a verdict with munge and write it into the spool. Blocks. Raises ClusterUnavailableError."""
    credential = seal(json.dumps(dict(values)))
    path = spool / f"{values['node']}.{values['nonce']}"
    try:
        # A rename, so that the health check never reads a part of a verdict.
        write_atomically(path, credential.encode(), durable=False)
    except OSError as error:
        raise ClusterUnavailableError(
            f"cannot leave a verdict in {spool}: {error.strerror}",
            hint="jurymast doctor shows what the site lacks; or set nodes_policy.bad: exclude",
        ) from error
    return path


def seal(payload: str) -> str:
    """Return a munge credential with `payload`, made in the caller's name and readable by root alone. Raises
    ClusterUnavailableError."""
    return run_command(["munge", f"--ttl={LIFETIME_S}", "--restrict-uid=0"], given=payload)
