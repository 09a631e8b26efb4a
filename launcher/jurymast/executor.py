"""submitit's executor `jurymast`, by which everything is submitted: `submitit.AutoExecutor(folder,
cluster="jurymast")` for functions, `jurymast submit` for scripts, and `jurymast.submit` for both.

A function is a run like any other, whose script is `worker.function`. Its ranks are as tasks of srun's that
may be independent: one that fails does not end the others, and is not run again, until one of them makes a
process group.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from submitit import AutoExecutor, SlurmExecutor
from submitit.core import core, logger
from submitit.core.utils import DelayedSubmission, JobPaths, UncompletedJobError, pickle_load

from jurymast import foreign
from jurymast.cluster import slurm
from jurymast.cluster.allocation import task_directory
from jurymast.cluster.planning import FUNCTION, OwnOptions
from jurymast.cluster.request import check_request, make_request
from jurymast.cluster.sbatch import find_script, merged, split_command_line
from jurymast.cluster.slurm import Request, Submitted
from jurymast.cluster.submitter import policy_for, submitter_of
from jurymast.errors import JurymastError, UsageError
from jurymast.jobs import run_command
from jurymast.report.asking import ask_supervisor
from jurymast.report.cancelling import cancel
from jurymast.report.liveness import Liveness, keeps_nodes_for, look, slurm_state
from jurymast.report.status import StatusWatcher, public_state
from jurymast.rundir import RunDirectory, default_runs, renew

R = TypeVar("R", covariant=True)
# Slurm's word for a run's state; any other is RUNNING.
STATES = {
    "queued": "PENDING", "requeued": "REQUEUED", "succeeded": "COMPLETED", "failed": "FAILED",
    "cancelled": "CANCELLED",
}  # fmt: skip
ENDED = ("COMPLETED", "FAILED", "CANCELLED")
# Slurm is asked of a job that does not run so often, at first and later.
LOOK_S, LOOK_MAX_S = 2.0, 60.0
# A function that keeps its state is told so long before its time limit, unless `signal_delay_s` says it.
WARNED_S = 120.0


class JurymastJob(core.Job[R]):
    """A submitted function. `run`: its run directory, to which a link in the executor's folder leads. The job
    is done when the run has ended, and its last checkpoint is on storage: a result before the end may be
    computed anew after a failure."""

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._forget()

    def _forget(self) -> None:
        self._watcher: StatusWatcher | None = None
        self._life, self._look_at, self._look_s = Liveness("unknown"), 0.0, LOOK_S

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(foreign.behind_made_link(link_to_run(self.paths)))

    def _seen(self, mode: str) -> tuple[str, str]:
        """The run's state and the reason for it."""
        run, due = self.run, mode == "force" or time.monotonic() >= self._look_at
        if due:
            self._look_at = time.monotonic() + self._look_s
            self._look_s = min(2 * self._look_s, LOOK_MAX_S)
        if self._watcher is None and not run.plan_file.exists():  # a task of an array that has not started
            self._life = slurm_state(self.job_id) if due else self._life
            return ("cancelled", self._life.detail) if self._life.kind == "gone" else ("queued", "")
        self._watcher = self._watcher or StatusWatcher(run)
        self._watcher.poll()
        if due or self._watcher.state.ended:
            self._life = look(run, self._watcher.state)
        return public_state(self._watcher.state, self._life)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """The state in Slurm's words, the reason for it, and the run directory."""
        word, why = self._seen(mode)
        return {"State": STATES.get(word, "RUNNING"), "Reason": why, "Run": str(self.run.root)}

    @property
    def state(self) -> str:
        return self.get_info("standard")["State"]

    def done(self, force_check: bool = False) -> bool:
        if self.get_info("force" if force_check else "standard")["State"] not in ENDED:
            return False
        return self._watcher is None or not keeps_nodes_for(self.run, self._watcher.state)

    def status(self) -> dict[str, Any]:
        """What `jurymast status --json` prints."""
        from jurymast.report.status import read_status

        return read_status(self.run).view()

    def submission(self) -> DelayedSubmission:
        found: DelayedSubmission = unpickled(self.paths.submitted_pickle)
        return found

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        end = time.monotonic() + self._results_timeout_s  # as submitit: storage may show it later
        while True:
            late = time.monotonic() > end
            try:
                descriptor = foreign.open_own(self.paths.result_pickle, closed=0)
            except FileNotFoundError:
                if late:
                    break
            else:
                try:
                    found: tuple[str, Any] = loaded(descriptor)
                    return found
                except EOFError:
                    if late:
                        raise
            renew(self.paths.folder)
            time.sleep(min(1.0, self._results_timeout_s))
        word, why = self._seen("force")
        told = [line for text in (self.stderr(), self.stdout()) for line in (text or "").splitlines()[-40:]]
        raise UncompletedJobError(
            f"job {self.job_id} (task {self.task_id}) has left no result in {self.paths.result_pickle} "
            f"(state: {self.state}); it wrote:\n" + "\n".join([*told, f"The run {word}: {why}"])
        )

    def _get_logs_string(self, name: str) -> str | None:
        try:
            return _text(getattr(self.paths, name))
        except FileNotFoundError:
            return None

    def _interrupt(self, timeout: bool = False) -> None:
        """submitit's test of what a function keeps: as if Slurm preempted the job, or if its time were up.
        Raises JurymastError if the run is not running."""
        ask_supervisor(self.run, "timeout" if timeout else "requeue")

    def cancel(self, check: bool = True) -> None:
        """End the run for good. `check`: raise what goes wrong."""
        try:
            if self.run.plan_file.exists():
                cancel(self.run, foreign.user_name(os.geteuid()))
            else:
                run_command(["scancel", self.job_id])
        except JurymastError:
            if check:
                raise

    def __del__(self) -> None:
        if self.__dict__.get("_cancel_at_deletion") and not self.done():
            self.cancel(check=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watcher": None}


class ScriptJob(JurymastJob[int]):
    """A submitted script. Its result is 0: the exit code of a run that succeeded."""

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self.submitted: Submitted

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.paths.folder.parent)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        word, why = self._seen("force")
        return ("success", 0) if word == "succeeded" else ("error", f"the run {word}: {why}")

    def stdout(self) -> str | None:
        """What the ranks printed in the newest attempt; None if none has begun."""
        self._seen("cache")
        attempt = self._watcher.state.attempt if self._watcher is not None else 0
        logs = self.run.rank_logs(attempt)
        return "".join(map(_text, logs)) if logs else None

    def stderr(self) -> str | None:
        """None: a log has both."""
        return None


class JurymastExecutor(core.Executor):
    """Submits functions with spares, restarts and a report. `folder`: as of every executor of submitit's. The
    other parameters can be given to `update_parameters` as well: those of `SlurmExecutor`, and `OWN`."""

    job_class = JurymastJob
    # cluster: slurm or local. policy: a file. spares: a number, or auto. runs: where run directories are.
    OWN = frozenset({"cluster", "policy", "runs", "spares"})
    # What a script of submitit's may say of the batch script, which is ours.
    REFUSED = frozenset({"srun_args"})

    def __init__(
        self, folder: Path | str, max_num_timeout: int = 3, python: str | None = None, **parameters: Any
    ) -> None:
        super().__init__(folder)
        self.max_num_timeout, self.python = max_num_timeout, python or sys.executable
        self.update_parameters(**parameters)

    @classmethod
    def affinity(cls) -> int:
        """Available, but never chosen unless it is named."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return SlurmExecutor._equivalence_dict()

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        # AutoExecutor takes one without a prefix for the last executor's that has it, so none of Slurm's may
        # stand here.
        return {*cls.OWN, SLURMS}

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        gigabytes, found = params.get("mem_gb"), super()._convert_parameters(params)
        return found if gigabytes is None else {**found, "mem": f"{int(gigabytes * 1024)}M"}

    def _internal_update_parameters(self, **given: Any) -> None:
        given |= given.pop(SLURMS, {})
        given = self._convert_parameters(given)
        valid = {*SlurmExecutor._valid_parameters(), *self.OWN} - self.REFUSED
        if unknown := sorted({*given} - valid):
            names = ", ".join(sorted(valid))
            raise ValueError(f"unavailable parameters: {', '.join(unknown)}; valid are {names}")
        super()._internal_update_parameters(**given)

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """Submit functions: several as the tasks of one array, or on the local cluster as runs."""
        local = self.parameters.get("cluster") == "local"
        alone = local or len(delayed_submissions) == 1
        groups = [[one] for one in delayed_submissions] if alone else [[*delayed_submissions]]
        return [job for group in groups for job in self._submit_group(group)]

    def _submit_group(self, group: list[DelayedSubmission]) -> list[core.Job[Any]]:
        place = JobPaths.get_first_id_independent_folder(self.folder)
        place.mkdir(parents=True, exist_ok=True)
        pickles = [place / f"{uuid.uuid4().hex}.pkl" for _ in group]
        for delayed, pickle in zip(group, pickles, strict=True):
            delayed.set_timeout(self.parameters.get("time", 0), self.max_num_timeout)
            delayed.dump(pickle)
            pickle.chmod(0o600)
        try:
            words = ["-m", FUNCTION, str(self.folder)]
            request = self._request(words, _name(group[0]), len(group), self._limits(group))
            submitted = slurm.submit(request)
        except BaseException:
            for pickle in pickles:
                pickle.unlink()
            raise
        root, plan = Path(request.plan.directory), request.plan
        several = len(group) > 1
        jobs: list[core.Job[Any]] = []
        for number, pickle in enumerate(pickles):
            job_id = f"{submitted.job}_{number}" if several else submitted.job
            paths = JobPaths(self.folder, job_id)
            paths.move_temporary_file(pickle, "submitted_pickle")
            link_to_run(paths).symlink_to(task_directory(root, number) if several else root)
            jobs.append(self.job_class(self.folder, job_id, range(plan.active * plan.ranks_per_node)))
        return jobs

    def _limits(self, group: list[DelayedSubmission]) -> dict[str, Any]:
        """What the plan says of functions' time limit."""
        keep = all(hasattr(delayed.function, "checkpoint") for delayed in group)
        delay_s = self.parameters.get("signal_delay_s") or WARNED_S
        return {"timeouts": self.max_num_timeout, "keeps_s": float(delay_s)} if keep else {}

    def submit_script(self, script: Path | str, arguments: Sequence[str] = ()) -> ScriptJob:
        """Submit a training script (or `-m`, and a module and its arguments), as `jurymast submit` does."""
        return self.send(self._request([str(script), *map(str, arguments)], "", 1))

    def send(self, request: Request) -> ScriptJob:
        """Submit what was asked for in `jurymast submit`'s way."""
        submitted = slurm.submit(request)
        job = ScriptJob(request.run_directory.submission, submitted.job)
        job.submitted = submitted
        return job

    def _request(
        self, words: list[str], name: str, tasks: int, limits: Mapping[str, Any] | None = None
    ) -> Request:
        """The request for a function's runner or a script, with this name unless the parameters give one.
        `limits`: more of the plan."""
        own = self.parameters
        ranks, function = max(1, own.get("ntasks_per_node") or 1), words[:2] == ["-m", FUNCTION]
        cluster = own.get("cluster", "slurm")
        asked = OwnOptions(
            nodes=own.get("nodes"), nproc_per_node=own.get("ntasks_per_node") or (1 if function else None),
            name=own.get("job_name") or name, cluster=cluster,
            runs=Path(own["runs"]).expanduser().absolute() if own.get("runs") else default_runs(),
        )  # fmt: skip
        options = [*_sbatch_options(own, ranks)]
        if tasks > 1:
            options.append(f"--array=0-{tasks - 1}%{min(tasks, own.get('array_parallelism', 256))}")
        line = split_command_line([*options, "--", *words], {})
        how: dict[str, Any] = {}
        if function:
            apart = not own.get("stderr_to_stdout")
            how = {"tasks": cluster == "slurm", "guessed": True, "stderr_apart": apart, **(limits or {})}
        file = Path(own["policy"]) if own.get("policy") else None
        told = merged(None, os.environ, line)
        policy, unknown = policy_for(submitter_of(told, cluster), file, own.get("spares"))
        request, notes = make_request(
            asked, line, policy, python=self.python, how=how, setup=own.get("setup") or ()
        )
        for note in [*unknown, *policy.contradictions, *notes]:
            logger.get_logger().info(note)
        check_request(request, told)
        after = own.get("teardown") or ()
        return replace(request, teardown="".join(f"{line}\n" for line in after)) if after else request


SLURMS = "sbatch"  # a mapping of all parameters of `slurm_*`
# Not passed on: they are done in another way, or have no meaning here.
DONE = JurymastExecutor.OWN | {
    "additional_parameters", "array_parallelism", "cpus_per_task", "gpus_per_task", "job_name", "nodes",
    "ntasks_per_node", "num_gpus", "setup", "signal_delay_s", "stderr_to_stdout", "teardown", "use_srun",
}  # fmt: skip


def _sbatch_options(parameters: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """sbatch's options for parameters of `SlurmExecutor`. To Slurm, the `ranks` ranks of a node are one
    task."""
    values = {name: value for name, value in parameters.items() if name not in DONE}
    if cpus := parameters.get("cpus_per_task"):
        values["cpus_per_task"] = cpus * ranks
    if gpus := parameters.get("gpus_per_task"):
        values["gpus_per_node"] = int(gpus) * ranks
    if gpus := parameters.get("num_gpus"):
        values["gpus_per_node"] = gpus
    if delay_s := parameters.get("signal_delay_s"):
        values["signal"] = f"B:USR2@{int(delay_s)}"
    values |= parameters.get("additional_parameters") or {}
    for name, value in values.items():
        if value is not None and value is not False:
            yield f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")


def unpickled(path: Path) -> Any:
    """What this user has pickled. To read another user's would run that user's code, so the file that is read
    is the very one that was looked at. Raises foreign.NotOurs, OSError."""
    return loaded(foreign.open_own(path, closed=0))


def loaded(descriptor: int) -> Any:
    """Unpickle what is open, and close it."""
    try:
        return pickle_load(f"{foreign.HELD}{descriptor}")
    finally:
        os.close(descriptor)


def _text(log: Path) -> str:
    with foreign.reading(log) as file:
        return file.read().decode(errors="replace")


def _name(delayed: DelayedSubmission) -> str:
    return getattr(delayed.function, "__name__", type(delayed.function).__name__)


def link_to_run(paths: JobPaths) -> Path:
    return paths.folder / f"{paths.job_id}_run"


def _init(self: AutoExecutor, folder: Path | str, cluster: str | None = None, **given: Any) -> None:
    """AutoExecutor drops what has another executor's prefix; here `slurm_` means what it means to
    SlurmExecutor, so that a script needs no other change than the name of the cluster."""
    if cluster == JurymastExecutor.name():
        if "max_num_timeout" in given:  # submitit's older name
            given.setdefault("slurm_max_num_timeout", given.pop("max_num_timeout"))
        slurms = {
            f"{cluster}_{name[6:]}": value for name, value in given.items() if name.startswith("slurm_")
        }
        given = {**slurms, **given}
    _INIT(self, folder, cluster, **given)


def _update_parameters(self: AutoExecutor, **given: Any) -> None:
    """The same for parameters."""
    if self.cluster == JurymastExecutor.name():
        slurms = {name[6:]: value for name, value in given.items() if name.startswith("slurm_")}
        given[f"{self.cluster}_{SLURMS}"] = slurms
    super(AutoExecutor, self).update_parameters(**given)


_INIT = AutoExecutor.__init__
AutoExecutor.__init__ = _init  # type: ignore[method-assign]
AutoExecutor.update_parameters = _update_parameters  # type: ignore[assignment, method-assign]


def submit(what: Callable[..., Any] | Path | str, arguments: Sequence[Any] = (), **how: Any) -> Any:
    """Submit a training script with its arguments, or a function; returns its job. `how`: parameters of the
    executor, like `nodes`, `tasks_per_node`, `time`, `spares` and `policy`; `folder`: where the results of
    functions are kept (the runs directory)."""
    folder = how.pop("folder", None) or how.get("runs") or default_runs()
    executor = JurymastExecutor(folder, **how)
    if callable(what):
        return executor.submit(what, *arguments)
    if find_script([str(what)], Path.cwd()) is not None:
        line = shlex.join(["jurymast", "submit", str(what), *map(str, arguments)])
        raise UsageError(f"{what} is a batch script; submit it with: {line}", hint=line)
    return executor.submit_script(what, arguments)
