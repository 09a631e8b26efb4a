"""Mounts one small file system at the same path in several machines: shared storage that can be filled.

Run as a script: the path, the size in MiB of a tmpfs, an image's path or "again", and the process ids of the
machines' first processes; with "again" the first of these has it, and the others get it. It goes from one
mount namespace to the next, which a process with threads could not; the host sees nothing of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from testcluster import kernel


def main() -> int:
    """Mount it everywhere, or say where it failed."""
    path, what, *inits = sys.argv[1:]
    machines = [os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY) for init in inits]
    if what == "again":
        kernel.setns(machines.pop(0), kernel.CLONE_NEWNS)
        _attach(path, machines)
        return 0
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if what.isdecimal():
        kernel.mount("tmpfs", path, "tmpfs", data=f"mode=1777,size={what}m")
    else:
        subprocess.run(["mount", "-o", "loop", what, path], check=True)
        os.chmod(path, 0o1777)
    _attach(path, machines)
    return 0


def _attach(path: str, machines: list[int]) -> None:
    mounts = [kernel.clone_mount(path) for _ in machines]
    for machine, mount in zip(machines, mounts, strict=True):
        kernel.setns(machine, kernel.CLONE_NEWNS)
        kernel.attach_mount(mount, path)


if __name__ == "__main__":
    raise SystemExit(main())
