"""Which run somebody means by its id, the beginning of it, or the name in it, by `last`, a Slurm job id, or a
directory."""

from __future__ import annotations

import re
from pathlib import Path

from jurymast import foreign
from jurymast.core.state.texts import nearest, some
from jurymast.errors import RunDirectoryError, RunNotFoundError
from jurymast.rundir import RunDirectory, check_readable, default_runs, run_names

_ID = re.compile(r"\d+-\d+-(.+)-([^-]+)")
LAST = "last"  # the newest run, as RUN
RUNS_TOLD = 4


def run_ids(runs: Path) -> list[str]:
    """The ids of this user's runs below `runs`, newest first."""
    return [name for name in _all_ids(runs) if foreign.owns(runs / name)]


def _all_ids(runs: Path) -> list[str]:
    """The ids of all users' runs that this user may read."""
    try:
        names = run_names(runs)
    except OSError:
        return []
    return sorted((name for name in names if foreign.exists(runs / name / "plan.json")), reverse=True)


def find_run(text: str, runs: Path | None = None) -> RunDirectory:
    """The run that `text` names: by its whole id, or else by the beginning of one id among this user's runs,
    by the name or the letters that only one has in it, or as `last`, the newest. Raises RunNotFoundError,
    which names similar runs, and RunDirectoryError for a directory of that name that is not a run of this
    user."""
    runs = default_runs() if runs is None else runs
    text = text.rstrip("/") or text  # a shell completes the name of a directory with a slash
    places = [foreign.behind_own_link(Path(text).expanduser().absolute())] if text else []
    if "/" not in text and text not in ("", ".", ".."):
        places.insert(0, foreign.behind_own_link(runs / text))
        job, _, _cluster = text.partition(";")  # as `submit --parsable` prints it
        if job.isdigit() or job.startswith("local-"):
            # Slurm's job ids start again some day; the newest run with this job is meant, whatever else
            # somebody has given this name.
            names = dict.fromkeys((*run_ids(runs), *_all_ids(runs)))
            jobs = (runs / name / "slurm" / "jobs" / job for name in names)
            places = [job.parents[2] for job in jobs if foreign.exists(job)][:1] + places
    # Any user may use this name, or claim this job: this user's own runs come first.
    for place in sorted(places, key=lambda place: not foreign.owns(place)):
        if foreign.exists(place / "plan.json"):
            return RunDirectory(place)
    if "/" not in text and text and not foreign.is_directory(runs / text):
        ids = run_ids(runs)
        begin = ids[:1] if text == LAST else [name for name in ids if name.startswith(text)]
        meant = begin or [name for name in ids if text in _parts(name)]
        if len(meant) == 1:
            return RunDirectory(runs / meant[0])
        if meant:
            what = "begins the ids" if begin else "is in the ids"
            raise RunNotFoundError(
                f"{text} {what} of {len(meant)} runs: {some(meant, RUNS_TOLD)}", hint="give more of the id"
            )
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


def _parts(run: str) -> tuple[str, ...]:
    """The name in a run's id, and the letters after it: `gpt` and `k3f9` of 20261117-100000-gpt-k3f9."""
    found = _ID.fullmatch(run)
    return found.groups() if found else ()


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
