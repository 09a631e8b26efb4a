"""What will happen to the lines of a batch script that start something, as far as their text shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jurymast.cluster.sbatch import CommandLine
from jurymast.script import evidence, others, recognise, shell, srun

# Options that ask for GPUs, and those that may.
GPUS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")
TRES = ("gres", "tres-per-job", "tres-per-node", "tres-per-task")
# accelerate starts several processes, by torch's launcher, only with one of these, with a configuration that
# says so, or if it finds GPUs. Otherwise it starts one by itself.
ACCELERATE = re.compile(r"\baccelerate(?:\.commands\.launch|\s+launch)\b((?:\\\n|[^;|&\n])*)")
MANY = re.compile(r"--(multi[-_]gpu|use[-_](fsdp|deepspeed|megatron[-_]lm))\b")
CONFIGURATION = re.compile(r"--config[-_]file[=\s]+[\"']?([^\s\"']+)")
CONFIGURED = re.compile(
    r"^distributed_type:\s*[\"']?(DEEPSPEED|FSDP|MEGATRON_LM|MULTI_(?!CPU)\w+)", re.MULTILINE
)
# What stands in PYTHONPATH for the folder by which a launcher's Python finds jurymast. A script that sets the
# variable anew, or takes it away, hides that folder, and so do python's -E, -I and -S; a torchrun that is
# found by PATH is ours.
OURS = "/the-run-directory/hook"
_ANEW = rf"PYTHONPATH=(?!\S*(?:PYTHONPATH|{OURS}))"
_TAKEN = r"env\s[^;|&\n]*(?<!\S)(?:-u\s*PYTHONPATH|--unset=PYTHONPATH|-i|-|--ignore-environment)\s"
EMPTIED = re.compile(r"\benv\s(?:.*\s)?(?:-\w*i|-|--ignore-environment)(?:\s|$)")
HIDDEN = re.compile(
    rf"\bexport\s+{_ANEW}|\bunset\s+(?:-?\w+\s+)*PYTHONPATH\b"
    rf"|\b(?:{_ANEW}|{_TAKEN})[^;|&\n]*(?:{recognise.LAUNCHER.pattern})"
)
ISOLATED = re.compile(r"\bpython[\d.]*\s+(-\w+\s+)*-[a-zA-Z]*[EIS]")
BY_PATH = re.compile(r"(?<![\w/.-])torchrun\b")
COMMAND_CHARACTERS_MAX, SHOWN_CHARACTERS = 1 << 14, 80
TOO_LONG = "too long to be read beforehand: what it starts is known only when it runs"
NOT_ALL = (
    "the script is too long to be read beforehand: what it starts from here on is known only when it runs"
)
VARIABLE = re.compile(r"\$(\w+|\{[^{}]*\})")
OF_THE_SCRIPT = {"PYTHONPATH": OURS}
SIZES = ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node")


@dataclass(frozen=True)
class Foreseen:
    """What happens to the command on this `line` of the script, and `why`. `protected`: failures are handled;
    None if only the running script knows that. `differs`: what its tasks will meet otherwise than under
    sbatch."""

    line: int
    command: str
    protected: bool | None
    why: str
    differs: str = ""


def foreseen(
    text: str, told: CommandLine, active: int, train: str = "", around: Sequence[str] = ()
) -> list[Foreseen]:
    """Return the lines of a batch script that start trainings, steps or Python. `told`: sbatch's options;
    `active`: nodes of the run; `train`: see `RunPlan`; `around`: what Slurm runs around each task."""
    gpus = any(told.last(name) for name in GPUS) or any("gpu" in (told.last(name) or "") for name in TRES)
    return _Foresight(_of_slurm(told, active), active, train, around, gpus).of(text)


@dataclass
class _Foresight:
    """What is known of the run. `variables`: Slurm's; `gpus`: the job asks for some; `scripts`: those that
    may still be read of all that the script runs."""

    variables: Mapping[str, str]
    active: int
    train: str
    around: Sequence[str]
    gpus: bool
    scripts: int = recognise.SCRIPTS_MAX

    def of(self, text: str, inherited: Mapping[str, str] = OF_THE_SCRIPT) -> list[Foreseen]:
        """The same for the text of a script, or of a part that a further shell reads, with these
        variables."""
        found: list[Foreseen] = []
        for command in shell.commands(text, {**inherited, **self.variables}):
            if not command.words or sum(map(len, command.words)) > COMMAND_CHARACTERS_MAX:
                shown = command.text[:SHOWN_CHARACTERS]
                found.append(Foreseen(command.line, shown, None, TOO_LONG if command.words else NOT_ALL))
                continue
            seen = {**command.exported, **self.variables}
            inner = others.for_another_shell(others.stripped(command.words))
            if inner and self.scripts and (within := self._within(command, inner, seen)):
                found += within
            elif one := self._of_command(command, seen):
                found.append(one)
        return found

    def _within(self, command: shell.Command, text: str, seen: Mapping[str, str]) -> list[Foreseen]:
        self.scripts -= 1
        return [
            replace(one, line=command.line, command=command.text, why=f"`{one.command}` in it: {one.why}")
            for one in self.of(text, seen)
        ]

    def _of_command(self, command: shell.Command, seen: Mapping[str, str]) -> Foreseen | None:
        fate = _fate(command.words, seen, self.active, self.train)
        if fate is not None and fate[0] and (why := _by_itself(command.words, seen, gpus=self.gpus)):
            fate = False, why
        if fate is not None and fate[0] and (why := _out_of_reach(command.words, seen)):
            fate = False, why
        if fate is not None and fate[0]:
            perhaps = ({**seen, "PYTHONPATH": value} for value in command.perhaps.get("PYTHONPATH", ()))
            if why := next(filter(None, (_out_of_reach(command.words, other) for other in perhaps)), ""):
                fate = None, f"only the running script knows whether {why}"
        if fate is None:
            return None
        differs = "" if fate[0] is False else _around_tasks(command.words, seen, self.active, self.around)
        return Foreseen(command.line, command.text, *fate, differs)


def _of_slurm(told: CommandLine, active: int) -> dict[str, str]:
    """Variables that Slurm will give the script, as far as they are known before."""
    variables = {"SLURM_NNODES": str(active), "SLURM_JOB_NUM_NODES": str(active)}
    each, tasks = told.last("ntasks-per-node", "tasks-per-node"), told.last("ntasks")
    if each is not None and each.isdigit():
        variables["SLURM_NTASKS_PER_NODE"] = each
        tasks = str(int(each) * active) if tasks is None else tasks
    if tasks is not None:
        variables["SLURM_NTASKS"] = variables["SLURM_NPROCS"] = tasks
    return variables


def _fate(
    words: Sequence[str], variables: Mapping[str, str], active: int, train: str
) -> tuple[bool | None, str] | None:
    words = others.stripped(words)
    if words and others.name_of(words[0]) in others.AROUND:
        step = next((place for place, word in enumerate(words) if others.name_of(word) == "srun"), 0)
        words = words[step:]
    program = others.name_of(words[0]) if words else ""
    if program == "srun":
        return _step(words, variables, active, train)
    if unseen := others.unseen(words):
        return False, f"{unseen}: {others.UNSEEN[unseen]}, so nothing is handled; {others.INSTEAD}"
    if VARIABLE.fullmatch(words[0] if words else ""):
        return None, f"what {words[0]} stands for is known only when it runs; a training is recognized then"
    line = shell.spelled_out(" ".join(words), variables)
    if program in others.ELSEWHERE and (recognise.LAUNCHER.search(line) or recognise.PYTHON.search(line)):
        return False, f"{program}: {others.OUTSIDE}; {others.INSTEAD}"
    if not words or not others.may_start(words):
        return _unread(words)
    if recognise.starts_launcher(words, recognise.read_shell_script, variables):
        if _on_each_node(words):
            return active == 1, "one training on the first node" + ", without failure handling" * (active > 1)
        return True, "a launcher: runs on all nodes, as if srun preceded it"
    if recognise.names_python(words, variables):
        return False, "runs once, on the first node, as under sbatch; for all nodes, put `torchrun` before it"
    return _unread(words)


def _unread(words: Sequence[str]) -> tuple[None, str] | None:
    """What is said of a command that has a shell run a script that cannot be read here."""
    shells = bool(words) and others.name_of(words[0]) in recognise.SHELLS
    options, rest = others.options_of(words[1:]) if shells else ([], list(words))
    script = rest[0] if rest and not any(re.fullmatch(r"-\w*c\w*", option) for option in options) else ""
    read = not script or recognise.read_shell_script(script)
    if read or not (shells or recognise.SHELL_SCRIPT.fullmatch(script)):
        return None
    return None, f"{script} cannot be read here: what it starts is known only when it runs"


def _by_itself(words: Sequence[str], variables: Mapping[str, str], *, gpus: bool) -> str:
    """Why all launchers in a command start their process by themselves, unseen; "" if one may not. `gpus`:
    the job asks for some."""
    texts = recognise.texts(words, recognise.read_shell_script, variables)
    starts = [options for text in texts for options in ACCELERATE.findall(text)]
    rest = [ACCELERATE.sub("", text) for text in texts]
    if not starts or any(recognise.LAUNCHER.search(text) for text in rest):
        return ""
    reasons = [_without_torch(options, gpus=gpus) for options in starts]
    return f"accelerate starts its process by itself, unseen, {reasons[0]}" if all(reasons) else ""


def _out_of_reach(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Why the Python of the launchers in a command does not find jurymast; "" if it does."""
    place = next((place for place, word in enumerate(words) if others.name_of(word) == "srun"), None)
    if place is not None:
        if EMPTIED.search(" ".join(words[:place])):
            return (
                "env -i takes jurymast's variables from srun, and the step runs as under sbatch: leave it out"
            )
        # Our srun extends PYTHONPATH once more, so only what is set anew after it hides jurymast.
        step = srun.parse(list(words[place + 1 :]))
        words = words if step is None else step.command
    anew = place is None and OURS not in variables.get("PYTHONPATH", "")
    for text in recognise.texts(words, recognise.read_shell_script, variables):
        if not recognise.LAUNCHER.search(BY_PATH.sub("", text)):
            continue
        if anew or HIDDEN.search(text):
            return (
                "PYTHONPATH is set anew or taken away, so the launcher does not find jurymast: extend it, "
                "or use torchrun"
            )
        if ISOLATED.search(text):
            return "python's -E, -I or -S hides jurymast from the launcher: leave it out, or use torchrun"
    return ""


def _without_torch(options: str, *, gpus: bool) -> str:
    """Why accelerate with these options does not use torch's launcher; "" if it does, or may."""
    if re.search(r"--(use[-_])?cpu\b", options):
        return "with --cpu"
    if MANY.search(options):
        return ""
    if (named := CONFIGURATION.search(options)) is not None:
        text = recognise.read_shell_script(named[1])  # of any file
        configured = not text or CONFIGURED.search(text) is not None
        return "" if configured else f"with {named[1]}, which names no kind of several GPUs"
    if re.search(r"--num[-_]processes[=\s]+1\b", options):
        return "with --num_processes=1"
    return "" if gpus else "if it finds no GPUs, and the job asks for none; --multi_gpu has torch start them"


def _on_each_node(command: Sequence[str]) -> bool:
    alone = recognise.NODES.search(" ".join(command))
    return "--standalone" in command or (alone is not None and alone[1] == "1")


def _step(words: list[str], variables: Mapping[str, str], active: int, train: str) -> tuple[bool | None, str]:
    if "/" in words[0]:
        return False, "srun by its full path is not jurymast's: the step runs as under sbatch"
    read, step = recognise.read_shell_script, srun.parse(words[1:])
    if step is None:
        return False, "its options are not known here, or it has several parts: runs as under sbatch"
    program = others.name_of(step.command[0]) if step.command else ""
    if not recognise.finds_program(step, variables):
        return False, f"its tasks have no PATH by which to find {program}: `--export=ALL` gives them theirs"
    if program.startswith("$"):
        return None, f"what {program} stands for is known only when it runs; a training is recognized then"
    if why := others.unseen_within(step.command, variables):
        return False, why
    if recognise.starts_launcher(step.command, read, variables):
        protected, why = _launcher(step, variables, active)
        reads = step.last("input") not in (None, "none") and protected
        return protected, why + "; its ranks read nothing, also with --input" * bool(reads)
    tasks = recognise.tasks_a_node(step, variables, active)
    if not recognise.starts_ranks(step.command, read, variables):
        return _no_ranks(step, tasks * active, variables)
    if tasks * active <= 1:
        return False, "one task, or not on all nodes: not taken for a training; `srun torchrun` makes it one"
    if train:
        return (
            train == "yes",
            f"each task {'is a rank' if train == 'yes' else 'is for itself'}, by `train: {train}`",
        )
    shown, why = evidence.of_step(step, read, variables)
    if why:
        return False, f"{why}: MPI starts the ranks (`#JURYMAST train: yes` makes them one training)"
    if shown.independent:
        return False, "independent tasks, as nothing in it makes a process group (`#JURYMAST train: yes`)"
    if shown.training:
        why = f"`{shown.training}` in it shows a training"
        until = "" if shown.foreign else "; srun's rules hold until the tasks make a process group"
        return True, f"each task is a rank: {why}{until}"
    return None, (
        f"{tasks * active} tasks, and the text shows too little: independent until one makes a process "
        "group of torch's, ranks of one training from then on; `#JURYMAST train: yes` or `no` says which"
    )


def _around_tasks(
    words: Sequence[str], variables: Mapping[str, str], active: int, around: Sequence[str]
) -> str:
    """What programs around the tasks of a step, of its own or the site's, do otherwise than under srun: they
    run around each rank, but for one in a container, which may not have them."""
    names = [others.name_of(word) for word in words]
    step = srun.parse(list(words[names.index("srun") + 1 :])) if "srun" in names else None
    tasks = recognise.tasks_a_node(step, variables, active) if step is not None else 0
    if (
        step is None
        or tasks < 2
        or recognise.starts_launcher(step.command, recognise.read_shell_script, variables)
    ):
        return ""
    if not recognise.in_container(step.command, recognise.read_shell_script) and not recognise.in_image(step):
        return ""
    own = [f"--{name}" for name in ("task-prolog", "task-epilog") if step.has(name)]
    told = " and ".join([*own, *around])
    return f"{told}: once on each node, spares too, not for each of its {tasks} tasks" if told else ""


def _no_ranks(step: CommandLine, tasks: int, variables: Mapping[str, str]) -> tuple[bool | None, str]:
    if tasks > 1 and recognise.names_python(step.command, variables):
        return (
            False,
            f"{others.name_of(step.command[0])} is not known to start ranks: no failure of theirs is handled",
        )
    line, *read = recognise.texts(step.command, recognise.read_shell_script, variables)
    if (scripts := recognise.SHELL_SCRIPT.findall(line)) and not read:
        return None, f"{scripts[0]} cannot be read here: what it starts is known only when it runs"
    if inside := next(filter(None, map(others.INSIDE.search, (line, *read))), None):
        program = others.of_module(inside)
        return False, f"{program}: {others.UNSEEN[program]}, so nothing is handled; {others.INSTEAD}"
    return False, "not a training: runs as under sbatch"


def _launcher(step: CommandLine, variables: Mapping[str, str], active: int) -> tuple[bool | None, str]:
    if _on_each_node(step.command):
        return active == 1, "one training on each node" + ", without failure handling" * (active > 1)
    if recognise.on_one_node(step, variables) and active > 1:
        if recognise.is_part(step.command, recognise.read_shell_script, variables):
            return True, "a part for one node: joined to one training, if there is one for each node"
        return False, "a launcher on one node of several: runs without failure handling"
    if any("$" in (step.last(size) or "") for size in SIZES):
        return None, "how many nodes and tasks it has is known only when it runs; on all nodes, it is handled"
    tasks = recognise.tasks_a_node(step, variables, active)
    if tasks == 1:
        return True, "a launcher: runs under the agents on all nodes, spares in reserve"
    if not tasks:
        return False, "a launcher that is not on all nodes: runs without failure handling"
    return (
        False,
        f"a launcher in each of {tasks} tasks a node: runs without failure handling; one task a node",
    )
