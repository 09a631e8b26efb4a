"""The version, for the build: from git's tags (`v0.1.0`), or as the source distribution has it.

Commits behind a tag make a development version of the next one: 0.1.1.dev5+g1a2b3c4. A clone without tags,
like a shallow one, is of no release: 0.1.dev0+g1a2b3c4.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
NONE = "0.1.dev0"


def version() -> str:
    told = HERE / "PKG-INFO"  # of a source distribution
    if told.exists():
        found = re.search(r"^Version: (\S+)$", told.read_text(), re.MULTILINE)
        return found[1] if found else NONE
    return of_git(
        _git("describe", "--tags", "--long", "--match", "v[0-9]*"), _git("rev-parse", "--short", "HEAD")
    )


def of_git(described: str, commit: str) -> str:
    """`described`: v0.1.0-5-g1a2b3c4; both are empty where git knows nothing."""
    match = re.fullmatch(r"v(\d+(?:\.\d+)*)-(\d+)-g\w+", described)
    if match is None:
        return f"{NONE}+g{commit}" if commit else NONE
    release, since = match[1], int(match[2])
    if not since:
        return release
    *first, last = release.split(".")
    return f"{'.'.join([*first, str(int(last) + 1)])}.dev{since}+g{commit}"


def _git(*words: str) -> str:
    """What it prints; "" when this is no clone of ours, or git is missing."""
    if not (HERE / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
