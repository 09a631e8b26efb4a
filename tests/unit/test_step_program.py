"""Where a step's program is, as srun finds it, and which text scontrol writes of a script."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jurymast.rundir import RunDirectory
from jurymast.script import shims
from jurymast.script.recognise import is_missing, with_its_path
from jurymast.script.srun import parse


@pytest.mark.parametrize(
    ("typed", "path", "missing"),
    [
        ("./launch.sh x", "{here}/./launch.sh", False),
        ("launch.sh x", "{here}/launch.sh", False),
        ("-D sub ls x", "{here}/sub/ls", False),
        ("ls x", shutil.which("ls"), False),
        ("sub/data x", "sub/data", True),
        ("python0.1 x", "python0.1", True),
        ("--container-image=i python0.1 x", "python0.1", False),
    ],
)
def test_a_steps_program_has_its_whole_path_as_srun_gives_it(
    typed: str, path: str, missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for name, mode in (("launch.sh", 0o755), ("sub/ls", 0o755), ("sub/data", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    srun = parse(typed.split())
    assert srun is not None
    assert with_its_path(srun).command == [path.format(here=tmp_path), "x"]
    assert is_missing(srun) is missing


WRITES = """#!/bin/sh
case "$4" in -) cat {stored}; echo ;; *) cat {stored} > "${{4:-slurm-$3.sh}}"; echo "written to $4" ;; esac
exit $((${{3%%_*}} > 90))
"""


@pytest.mark.parametrize("to", ["-", "a copy", ""])
@pytest.mark.parametrize(
    ("number", "stored"), [("7", "ours"), ("7_2", "ours"), ("8", "another's"), ("99", "ours")]
)
def test_a_script_keeps_a_copy_of_itself(number: str, stored: str, to: str, tmp_path: Path) -> None:
    """`scontrol write batch_script`: the real one has the file that was submitted; of another job, its own.
    99 is a job of which it knows nothing."""
    job, users = RunDirectory(tmp_path / 'a run\'s "$so}" [a-z] *'), "#!/bin/bash\necho \\n $(mine)\n\n"
    texts = {"ours": "#!/bin/sh\nexec jurymast\n", "another's": "#!/bin/sh\nanother\n"}
    (tmp_path / "stored").write_text(texts[stored])
    (tmp_path / "job.sh").write_text(texts["ours"])
    (tmp_path / "users").write_text(users)
    shims.write(job, sys.executable, str(tmp_path / "job.sh"), "x", str(tmp_path / "users"))
    (tmp_path / "real").mkdir()
    shims.write_program(
        tmp_path / "real" / "scontrol", WRITES.format(stored=shlex.quote(str(tmp_path / "stored")))
    )
    done = subprocess.run(
        [shims.folder(job) / "scontrol", "write", "batch_script", number, *filter(None, [to])],
        text=True, capture_output=True, check=False, timeout=30, cwd=tmp_path,
        env={"PATH": f"{shims.folder(job)}:{tmp_path / 'real'}:/usr/bin:/bin"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (int(number == "99"), "")
    told = done.stdout if to == "-" else (tmp_path / (to or f"slurm-{number}.sh")).read_text()
    assert told.rstrip("\n") == (
        users if (stored, number != "99") == ("ours", True) else texts[stored]
    ).rstrip("\n")
