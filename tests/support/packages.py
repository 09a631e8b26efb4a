"""What we publish, built and installed as anybody would."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from support.runs import ROOT


def installed(folder: Path) -> Path:
    """The Python of a new environment with the wheel that the source distribution makes. What jurymast needs
    besides comes from this environment; jurymast itself does not."""
    (source,) = _built("sdist", ROOT, folder / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    (wheel,) = _built("wheel", unpacked, folder / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*pip, "--no-compile", "--disable-pip-version-check", str(wheel)], check=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _built(kind: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    return into
