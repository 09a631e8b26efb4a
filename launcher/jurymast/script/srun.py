"""The srun that a batch script finds: a training step goes to the run's agents, any other step unchanged to
the real srun.

To find the command after srun's options, their grammar is needed: the union of the options of srun 22.05 and
24.11 and of the pyxis plugin, and whatever else the real srun's --help has.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from jurymast.cluster import sbatch as sbatch
from jurymast.cluster.sbatch import CommandLine
from jurymast.errors import UsageError
from jurymast.processes import die_with_parent
from jurymast.rundir import RunDirectory
from jurymast.script import others, recognise, release, shims
from jurymast.script.notes import say

if TYPE_CHECKING:
    from jurymast.script.step import Step


REQUIRED = (sbatch.REQUIRED - {"array", "wrap", "export-file", "ignore-pbs"}) | {
    "accel-bind", "bcast-exclude", "cpu-bind", "epilog", "het-group", "jobid", "launch-cmd", "launcher-opts",
    "max-exit-timeout", "max-threads", "mpi", "msg-timeout", "pack-group", "prolog", "relative",
    "slurmd-debug", "task-epilog", "task-prolog", "threads", "treewidth", "wait",
    "container-image", "container-mounts", "container-workdir", "container-name", "container-save",
    "container-env", "cpu_bind",
}  # fmt: skip
# Other names of options, which no --help has.
ALIASES = {"cpu_bind": "cpu-bind"}
OPTIONAL = (sbatch.OPTIONAL - {"get-user-env"}) | {
    "bcast", "compress", "exclusive", "immediate", "kill-on-bad-exit", "send-libs", "x11",
}  # fmt: skip
NONE = (sbatch.NONE - {"parsable", "wait", "ignore-pbs", "no-requeue", "requeue"}) | {
    "debugger-test", "disable-status", "exact", "interactive", "join", "label", "multi-prog", "no-allocate",
    "overlap", "preserve-env", "pty", "quit-on-interrupt", "unbuffered", "wait-for-children", "whole",
    "external-launcher", "container-mount-home", "no-container-mount-home", "container-remap-root",
    "no-container-remap-root", "container-entrypoint", "no-container-entrypoint",
    "container-entrypoint-log", "container-writable", "container-readonly",
}  # fmt: skip
SHORT = {
    **{letter: name for letter, name in sbatch.SHORT.items() if letter not in "aW"},
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait",
    "X": "disable-status", "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
}  # fmt: skip


def parse(arguments: Sequence[str], program: str = "srun") -> CommandLine | None:
    """Parse srun's arguments; None if neither this grammar nor the real srun's --help (of `program`) knows
    them."""
    try:
        line = sbatch.split_command_line(
            arguments, {}, sbatch.Grammar(program, REQUIRED, OPTIONAL, NONE, SHORT)
        )
    except UsageError:
        return None
    if ":" in line.command:  # options of a second step: heterogeneous
        return None
    options = [replace(given, name=ALIASES.get(given.name, given.name)) for given in line.options]
    return replace(line, options=options)


def run(arguments: list[str]) -> int:
    """Run in place of srun; returns its exit code. Raises what a step raises."""
    _end_with_the_shell(os.environ.pop(shims.SHELL_VARIABLE, ""))
    if not shims.in_the_script(os.environ):
        _really(arguments, shims.without_shims(os.environ))
    if shims.STEP_VARIABLE in os.environ:
        _really(arguments, os.environ)
    srun = parse(arguments, shims.real("srun", os.environ))
    job = RunDirectory(os.environ[shims.RUN_VARIABLE])
    if not _may_train(srun) and not shims.trainings(job).exists():  # most steps: lose no time
        _really(arguments, os.environ)
    from jurymast.script.output import CannotOpen
    from jurymast.script.step import Step

    step, environment = Step(job), dict(os.environ)
    try:
        code = _as_training(step, srun) if srun is not None and step.takes(srun) else None
    except CannotOpen as error:
        say(f"{error}; srun runs this step, without failure handling")
        if error.hint:
            say(error.hint)
        code = None
    if code is None:
        environment, arguments = step.around_lost(environment, arguments, srun)
        _really(arguments, environment)
    return code


def _end_with_the_shell(shell: str) -> None:
    """Arrange for SIGTERM when a background shell (by its process id) that only waits for this process is
    ended: the script means the step. The real srun, which may replace this process, gets it as well."""
    if shell == str(os.getppid()):
        die_with_parent(signal.SIGTERM)
        if shell != str(os.getppid()):
            sys.exit(128 + signal.SIGTERM)


def _really(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    release()
    os.execve(shims.real("srun", os.environ), ["srun", *arguments], dict(environment))


def _may_train(srun: CommandLine | None) -> bool:
    read = recognise.read_shell_script
    return srun is not None and (
        recognise.starts_launcher(srun.command, read, os.environ)
        or recognise.starts_ranks(srun.command, read, os.environ)
        or recognise.names_python(srun.command, os.environ)
    )


def _as_training(step: Step, srun: CommandLine) -> int | None:
    """Run a training step; returns its exit code, or None if the step is not a training."""
    if not recognise.finds_program(srun, os.environ) or recognise.is_missing(srun):
        return None  # srun says so
    tasks = recognise.tasks_a_node(srun, os.environ, step.active)
    read = recognise.read_shell_script
    if why := others.unseen_within(srun.command, os.environ):
        say(f"{why}; srun runs this step")
        return None
    if recognise.starts_launcher(srun.command, read, os.environ):
        if tasks == 1:
            return step.run(recognise.with_its_path(srun))
        training = recognise.part_of(srun, os.environ, step.nodes[: step.active], read)
        if training is None:
            return None
        from jurymast.script import parts

        return parts.run(step, recognise.with_its_path(srun), training)
    if tasks * step.active > 1:
        if recognise.starts_ranks(srun.command, read, os.environ):
            return as_ranks(step, srun, tasks)
        if recognise.names_python(srun.command, os.environ):
            say(
                f"{srun.command[0]}: not recognized as a training; "
                "ranks that it starts run without failure handling"
            )
    return None


def as_ranks(step: Step, srun: CommandLine, tasks: int) -> int | None:
    """Run tasks of Python as the ranks of a training, or let srun run them if each is for itself. If nobody
    says which they are, their text is read; where that does not show it, what they do decides."""
    from jurymast.script import evidence

    said, shown, why = step.train, evidence.Shown(), ""
    if said == "no":
        return None
    if not said:
        shown, why = evidence.of_step(srun, recognise.read_shell_script, os.environ)
    if why or (not said and shown.independent):
        why = why or (
            f"taken for {tasks * step.active} independent tasks, as nothing in it makes a process group"
        )
        say(
            f"{' '.join(srun.command[:2])}: {why}; srun runs them, without failure handling "
            "(`#JURYMAST train: yes` makes them one training)"
        )
        return None
    guessed = not said and not shown.foreign
    return step.run_tasks(
        recognise.with_its_path(srun), tasks, guessed=guessed,
        kill_on_bad_exit=guessed and not shown.training and _kills_on_bad_exit(srun, os.environ),
    )  # fmt: skip


def _kills_on_bad_exit(srun: CommandLine, variables: Mapping[str, str]) -> bool:
    """Whether srun ends all tasks once one of them fails: by its option, its variable, or the site's
    setting."""
    from jurymast.cluster.control import kill_on_bad_exit

    if srun.has("kill-on-bad-exit"):
        return srun.last("kill-on-bad-exit") != "0"
    return variables.get("SLURM_KILL_BAD_EXIT", kill_on_bad_exit()) != "0"
