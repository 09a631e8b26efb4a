"""What we publish, built and installed as anybody would."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from support.runs import ROOT


def checkout(folder: Path) -> Path:
    """A copy of this checkout, with everything that git would keep."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def installed(folder: Path) -> Path:
    """The Python of a new environment with the wheel that the source distribution makes. What jurymast needs
    besides comes from this environment; jurymast itself does not."""
    made = checkout(folder / "checkout")
    tools = f"BIN={Path(sys.executable).parent}"
    package = ["make", "--assume-old=install", "package", tools]
    subprocess.run(package, cwd=made, check=True, capture_output=True, timeout=240)
    (source,) = (made / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=unpacked, check=True, capture_output=True, timeout=120)
    (wheel,) = (folder / "dist").glob("*.whl")
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


def wheel(folder: Path, version: str) -> Path:
    """The wheel of this checkout, as of this version."""
    made = checkout(folder / "checkout")
    (made / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: jurymast\nVersion: {version}\n")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=made, check=True, capture_output=True, timeout=240)
    (found,) = (folder / "dist").glob("*.whl")
    return found
