"""RUN on the command line: a run id, a Slurm job id or a run directory -> the run's directory."""

from __future__ import annotations

import os
from pathlib import Path

from jurymast.core.nearest import nearest
from jurymast.errors import RunNotFoundError
from jurymast.rundir import RunDirectory


def default_runs() -> Path:
    """Where runs are kept: $JURYMAST_RUNS, or `runs` here."""
    return Path(os.environ.get("JURYMAST_RUNS") or "runs").absolute()


def run_ids(runs: Path) -> list[str]:
    """Ids of all runs below `runs`, newest first."""
    try:
        names = [
            entry.name for entry in os.scandir(runs) if entry.is_dir() and not entry.name.startswith(".")
        ]
    except OSError:
        return []
    return sorted((name for name in names if (runs / name / "plan.json").exists()), reverse=True)


def find_run(text: str, runs: Path | None = None) -> RunDirectory:
    """The run that `text` names. Raises RunNotFoundError, which names the nearest runs."""
    runs = default_runs() if runs is None else runs
    if "/" not in text and text not in ("", ".", ".."):
        if (runs / text / "plan.json").exists():
            return RunDirectory(runs / text)
        if text.isdigit() or text.startswith("local-"):
            served = [name for name in run_ids(runs) if (runs / name / "slurm" / "jobs" / text).exists()]
            if served:
                # Slurm starts counting anew one day; the newest run with this job is meant.
                return RunDirectory(runs / served[0])
    directory = Path(text).expanduser().absolute()
    if text and (directory / "plan.json").exists():
        return RunDirectory(directory)
    raise RunNotFoundError(f"there is no run {text or '(empty)'} in {runs}", hint=_hint(text, runs))


def _hint(text: str, runs: Path) -> str:
    ids = run_ids(runs)
    if not ids:
        return "no runs there; runs kept elsewhere are found with JURYMAST_RUNS=DIR, or by their directory"
    near = [name for name in ids if text and text in name][:3]
    closest = nearest(text, ids)
    near = near or ([closest] if closest else [])
    return f"did you mean {', '.join(near)}?" if near else f"the newest runs are {', '.join(ids[:3])}"
