"""Installs what is missing: Slurm and its tools, the unprivileged user, and the newer Slurm's base system."""

from __future__ import annotations

import os
import platform
import pwd
import re
import shutil
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.processes import run
from testcluster.settings import BASES, SLURM_SYSTEM, SUITE_OF, USER

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGE_OF = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "squeue": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
}
# The part of MariaDB's packages without a service that would start.
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
DATABASE_USER = "nobody"
_INSTALL_DEADLINE_S = 900.0
_DATABASE_DEADLINE_S = 120.0
# debootstrap may be older than a suite, which is then made as the one that is always there.
_DEBOOTSTRAP_SCRIPTS = Path("/usr/share/debootstrap/scripts")
_MIRROR = "http://deb.debian.org/debian"
# The daemons, then the libraries that a host Python with torch loads.
_PACKAGES = (
    "slurmctld,slurmd,slurm-client,munge,procps,iproute2,"
    "libffi8,libssl3t64,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8t64,zlib1g,libncursesw6,libuuid1,"
    "libgdbm6t64,libgomp1,libstdc++6,libexpat1"
)
_COMPLETE = ".jurymast-complete"


def require_root_linux() -> None:
    """Fail clearly where no cluster can be built."""
    if platform.system() != "Linux":
        raise ClusterError("the test cluster needs Linux (network and process namespaces)")
    if os.geteuid() != 0:
        raise ClusterError("the test cluster needs root (namespaces, mounts, slurmd): run it with sudo")


def ensure_packages(slurm: str, *, accounting: bool = False) -> None:
    """Install the missing programs with apt; ClusterError names them where that cannot be done."""
    if accounting and slurm != SLURM_SYSTEM:
        raise ClusterError(f"accounting works only with the system's own Slurm, not with {slurm}")
    wanted = _PACKAGE_OF if slurm == SLURM_SYSTEM else {"ip": "iproute2", "tc": "iproute2", "munged": "munge"}
    if accounting:
        wanted = {**wanted, **_ACCOUNTING}
    missing = sorted({package for program, package in wanted.items() if _find(program) is None})
    if missing:
        _apt_install(missing)
        still = sorted(program for program in wanted if _find(program) is None)
        if still:
            raise ClusterError(f"still missing after apt-get install: {', '.join(still)}")


def install_prometheus() -> None:
    """Install Prometheus and its node exporter, if they are missing, as programs: their services stay off.
    ClusterError tells why that cannot be done."""
    packages = ["prometheus", "prometheus-node-exporter"]
    if missing := [package for package in packages if _find(package) is None]:
        systemctl = _find("systemctl")
        if systemctl is not None:  # --root: also where no systemd runs
            run([systemctl, "--root=/", "mask", *missing])
        _apt_install(missing)
        if systemctl is not None:
            run([systemctl, "--root=/", "disable", *missing])
            run([systemctl, "--root=/", "unmask", *missing])


def ensure_user() -> pwd.struct_passwd:
    """The unprivileged user who runs the jobs; made when missing."""
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        run(["useradd", "--no-create-home", "--user-group", "--shell", "/bin/bash", USER])
        return pwd.getpwnam(USER)


def make_database(place: Path) -> None:
    """Make an empty database, whose administrator is root, for a server that runs as `DATABASE_USER`."""
    owner = pwd.getpwnam(DATABASE_USER)
    place.mkdir(mode=0o700)
    os.chown(place, owner.pw_uid, owner.pw_gid)
    options = [f"--user={DATABASE_USER}", f"--datadir={place}", "--skip-test-db"]
    options.append("--auth-root-authentication-method=socket")
    run(["mariadb-install-db", "--no-defaults", *options], timeout_s=_DATABASE_DEADLINE_S)


def remove_user() -> None:
    """Undo ``ensure_user``."""
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return
    run(["userdel", USER])


def ensure_base(slurm: str) -> Path:
    """The base system of the machines: the host's own, or a Debian with the newer Slurm (made once)."""
    if slurm == SLURM_SYSTEM:
        return Path("/")
    suite = SUITE_OF[slurm]
    return debian(suite, BASES / suite, _PACKAGES)


def debian(suite: str, place: Path, packages: str) -> Path:
    """A base system of Debian's `suite` with `packages` (comma-separated) at `place`; made once, which takes
    minutes."""
    if (place / _COMPLETE).exists():
        return place
    if _find("debootstrap") is None:
        _apt_install(["debootstrap"])
    partial = place.with_name(f"{place.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    options = ["--variant=minbase", f"--include={packages}"]
    script = [] if (_DEBOOTSTRAP_SCRIPTS / suite).exists() else [str(_DEBOOTSTRAP_SCRIPTS / "sid")]
    run(["debootstrap", *options, suite, str(partial), _MIRROR, *script], timeout_s=_INSTALL_DEADLINE_S)
    (partial / "etc" / "hosts").touch()
    (partial / _COMPLETE).touch()
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    return place


def slurm_release(base: Path) -> tuple[int, ...]:
    """Release of the base system's Slurm, such as (22, 5, 8)."""
    inside = [] if base == Path("/") else ["chroot", str(base)]
    text = run(["env", f"PATH={_PATH}", *inside, "slurmd", "-V"]).strip()
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if numbers is None:
        raise ClusterError(f"slurmd -V says {text!r}, which names no release")
    return tuple(int(number) for number in numbers.groups())


def _find(program: str) -> str | None:
    return shutil.which(program, path=_PATH)


def _apt_install(packages: list[str]) -> None:
    apt = _find("apt-get")
    if apt is None:
        raise ClusterError(f"missing, and there is no apt-get to install it with: {', '.join(packages)}")
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", apt]
    command = [*quiet, "install", "--yes", "--no-install-recommends", *packages]
    try:
        run(command, timeout_s=_INSTALL_DEADLINE_S)
    except ClusterError:
        # A fresh image has no package lists.
        run([*quiet, "update"], timeout_s=_INSTALL_DEADLINE_S)
        run(command, timeout_s=_INSTALL_DEADLINE_S)
