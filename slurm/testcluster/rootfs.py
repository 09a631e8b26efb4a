"""Builds a machine's root file system inside its own mount namespace; nothing outside changes.

The new root is an empty tmpfs into which the base system's directories are bound, so that a machine can have
its own /tmp, /run, /dev/shm and /scratch, and so that directories the unprivileged user may not enter (a 0700
home with the Python installation in it) can be replaced by readable ones that hold only what is needed.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testcluster import kernel

# Made anew in every machine.
_OWN = frozenset({"proc", "run", "tmp", "scratch", "lost+found"})
# Taken from the host even when the base is another Debian's directory.
_FROM_HOST = ("dev", "sys")


@dataclass(frozen=True)
class Tmpfs:
    """A tmpfs of the machine's own: path, octal mode, size in MiB."""

    path: str
    mode: str
    size_mib: int


@dataclass(frozen=True)
class RootPlan:
    """What a machine's root is made of; all paths are absolute."""

    mount_point: str
    base: str
    tmpfs: tuple[Tmpfs, ...]
    masks: tuple[str, ...]  # directories closed to the user: replaced by empty readable ones
    keeps: tuple[str, ...]  # directories that must be visible at the same path as on the host
    files: tuple[tuple[str, str], ...]  # (host file, path in the machine)
    host_proc: bool  # whether commands there see the host's processes

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the machine's process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RootPlan:
        """Inverse of ``to_json``."""
        return cls(
            mount_point=data["mount_point"],
            base=data["base"],
            tmpfs=tuple(Tmpfs(**item) for item in data["tmpfs"]),
            masks=tuple(data["masks"]),
            keeps=tuple(data["keeps"]),
            files=tuple((source, target) for source, target in data["files"]),
            host_proc=data["host_proc"],
        )


def build(plan: RootPlan) -> None:
    """Build the root and make it the calling process's; the caller owns a fresh mount namespace."""
    kernel.mount(None, "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root = Path(plan.mount_point)
    kernel.mount("tmpfs", str(root), "tmpfs", data="mode=0755,size=1m")
    # Unbindable: the recursive bind of the directory that holds it must not copy it into itself.
    kernel.mount(None, str(root), flags=kernel.MS_UNBINDABLE)
    _bind_base(root, Path(plan.base))
    (root / "proc").mkdir()
    if plan.host_proc:
        kernel.mount("/proc", str(root / "proc"), flags=kernel.MS_BIND | kernel.MS_REC)
    else:
        kernel.mount("proc", str(root / "proc"), "proc")
    for item in plan.tmpfs:
        _mount_tmpfs(root, item.path, item.mode, item.size_mib)
    for path in plan.masks:
        if _inside(root, path).is_dir():
            _mount_tmpfs(root, path, "0755", 1)
    for path in plan.keeps:
        _keep(root, path)
    for source, target in plan.files:
        kernel.mount(source, str(_inside(root, target)), flags=kernel.MS_BIND)
    os.chdir(root)
    kernel.pivot_root_here()
    kernel.mount(None, "/", flags=kernel.MS_PRIVATE)


def _bind_base(root: Path, base: Path) -> None:
    for entry in base.iterdir():
        target = root / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in _OWN:
            source = Path("/") / entry.name if entry.name in _FROM_HOST else entry
            target.mkdir()
            kernel.mount(str(source), str(target), flags=kernel.MS_BIND | kernel.MS_REC)


def _mount_tmpfs(root: Path, path: str, mode: str, size_mib: int) -> None:
    target = _inside(root, path)
    target.mkdir(parents=True, exist_ok=True)
    kernel.mount("tmpfs", str(target), "tmpfs", data=f"mode={mode},size={size_mib}m")


def _keep(root: Path, path: str) -> None:
    target = _inside(root, path)
    if target.exists() and target.samefile(path):
        return
    if Path(path).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    kernel.mount(path, str(target), flags=kernel.MS_BIND | kernel.MS_REC)


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
