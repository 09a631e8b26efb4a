"""What the test cluster's unprivileged user finds of this repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from testcluster.visibility import compile_for_all


def test_jobs_of_a_user_who_cannot_write_here_find_the_package_compiled(tmp_path: Path) -> None:
    """Each of their processes would compile it anew, which doubles the time that an agent takes to start."""
    (tmp_path / "module.py").write_text("NUMBER = 1\n")
    before = os.umask(0o077)
    try:
        compile_for_all(Path(sys.executable), tmp_path)
    finally:
        os.umask(before)
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    assert compiled.name.startswith("module.")
    assert (compiled.stat().st_mode & 0o777, compiled.parent.stat().st_mode & 0o777) == (0o644, 0o755)
