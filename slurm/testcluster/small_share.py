"""Mounts one small file system at the same path in several machines: shared storage that can be filled.

Run as a script: the path, the size in MiB of a tmpfs or an image's path, and the process ids of the machines'
first processes. It goes from one mount namespace to the next, which a process with threads could not; the
host sees nothing of it.
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
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if what.isdecimal():
        kernel.mount("tmpfs", path, "tmpfs", data=f"mode=1777,size={what}m")
    else:
        subprocess.run(["mount", "-o", "loop", what, path], check=True)
        os.chmod(path, 0o1777)
    mounts = [kernel.clone_mount(path) for _ in machines]
    for machine, mount in zip(machines, mounts, strict=True):
        kernel.setns(machine, kernel.CLONE_NEWNS)
        kernel.attach_mount(mount, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
