"""Checks an installation for all users of a site, for `jurymast doctor --install`."""

from __future__ import annotations

import importlib.metadata
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from jurymast import foreign
from jurymast.policy.checks import problems_in_force
from jurymast.report.doctor import NO, NOTE, YES, DoctorCheck, Found
from jurymast.report.text import count

DISTRIBUTION = "jurymast"
PAGE = "man/man1/jurymast.1"
COMPLETIONS = {
    "bash": "bash-completion/completions/jurymast", "zsh": "zsh/site-functions/_jurymast",
    "fish": "fish/vendor_completions.d/jurymast.fish",
}  # fmt: skip
READABLE = stat.S_IROTH


def examine_installation(environment: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Check what other users will find: the package and what it needs, its plugins, the policies in force,
    manual pages and completions."""
    yield DoctorCheck("package", *_package())
    yield DoctorCheck("readable by all", *_readable())
    yield DoctorCheck("plugins", *_plugins())
    yield DoctorCheck("site policy", *_policies(environment))
    yield DoctorCheck("manual pages", *_shared(PAGE, "its share/man in MANPATH"))
    for shell, file in COMPLETIONS.items():
        yield DoctorCheck(f"{shell} completion", *_shared(file, "its share in XDG_DATA_DIRS"))


def _package() -> Found:
    """The version, and whether all that it needs is there, without what only extras need."""
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return NO, "not installed as a package: only its files are found", "pip install it"
    missing = []
    for needed in found.requires or ():
        name = re.split(r"[^\w.-]", needed, maxsplit=1)[0]
        if "extra ==" not in needed and not _version(name):
            missing.append(name)
    told = f"{found.version} in {found.locate_file('')}"
    if missing:
        return NO, f"{told}, without {', '.join(missing)}", f"pip install {' '.join(missing)}"
    return YES, told


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


COMPILED = "__pycache__"


def _readable() -> Found:
    """Whether every user can read the package's files, and enter the directories above them. Of what Python
    has compiled nobody needs anything: who cannot read it reads the source."""
    package = Path(__file__).resolve().parents[1]
    above = [one for one in (*package.parents, Path(sys.prefix)) if not _has(one, stat.S_IXOTH)]
    if above:
        return NO, f"only some users can enter {above[-1]}", f"chmod o+x {above[-1]}, or install it elsewhere"
    closed = sorted(
        Path(folder, name)
        for folder, folders, files in os.walk(package)
        for name in (*folders, *files)
        if COMPILED not in (name, Path(folder).name) and not _has(Path(folder, name), READABLE)
    )
    if closed:
        told = f"only some users can read {closed[0]}"
        more = f" and {count(len(closed) - 1, 'more file')}" if len(closed) > 1 else ""
        return NO, told + more, f"chmod -R o+rX {package}, and install with umask 022"
    return YES, str(package)


def _has(path: Path, bit: int) -> bool:
    return bool(foreign.status(path).st_mode & bit)


def _plugins() -> Found:
    """Whether each probe and tracker that a package offers can be loaded. Ours may lack what only an extra
    installs."""
    loaded, extra, broken = list[str](), list[str](), list[str]()
    for group in ("jurymast.probes", "jurymast.trackers"):
        for point in importlib.metadata.entry_points(group=group):
            try:
                point.load()
                loaded.append(point.name)
            except Exception as error:  # others' code
                ours = isinstance(error, ImportError) and point.dist and point.dist.name == DISTRIBUTION
                (extra if ours else broken).append(point.name if ours else f"{point.name} ({error})")
    if broken:
        return NOTE, f"cannot be loaded: {'; '.join(broken)}", "install what they need, or remove them"
    return YES, ", ".join(loaded) + (
        f"; of extras that are not installed: {', '.join(extra)}" if extra else ""
    )


def _policies(environment: Mapping[str, str]) -> Found:
    found = problems_in_force(environment)
    problems = [line for lines in found.values() for line in lines]
    if problems:
        return NO, "; ".join(problems), "jurymast policy check shows them by file"
    if not found:
        return NOTE, "none: the defaults are in force", "a template is share/jurymast/configs/site.yaml"
    return YES, ", ".join(found)


def _shared(file: str, where: str) -> Found:
    """Whether a file of `share` is beside the package: in its environment, or in the prefix it is in."""
    package = Path(__file__).resolve()
    places = [Path(sys.prefix), *package.parents]
    for place in places:
        if foreign.exists(found := place / "share" / file):
            return YES, str(found)
    return NOTE, "not installed", f"install the wheel of make package, with {where}"
