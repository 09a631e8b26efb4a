"""Linux calls that the standard library lacks (Python 3.10), through libc."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from pathlib import Path

MS_BIND = 4096
MS_REC = 16384
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# System calls that an older libc has no function for; the same numbers on all architectures.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ = "16sh22x"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def mount(source: str | None, target: str, fstype: str | None = None, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        _encoded(source), target.encode(), _encoded(fstype), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {source or fstype} on {target}")


def clone_mount(path: str) -> int:
    """A descriptor of another mount of what is mounted at `path`, which is nowhere yet: open_tree(2)."""
    descriptor: int = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    if descriptor < 0:
        _check(descriptor, f"open_tree of {path}")
    return descriptor


def attach_mount(descriptor: int, target: str) -> None:
    """Mount it at `target`, also in another mount namespace than where it was cloned: move_mount(2)."""
    result = _libc.syscall(
        _SYS_MOVE_MOUNT, descriptor, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH
    )
    _check(result, f"move_mount to {target}")


def pivot_root_here() -> None:
    """Make the current directory (a mount point) the root, and let go of the old root."""
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """setns(2); a pidfd takes several namespaces at once (Linux 5.8)."""
    _check(_libc.setns(fd, flags), "setns")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent dies."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def socket_in_netns(netns: Path) -> socket.socket:
    """A socket that belongs to another network namespace: for interface ioctls there, without a process."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def work() -> None:
        # setns moves only the calling thread, so the caller stays in its own namespace.
        try:
            fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
            try:
                setns(fd, CLONE_NEWNET)
                made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            finally:
                os.close(fd)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def link_is_up(control: socket.socket, interface: str) -> bool:
    """Whether the interface is administratively up."""
    return bool(_link_flags(control, interface) & _IFF_UP)


def set_link(control: socket.socket, interface: str, *, up: bool) -> None:
    """Set an interface up or down: one system call, for a fault must act at once."""
    flags = _link_flags(control, interface)
    wanted = flags | _IFF_UP if up else flags & ~_IFF_UP
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_IFREQ, interface.encode(), wanted))


def _link_flags(control: socket.socket, interface: str) -> int:
    answer = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack(_IFREQ, interface.encode(), 0))
    flags: int = struct.unpack(_IFREQ, answer)[1]
    return flags
