"""What the documents tell people to type works as printed: it runs here, or it is said where it does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.documents import ROOT, commands

# Runs in this test, as it is printed.
HERE = ("jurymast plan ", "jurymast simulate ")
# Needs Slurm, or minutes: a test that does the same, or why there is none.
ELSEWHERE = {
    "make install": "what runs these tests was made by it",
    "make demo": "tests/local/test_demo.py",
    "jurymast submit --nodes ": "tests/slurm/test_documents.py",
    "jurymast submit --spares 2 job.sbatch": "tests/slurm/test_documents.py",
    "jurymast submit job.sbatch": "tests/slurm/test_documents.py",
    "jurymast status RUN": "tests/slurm/test_documents.py",
    "jurymast events RUN": "tests/slurm/test_documents.py",
    "jurymast report RUN": "tests/slurm/test_documents.py",
    "./slurm/cluster ": "tests/slurm/conftest.py",
    "cp -r slurm/site": "tests/local/test_site_pieces.py",
    "python3 -m venv /opt": "only root may write there; tests/unit/test_pins.py",
    "/opt/jurymast/bin/pip": "only root may write there; tests/unit/test_pins.py",
    "install -d": "only root may write there; tests/local/test_site_pieces.py",
    "nft ": "a sketch, as it says",
}


COMMANDS = commands()


def test_it_is_known_of_each_command_where_it_runs() -> None:
    known = (*HERE, *ELSEWHERE)
    assert [told for told in COMMANDS if not told[1].startswith(known)] == []
    assert [start for start in known if not any(c.startswith(start) for _, c in COMMANDS)] == []
    for where in ELSEWHERE.values():
        for path in re.findall(r"tests/\S+\.py", where):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", sorted({c for _, c in COMMANDS if c.startswith(HERE)}))
def test_it_works_in_a_clean_home(command: str, tmp_path: Path) -> None:
    program, *words = shlex.split(command)
    assert program == "jurymast"
    installed = str(Path(sys.executable).with_name("jurymast"))
    clean = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [installed, *words], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in re.findall(r"--html (\S+)", command):
        assert "</html>" in (tmp_path / page).read_text()
