"""Finds the directory of the RUN on the command line: a run id, a Slurm job id or a run directory."""

from __future__ import annotations

import os
from pathlib import Path

from jurymast import foreign
from jurymast.core.texts import nearest
from jurymast.errors import RunDirectoryError, RunNotFoundError
from jurymast.rundir import RunDirectory, check_readable


def default_runs() -> Path:
    """The directory of runs: $JURYMAST_RUNS, or `runs` in the working directory."""
    return Path(os.environ.get("JURYMAST_RUNS") or "runs").absolute()


def run_ids(runs: Path) -> list[str]:
    """The ids of this user's runs below `runs`, newest first."""
    return [name for name in _all_ids(runs) if foreign.owns(runs / name)]


def _all_ids(runs: Path) -> list[str]:
    """The ids of all users' runs that this user may read."""
    try:
        names = [name for name in foreign.names(runs) if not name.startswith(".")]
    except OSError:
        return []
    return sorted((name for name in names if foreign.exists(runs / name / "plan.json")), reverse=True)


def find_run(text: str, runs: Path | None = None) -> RunDirectory:
    """The run that `text` names. Raises RunNotFoundError, which names similar runs, and RunDirectoryError for
    a directory of that name that is not a run of this user."""
    runs = default_runs() if runs is None else runs
    text = text.rstrip("/") or text  # a shell completes the name of a directory with a slash
    places = [Path(text).expanduser().absolute()] if text else []
    if "/" not in text and text not in ("", ".", ".."):
        places.insert(0, runs / text)
        job, _, _cluster = text.partition(";")  # as `submit --parsable` prints it
        if job.isdigit() or job.startswith("local-"):
            # Slurm's job ids start again some day; the newest run with this job is meant.
            names = dict.fromkeys((*run_ids(runs), *_all_ids(runs)))
            jobs = (runs / name / "slurm" / "jobs" / job for name in names)
            places += [job.parents[2] for job in jobs if foreign.exists(job)][:1]
    # Any user may use this name, or claim this job: this user's own runs come first.
    for place in sorted(places, key=lambda place: not foreign.owns(place)):
        if foreign.exists(place / "plan.json"):
            return RunDirectory(place)
    for place in places:
        check_readable(place)
    if places and foreign.is_directory(places[0]):
        if places[0].parent == runs:
            raise RunDirectoryError(
                f"{places[0]} has no plan.json: the run was never submitted, or its directory is damaged",
                hint="if it holds no checkpoints, remove it",
            )
        raise RunNotFoundError(
            f"{places[0]} is not a run directory: it has no plan.json", hint=_hint(text, runs)
        )
    raise RunNotFoundError(f"there is no run {text or '(empty)'} in {runs}", hint=_hint(text, runs))


def _hint(text: str, runs: Path) -> str:
    ids = run_ids(runs)
    if not ids:
        return (
            "it has no runs: name another one with --runs or JURYMAST_RUNS, or give the run's own directory"
        )
    near = [name for name in ids if text and text in name][:3]
    closest = nearest(text, ids)
    near = near or ([closest] if closest else [])
    return f"did you mean {', '.join(near)}?" if near else f"the newest runs are {', '.join(ids[:3])}"
