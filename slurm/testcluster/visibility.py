"""What an unprivileged user must be able to read, and which closed directories are in the way."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.processes import run

_REPOSITORY = Path(__file__).resolve().parents[2]
_PREFIXES = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path]))"
# Comes with a machine's base system; /usr/local does not.
_SYSTEM = (Path("/usr/bin"), Path("/usr/sbin"), Path("/usr/lib"), Path("/bin"), Path("/lib"), Path("/etc"))


def default_python() -> Path:
    """The repository's own virtual environment, else the Python that runs this."""
    own = _REPOSITORY / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def needed_for(python: Path) -> list[Path]:
    """Directories that this Python and the repository live in, outside the base system."""
    if not os.access(python, os.X_OK):
        raise ClusterError(f"{python} is not an executable Python: give another with --python")
    reported = [Path(item) for item in json.loads(run([str(python), "-I", "-c", _PREFIXES]))]
    places = {_REPOSITORY, *(item for item in reported if item.is_absolute() and item.is_dir())}
    hop = python
    while True:
        places.add(hop.parent)
        if not hop.is_symlink():
            break
        hop = Path(os.path.normpath(hop.parent / hop.readlink()))
    outside = {place for place in places if not any(place.is_relative_to(top) for top in _SYSTEM)}
    return outermost(outside - {Path("/usr")})


def compile_for_all(python: Path, package: Path = _REPOSITORY / "launcher") -> None:
    """Have the package's modules compiled, as an installed one's are: jobs of a user who cannot write there
    would compile all of them at each start."""
    work = "import compileall, os, sys; os.umask(0o022); compileall.compile_dir(sys.argv[1], quiet=2)"
    run([str(python), "-I", "-c", work, str(package)], timeout_s=120.0)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """The paths without those that lie in another of them."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return kept


def closed_above(path: Path) -> Path | None:
    """The first directory on the way to the path that others may not enter."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def masks_for(paths: Iterable[Path]) -> list[Path]:
    """Closed directories that hide one of the paths from the user."""
    found = (closed_above(path) for path in paths)
    return outermost(mask for mask in found if mask is not None)


def require_open(path: Path) -> None:
    """Refuse a directory that is itself closed: no mount can open it."""
    mode = path.stat().st_mode
    if not (mode & stat.S_IROTH and mode & stat.S_IXOTH):
        raise ClusterError(f"{path} is closed to other users: chmod o+rx {path}")
