"""Small trees of files as the kernel shows them under /sys, each kept as one text file."""

from __future__ import annotations

import shutil
from pathlib import Path

TREES = Path(__file__).resolve().parents[1] / "data" / "sysfs"


class Sysfs:
    """One tree, unpacked below `root`; paths are below that. What a glob matches can be changed together."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        for line in (TREES / f"{name}.tree").read_text().splitlines():
            if line.startswith("#"):
                continue
            path, link, target = line.partition(" -> ")
            if not link:
                path, _, target = line.partition(" = ")
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if link:
                (root / path).symlink_to(target)
            else:
                self.set(path, target.replace("\\n", "\n"))

    def set(self, path: str, text: str) -> None:
        """Whole at once, as a driver would."""
        partial = self.root / f"{path}.partial"
        partial.write_text(f"{text}\n")
        partial.rename(self.root / path)

    def remove(self, path: str) -> None:
        """A file, a link, or a directory with all below it."""
        found = self.root / path
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()
