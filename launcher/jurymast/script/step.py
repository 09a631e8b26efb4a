"""A training step of a batch script, on the batch host: srun starts the step's command on active and spare
nodes, launchers in it become agents, and a supervisor decides for them.

Front end and nodes communicate by files in the step's folder: the first launcher requests a training, and the
front end answers with its run and its supervisor's address. A launcher that is called again on the same nodes
is the next training of the same step. The program that srun starts on each node runs the step's command as
the user wrote it, with Slurm's variables as they would be without the spare nodes.

The step's output goes to the file that its srun names, or to one file per task; otherwise to the standard
output of the step's front end, which is the job's output unless the script redirects it. People look there
for what the ranks print.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from subprocess import DEVNULL
from types import FrameType
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.cluster.allocation import Allocation, announced_hosts
from jurymast.cluster.batch import (
    LEFT_LIMIT_S,
    Agents,
    BatchProcess,
    end_srun,
    end_with_us,
    says_killed,
)
from jurymast.cluster.control import (
    STILL_RUNNING,
    binding,
    release,
    signals_tasks_alone,
    site_program,
    survive,
    unbound,
    why_ending,
)
from jurymast.cluster.sbatch import CommandLine, Given, words_of
from jurymast.core.judges.slurm_variables import kind_of, of_a_task
from jurymast.core.state.messages import Accepted
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import compressed, expanded
from jurymast.core.supervision.batch import Outcome
from jurymast.errors import ClusterUnavailableError
from jurymast.interpreter import run_module
from jurymast.jobs import alone, run_command
from jurymast.processes import OF_JOBS, TASKS_ALONE_VARIABLE, end_like, name_process
from jurymast.rundir import RunDirectory, make_folder, write_json
from jurymast.script import sharing, shims, standard_input
from jurymast.script.notes import note, noted, say
from jurymast.script.output import NUMBER_FILE, VARIABLES, Output, is_each_tasks, newest_attempt, relayed
from jurymast.script.recognise import (
    in_container,
    in_image,
    python_command,
    read_shell_script,
    starts_launcher,
)
from jurymast.script.sharing import shares_of
from jurymast.script.signals import StepSignals
from jurymast.script.trainings import Training, Trainings
from jurymast.wire.channel import ask

# ---- what a node sees

LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


NODE_COMMAND = """\
#!{runs_in}
# Runs a step's command on a node, and writes its exit code to a file, because srun would also wait for lost
# nodes. The output of spare nodes goes to a log of its own. A container, or srun's --export, may have changed
# the variables that lead to jurymast's front ends.
unset SLURM_NTASKS_PER_NODE
[ -z "$BASH_VERSION" ] || SHLVL=$((SHLVL - 1))
{exports}
{ours}
{own}
{told}
if [ "$SLURM_NODEID" -ge {active} ]; then exec >> {log} 2>&1; fi
if [ "$SLURM_NODEID" = 0 ]; then echo "$SLURM_STEP_ID" > {number}; fi
{files}
{runs}
if [ "$SLURM_NODEID" -ge {active} ]; then code=0; fi
umask 077
cd {folder} && echo $code > ".ended-$SLURMD_NODENAME" && mv ".ended-$SLURMD_NODENAME" "ended-$SLURMD_NODENAME"
exit $code
"""
# Slurm's signals are for the command. Without a trap they would end this shell, and so the step; one that
# ignores them would have the command ignore them too.
RUNS = """\
trap : {signals}
(exec "$@")
code=$?"""
# The same where Slurm signals this shell alone: the agent gets them once there is one. Only bash can keep a
# command in the background from ignoring INT and QUIT.
RUNS_AND_PASSES_ON = """\
export {alone}=1
pass_on() {{
  passed=1
  kill -s "$1" "$(cat {folder}/"guard-$SLURMD_NODENAME")" || kill -s "$1" "$command"
}} 2> /dev/null
{traps}
(trap - INT QUIT; exec "$@") <&0 &
command=$!
while passed=; wait "$command"; code=$?; [ "$passed" ] && [ "$code" -gt 128 ]; do :; done"""
CONTAINER_COMMAND = """\
#!/bin/sh
# Runs the command of a container, whose image may have changed the variables that lead to jurymast's front
# ends.
{ours}
exec "$@"
"""
# Variables that tell a launcher its job and node. These prefixes set a variable in a container, even in one
# that gets none of the host's (--cleanenv).
PLACE = ("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_ID", "SLURMD_NODENAME")
TELLING = ("APPTAINERENV", "SINGULARITYENV")


def node_command(
    job: RunDirectory,
    step: Path,
    seen: Mapping[str, str],
    active: int,
    log: Path,
    own: Mapping[str, str],
    contained: bool = False,
    *,
    tasks_alone: bool = False,
    files: Sequence[tuple[str, str]] = (),
    unsaid: Sequence[str] = (),
) -> str:
    """The text of the program for a `step` of `job` (both folders) on `active` nodes. `own`: shell text, by
    node name, that turns the step's command into that of the node. `contained`: the command starts a
    container. `tasks_alone`: see `control.signals_tasks_alone`. `files`: see `Output.own_files`; `unsaid`:
    variables that the command must not see."""
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in seen.items())
    exports += "".join(f"\nunset {name}" for name in unsaid)
    cases = [f"{shlex.quote(node)})\n{text}\n;;" for node, text in own.items()]
    text = "\n".join(['case "$SLURMD_NODENAME" in', *cases, "esac"]) if cases else ""
    telling = TELLING if contained else ()
    told = "\n".join(f'export {prefix}_{name}="${name}"' for prefix in telling for name in PLACE)
    names = [number.name.removeprefix("SIG") for number in OF_JOBS]
    runs = RUNS.format(signals=" ".join(names))
    if tasks_alone:
        traps = "\n".join(f"trap 'pass_on {name}' {name}" for name in names)
        runs = RUNS_AND_PASSES_ON.format(
            alone=TASKS_ALONE_VARIABLE, folder=shlex.quote(str(step)), traps=traps
        )
    return NODE_COMMAND.format(
        runs_in=shims.SHELL, runs=runs, exports=exports, own=text,
        ours=shims.exports(job, step), told=told, active=active,
        log=shlex.quote(str(log)), folder=shlex.quote(str(step)), number=shlex.quote(str(step / NUMBER_FILE)),
        files=_into(files),
    )  # fmt: skip


def _into(files: Sequence[tuple[str, str]]) -> str:
    """Shell text that sends what a node's command prints to its own files, if they are there on the node."""
    redirections = [
        f"{place}) "
        + "; ".join(
            f"(: >> {name}) 2> /dev/null && exec {number}>> {name}"
            for number, name in enumerate(map(shlex.quote, names), 1)
            if name != "''"
        )
        + " ;;"
        for place, names in enumerate(files)
        if any(names)
    ]
    return "\n".join(['case "$SLURM_NODEID" in', *redirections, "esac"]) if redirections else ""


def tasks_each(srun: CommandLine) -> dict[str, str]:
    """The variable for --ntasks-per-node, an option that ours sets as well: a step has it if it is said."""
    name = "SLURM_NTASKS_PER_NODE"
    said = srun.last("ntasks-per-node", "tasks-per-node") or os.environ.get(name)
    return {name: said} if said else {}


def container_command(job: RunDirectory, step: Path) -> str:
    """The text of the program that runs first in a container, for a `step` of `job` (both folders)."""
    return CONTAINER_COMMAND.format(ours=shims.exports(job, step))


def prologs(srun: CommandLine, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The programs that Slurm would run before each task of a step: first the site's, then the user's."""
    own = srun.last("task-prolog")
    own = environment.get(PROLOG_VARIABLE) if own is None else own
    return tuple(one for one in (site_program("TaskProlog"), own) if one)


def epilogs(srun: CommandLine, environment: Mapping[str, str]) -> tuple[str, str]:
    """The programs that Slurm would run after each task of a step: the user's, then the site's; "" for
    none."""
    own = srun.last("task-epilog")
    own = environment.get(EPILOG_VARIABLE) if own is None else own
    return own or "", site_program("TaskEpilog")


# ---- the step

PROCESS_NAME = "jurymast-step"
REACHED = "reached"  # a launcher in the step was ours
UNREACHED = "found jurymast: what it trained had no failure handling"
REACHES = "extend PYTHONPATH instead of setting it anew; leave out python's -E, -I, -S"
ASKED, ANSWER = "asked-{}.json", "answer-{}.json"
POLL_S = 0.05
# Options of a step's srun that jurymast sets itself.
OURS = frozenset({
    "nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "nodelist", "nodefile", "kill-on-bad-exit",
    "wait", "no-kill", "overlap", "exact", "exclusive", "output", "gpus",
})  # fmt: skip
# Options whose values ours does not get as they are.
CHECKED = OURS | sharing.OPTIONS
# From which srun reads --task-prolog and --task-epilog.
PROLOG_VARIABLE, EPILOG_VARIABLE = "SLURM_TASK_PROLOG", "SLURM_TASK_EPILOG"
# Options on sharing processors with other steps. They contradict --overlap, which a step needs so as not to
# wait for lost ones.
ALONE = frozenset({"exact", "exclusive", "overlap"})
# Slurm ends a job within seconds; until then, commands that follow the step in the script must not begin.
END_LIMIT_S = 120.0
CANCEL_TRIES, CANCEL_EVERY_S = 20, 0.5
# Slurm signals all processes of a job within so many seconds, also where the machine is busy. A shell with a
# trap for SIGTERM goes on after that.
SHELL_LIMIT_S = 2.0
STARTED_BY = os.getppid()  # the shell that runs the script


def true_variables_file(job: RunDirectory) -> Path:
    """The file with Slurm's own values of the variables that the batch script sees narrowed."""
    return job.submission / "variables.json"


class StepAgents(Agents):
    """The agents of a step, which began as launchers: they wait for the `answer`, which is complete once it
    has the supervisor's address."""

    def __init__(
        self, path: Path, answer: Mapping[str, Any], process: subprocess.Popen[bytes], nodes: int
    ) -> None:
        self._path, self._answer, self._process, self._nodes = path, answer, process, nodes

    def start(self, port: int) -> None:
        answer = {**self._answer, "supervisor": f"{announced_hosts()[0]}:{port}"}
        note(self._path, answer)

    def alive(self) -> bool:
        return self._process.poll() is None

    def were_killed(self) -> bool:
        # Of a single agent, the program around the step's command tells if it was killed alone.
        alone = self._nodes == 1 and any(self._path.parent.glob("ended-*"))
        return says_killed(self._process) and not alone

    def end(self) -> None:
        """Do nothing: commands that follow the launcher in the step's command continue."""

    def give_up(self) -> None:
        end_srun(self._process, LEFT_LIMIT_S)


class StepProcess(BatchProcess):
    """The batch process of one training step. The step's front end takes its signals."""

    ended_by_script = False
    _asks: threading.Thread | None = None

    def _listen(self) -> None:
        pass

    def warned(self) -> None:
        self._signalled(warning=True)

    def ordered_to_end(self) -> None:
        """If Slurm does not end the job, the order means the step: the script, or a `timeout` in it, ends it
        as it would end srun."""
        self._signalled(warning=False)
        if self._asks is None or not self._asks.is_alive():
            self._asks = threading.Thread(target=self._ask_slurm, daemon=True)
            self._asks.start()

    def _ask_slurm(self) -> None:
        if why_ending(self._allocation).why != STILL_RUNNING:
            return
        self.ended_by_script = True
        for _ in range(CANCEL_TRIES):  # a supervisor may just be starting
            if isinstance(ask(self._directory, "cancel", by="the script, by a signal"), Accepted):
                return
            time.sleep(CANCEL_EVERY_S)


class Step:
    """Starts training steps. `job` is the run directory of the batch script."""

    def __init__(self, job: RunDirectory) -> None:
        self._job = job
        self._plan = job.own_plan()
        self._allocation = Allocation.load(job)
        self._trainings = Trainings(job, self._allocation.key)
        self._lost = self._trainings.lost()
        self._killed = False  # by a signal of the script for its srun
        self._hidden: dict[str, str] = {}  # variables that only the step's command may see, not its srun
        self._inputs: tuple[str, ...] = ()  # what its tasks read: see `standard_input`
        self._prologs: tuple[str, ...] = ()  # what runs before each of its tasks
        self._epilogs = ("", "")  # and after it
        self._kill_on_bad_exit = False
        self.active, self.train = self._plan.active, self._plan.train

    @property
    def nodes(self) -> list[str]:
        """The nodes that no earlier training has lost: active ones first, then spare ones. If it has lost the
        agents of all, there is still the one on which the script runs."""
        left = [node for node in self._allocation.nodes if node not in self._lost]
        return left or [self._allocation.host]

    @property
    def likely(self) -> list[str]:
        """The nodes that the ranks will have, in order, if nothing fails: the batch host has none if another
        node can replace it."""
        last = sorted(self.nodes, key=lambda node: node == self._allocation.host)
        return [node for node in self.nodes if node in last[: self.active]]

    def seen(self, place: int | None = None) -> list[str]:
        """The step's nodes as the script sees them, or the one that its part at this place names."""
        seen = self.nodes[: self.active]
        return seen if place is None else seen[place : place + 1]

    @property
    def parts(self) -> Path:
        """The folder where the steps of one node each meet, in this life of the job."""
        return self._job.submission / "steps" / f"{self._allocation.key}-parts"

    def takes(self, srun: CommandLine) -> bool:
        """Whether the real srun takes what it is told by options, of which ours does not get all, and by its
        variables."""
        named = srun.last("nodelist") or ""
        if "/" not in named and not {*expanded(named)} <= {*self._allocation.nodes}:
            return False
        told = [word for given in srun.options if given.name in CHECKED for word in given.words]
        command = [shims.real("srun", os.environ), *told, "--version"]
        environment = shims.without_shims(os.environ)
        return not subprocess.run(command, stdout=DEVNULL, stderr=DEVNULL, env=environment).returncode

    def run(
        self,
        srun: CommandLine,
        folder: Path | None = None,
        own: Mapping[str, str] | None = None,
        place: int | None = None,
        tasks: int = 1,
        direct: bool = False,
    ) -> int:
        """Run a training step; returns the exit code that srun would return. `folder`: a new one for the step
        if it is made already. `tasks`: how many srun would start on each node. `direct`: the script started
        the command without srun, which holds back lines until they end.

        A step in place of one per node has shell text for each node's `own` command, and its own output gets
        what is printed by the ranks of the node at this `place` among the active ones.
        """
        self._signals = signals = StepSignals(srun, parts=own is not None)
        signals.listen()
        name_process(PROCESS_NAME)  # only now: by its name it is found, and warned
        if not self._inputs:
            standard_input.warn(srun, os.environ)
        folder = folder or self.new_folder()
        output = Output(srun, os.environ, self.seen(place), tasks, folder)
        output.unbuffered |= direct
        process = self._start(srun, folder, output, own or {})
        signals.started(process)
        output.srun_opens_errors()
        for number in count(1):
            training = _await_training(folder / ASKED.format(number), process)
            if training is None:
                break
            self._train(training, process, folder / ANSWER.format(number), output, place)
        code = self._end(process, folder)
        if self._killed:  # as srun kills its tasks; those here may have ended by themselves before
            code = 128 + signal.SIGKILL
        if signals.ended:
            await_shell()
        warn_if_unreached(folder, srun.command)
        output.close()
        signals.close()
        return code

    def run_tasks(
        self, srun: CommandLine, tasks: int, *, guessed: bool, kill_on_bad_exit: bool = False
    ) -> int | None:
        """The same for a command of which srun would start this many tasks per node: Python's, or a
        shell's; None if srun would refuse them. `guessed` and `kill_on_bad_exit`: see `RunPlan`."""
        self._kill_on_bad_exit = kill_on_bad_exit
        slurm = binding()
        read = sharing.read_by(shims.real("srun", os.environ), release())
        on_node = sharing.gpus_on_node(srun, os.environ, read, tasks)
        shares = replace(shares_of(srun, os.environ, slurm, read), gpus_on_node=on_node)
        over = srun.has("overcommit") or "SLURM_OVERCOMMIT" in os.environ
        if not over and not sharing.fits(shares.cpus, tasks, self.active, os.environ):
            return None
        folder = self.new_folder()
        self._inputs = standard_input.inputs(srun, os.environ, self.seen(), tasks, folder)
        place = in_container(srun.command, read_shell_script)
        own = srun.command[place:]
        python = own[0] if python_command(own) else sys.executable
        if python == sys.executable and (place or in_image(srun)):
            python = "python3"  # the container's own
        # The agent is one task that shares out its node to its ranks, so it must have it whole. Where
        # Slurm binds nothing, all that comes of --cpu-bind is a line of srun's, and variables.
        ours = sharing.OPTIONS if slurm.tasks else sharing.OPTIONS - {"cpu-bind"}
        names = (*(sharing.VARIABLES[option] for option in ours), *sharing.DERIVED)
        gpus = sharing.all_gpus(srun, os.environ)
        not_ours = {*ours, "input", *(["gpus"] if gpus else [])}
        if not place and not in_image(srun):  # a container may not have these programs
            self._prologs, self._epilogs = prologs(srun, os.environ), epilogs(srun, os.environ)
            names = (*names, PROLOG_VARIABLE, EPILOG_VARIABLE)
            not_ours |= {"task-prolog", "task-epilog"}
        self._hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
        if shares.cpus:  # srun tells its tasks
            self._hidden[sharing.JOBS_CPUS] = str(shares.cpus)
            if sharing.JOBS_CPUS in read:
                tres = sharing.VARIABLES["tres-per-task"]
                said = srun.last("tres-per-task") or self._hidden.get(tres, "")
                self._hidden[tres] = sharing.with_cpus(said, shares.cpus)
        how = (str(tasks), str(int(guessed)), msgspec.json.encode(shares).decode())
        agent = run_module("jurymast.script", "tasks", *how, *own, python=python)
        command = [*srun.command[:place], *agent]
        options = [given for given in srun.options if given.name not in not_ours]
        options += [Given("cpu-bind", "none", (word,)) for word in unbound()]
        options += [Given("input", "none", ("--input=none",)), *gpus]
        return self.run(CommandLine(options=options, command=command), folder, tasks=tasks)

    def around_lost(
        self, environment: Mapping[str, str], arguments: Sequence[str], srun: CommandLine | None
    ) -> tuple[dict[str, str], list[str]]:
        """Return variables and arguments for other steps. Without them Slurm would start these steps on lost
        nodes, which it believes alive, or never, because it believes the processors of lost steps busy."""
        if not self._lost:
            return dict(environment), list(arguments)
        hosts = compressed(self.nodes[: self.active])
        lists = {name: hosts for name in LISTS if name in environment}
        if srun is not None:
            arguments = [*words_of(srun.options, ALONE), "--", *srun.command]
        return {**environment, **lists}, ["--overlap", *arguments]

    def new_folder(self) -> Path:
        steps = self._job.submission / "steps"
        make_folder(steps)
        number = 1
        while True:
            folder = steps / f"{self._allocation.key}-{number}"
            try:
                folder.mkdir(mode=0o700)
                return folder
            except FileExistsError:
                number += 1

    def _start(
        self, srun: CommandLine, folder: Path, output: Output, own: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        nodes = self.nodes
        program = folder / "node"
        log = self._job.submission / f"job-{self._allocation.job}-spares.log"
        # srun reads the number of nodes from these.
        true = foreign.load_own(true_variables_file(self._job), foreign.SCRIPT_BYTES_MAX)
        narrow = {name: os.environ[name] for name in true if name in os.environ}
        unsaid = [one for one in (sharing.GPUS_PER_NODE,) if one in true and one not in os.environ]
        if srun.has("gpus"):  # of its own
            true = {name: value for name, value in true.items() if name not in unsaid}
        ours = {name: os.environ[name] for name in (VARIABLES["output"],) if name in os.environ}
        shown = {**narrow, **ours, **self._hidden, **self._seen(), **tasks_each(srun)}
        words = list(srun.command)
        if place := in_container(words, read_shell_script):
            shims.write_program(folder / "contained", container_command(self._job, folder))
            words.insert(place, str(folder / "contained"))
        text = node_command(
            self._job,
            folder,
            shown,
            self.active,
            log,
            own,
            contained=place > 0,
            tasks_alone=signals_tasks_alone(),
            files=() if own else output.own_files(),
            unsaid=unsaid,
        )
        shims.write_program(program, text)
        # If each task has a file for stderr, spare nodes would have one as well, and ranks do not write
        # there.
        each = is_each_tasks(srun.last("error") or "")
        command = [
            shims.real("srun", os.environ),
            *words_of(srun.options, OURS | {"error"} if each else OURS),
            *output.srun_options,
            *self._mounts(srun),
            *survive(),
            "--overlap",
            f"--nodes={len(nodes)}",
        ]
        command += [f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]
        environment = {**shims.with_shims(os.environ, self._job), **true}
        command += [*sharing.each_nodes_gpus(srun, environment, self.active, release()), str(program), *words]
        environment.pop(VARIABLES["output"], None)
        # What the script has opened, srun has as well: its files may be there (`-o >(sort)`, `-o /dev/fd/3`).
        return subprocess.Popen(
            command, env=environment, stdout=output.common, preexec_fn=end_with_us, close_fds=False
        )

    def _seen(self) -> dict[str, str]:
        """The variables that hide the step's spare nodes from its command."""
        values = of_a_task(os.environ, os.environ.get("SLURM_JOB_NODELIST", ""), nodes=self.active)
        return {name: value for name, value in values.items() if kind_of(name)}

    def _mounts(self, srun: CommandLine) -> list[str]:
        """The option that lets a container (pyxis) see the run directory."""
        if not in_image(srun):
            return []
        theirs = srun.last("container-mounts")
        ours = f"{self._job.root}:{self._job.root}"
        return [f"--container-mounts={theirs},{ours}" if theirs else f"--container-mounts={ours}"]

    def _train(
        self,
        training: Training,
        process: subprocess.Popen[bytes],
        answer: Path,
        output: Output,
        place: int | None,
    ) -> None:
        run, ended = self._trainings.claim(training)
        if ended is not None:
            say(f"{run.root.name} ended with exit code {ended} before the requeue; it is not run again")
            write_json(answer, {"exit_code": ended})
            self._trainings.told(run)
            return
        if ignored := sorted(set(training.ignored)):
            names = ", ".join(f"--{name}" for name in ignored)
            say(f"torchrun's options {names} are not used: jurymast's policy decides about restarts and logs")
        plan = replace(
            training.plan(self._plan, run),
            stderr_apart=output.stderr_apart, inputs=self._inputs, prologs=self._prologs,
            epilogs=self._epilogs, kill_on_bad_exit=self._kill_on_bad_exit,
        )  # fmt: skip
        run.save_plan(plan)
        # Earlier lives of the job have already printed their attempts.
        after = newest_attempt(run)
        agents = StepAgents(answer, {"run": str(run.root), "after": after}, process, len(self.nodes))
        with relayed(run, output, after, place):
            outcome, by_script = self._supervise(run, plan, agents)
        self._lost |= set(outcome.lost)
        if by_script and outcome.state == "cancelled":
            process.terminate()  # as srun, which ends the step's command as well
            self._killed = True
            self._trainings.told(run, outcome.lost)
            return
        if outcome.state == "cancelled":  # by Slurm or by hand: that means the whole job
            run_command(["scancel", alone(self._allocation.job)])
        if outcome.state in ("requeued", "cancelled"):
            signal.signal(signal.SIGTERM, end_after_the_script)
            _await_end()
        self._trainings.told(run, outcome.lost)

    def _supervise(self, run: RunDirectory, plan: RunPlan, agents: StepAgents) -> tuple[Outcome, bool]:
        """Run the training's supervisor until the outcome; returns that, and whether the script ended the
        step, or Slurm the step alone."""
        allocation = replace(self._allocation, nodes=tuple(self.nodes))
        path = run.submission / f"job-{allocation.job}.log"
        log = foreign.writing(path)
        try:
            self._signals.training = process = StepProcess(run, plan, allocation, agents, log)
            outcome = process.run()
            return outcome, process.ended_by_script or outcome.step_alone
        finally:
            self._signals.training = None
            os.close(log)

    def _end(self, process: subprocess.Popen[bytes], folder: Path) -> int:
        """Wait for the step's end; returns the exit code of its command on the nodes that are left. srun
        waits for lost nodes as well, and may fail once Slurm has noticed that they are lost."""
        expected = self.nodes
        while True:
            ended = process.poll() is not None
            codes = [_code(folder / f"ended-{node}") for node in expected]
            if self._lost and None not in codes:
                if not ended:
                    end_srun(process)
                return max(code for code in codes if code is not None)
            if ended:
                return process.returncode if process.returncode >= 0 else 128 - process.returncode
            time.sleep(POLL_S)


def warn_if_unreached(folder: Path, command: Sequence[str]) -> None:
    """Say so if a step's command names a launcher, and none in it has found jurymast. srun may have refused
    to start the command."""
    began = (folder / NUMBER_FILE).exists()
    if began and not (folder / REACHED).exists() and starts_launcher(command, read_shell_script, os.environ):
        say(f"no launcher in this step {UNREACHED}, and ran on all nodes of the job ({REACHES})")


def _await_training(path: Path, process: subprocess.Popen[bytes]) -> Training | None:
    """The training that a launcher requests; None if the command has ended without a further request."""
    while True:
        ended = process.poll() is not None
        if (asked := noted(path)) is not None:
            return msgspec.convert(asked, Training)
        if ended:
            return None
        time.sleep(POLL_S)


def _code(path: Path) -> int | None:
    try:
        return int(foreign.read_own(path, foreign.NOTE_BYTES_MAX))
    except (OSError, ValueError):
        return None


def await_shell() -> None:
    """After a SIGTERM, end after the script's shell. If Slurm ends the job, it signals that as well, perhaps
    a moment later, and until then the shell must not begin with the next command."""
    until = time.monotonic() + SHELL_LIMIT_S
    while time.monotonic() < until and os.getppid() == STARTED_BY:
        time.sleep(POLL_S)


def end_after_the_script(number: int, _frame: FrameType | None) -> None:
    """For a SIGTERM: end by it, but see `await_shell`."""
    await_shell()
    end_like(-number)


def _await_end() -> None:
    """Wait until Slurm ends this life of the job. This process also ends if the script has ended: if Slurm
    finds a job's processes by their parents, it no longer finds this one."""
    until = time.monotonic() + END_LIMIT_S
    while time.monotonic() < until:
        if os.getppid() != STARTED_BY:
            sys.exit(0)
        time.sleep(POLL_S)
    say(f"Slurm has not ended the job within {END_LIMIT_S:g} s")
    sys.exit(ClusterUnavailableError.exit_code)
