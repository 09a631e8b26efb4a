"""Verdicts: how a run without privileges tells the site that a node is bad.

A verdict is a small file in a spool directory of the site (root's, mode 1733: everybody may add a file,
nobody sees another's). It holds a munge credential. So the site's health check, which runs as root on the
node, knows for certain who wrote it and when. The health check never acts on a verdict alone: root's own
probes must find the same. See slurm/site/README.md.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jurymast.cluster.allocation import COMMAND_LIMIT_S
from jurymast.core.nodes.findings import Finding
from jurymast.errors import ClusterUnavailableError
from jurymast.rundir import write_atomically

VERSION = 1
# How long munge holds the credential good, in seconds: longer than most sites' HealthCheckInterval.
LIFETIME_S = 3600
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def verdict(node: str, boot_id: str, job: str, run: str, finding: Finding, at: float) -> dict[str, Any]:
    """What the site's health check reads. `at`: seconds since the epoch."""
    return {
        "v": VERSION, "node": node, "boot_id": boot_id, "job": job, "run": run, "kind": finding.kind,
        "code": finding.code, "device": finding.device, "message": finding.message[:500], "at": at,
        "nonce": secrets.token_hex(16),
    }  # fmt: skip


def boot_id() -> str:
    """This machine's, new with every boot; "" where the kernel does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def leave(spool: Path, values: Mapping[str, Any]) -> Path:
    """Seal a verdict with munge and leave it in the spool. Blocks; raises ClusterUnavailableError."""
    credential = seal(json.dumps(dict(values)).encode())
    path = spool / f"{values['node']}.{values['nonce']}"
    try:
        # By a rename, so that the health check never reads half of one.
        write_atomically(path, credential, durable=False)
    except OSError as error:
        raise ClusterUnavailableError(
            f"cannot leave a verdict in {spool}: {error.strerror}",
            hint="jurymast doctor shows what the site lacks; or set nodes_policy.bad: exclude",
        ) from error
    return path


def seal(payload: bytes) -> bytes:
    """A munge credential around `payload`, in the caller's name, for root alone. Raises
    ClusterUnavailableError."""
    command = ["munge", f"--ttl={LIFETIME_S}", "--restrict-uid=0"]
    try:
        done = subprocess.run(
            command, input=payload, capture_output=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except FileNotFoundError as error:
        raise ClusterUnavailableError("munge is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterUnavailableError(f"munge did not answer within {COMMAND_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise ClusterUnavailableError(f"munge: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
