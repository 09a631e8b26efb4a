"""Launchers of others in a command, also in what a shell reads that it starts. jurymast does not see their
ranks, so a step that starts one runs as under sbatch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from jurymast.script import recognise, shell

# Words before a command that do not change which one it is.
BEFORE = frozenset({
    "!", "command", "coproc", "do", "elif", "else", "exec", "if", "nohup", "setsid", "then", "time",
    "until", "while", "{",
})  # fmt: skip
# Programs after whose options another command may stand.
AROUND = recognise.WRAPPERS | {"parallel", "sudo", "xargs"}
# Launchers whose ranks jurymast does not see.
UNSEEN = {
    "colossalai": "starts its ranks by itself (ssh)", "composer": "starts its ranks by itself",
    "deepspeed": "starts its ranks by itself (ssh, pdsh)",
    "horovodrun": "starts its ranks by itself", "mpiexec": "MPI starts the ranks",
    "mpirun": "MPI starts the ranks", "orterun": "MPI starts the ranks", "prterun": "MPI starts the ranks",
    "prun": "MPI starts the ranks", "ray": "Ray starts the ranks", "torchx": "starts a job of its own",
}  # fmt: skip
# MPIs name theirs in these ways as well: mpirun.openmpi, mpiexec.hydra, mpirun_rsh.
_VARIANT = re.compile(r"(?<=mpirun|piexec)(\.\w+|_rsh)$")
# Further commands that are looked at in those of a step's shell, and how deep.
DEEP_MAX = 4
# The same launchers as modules of Python's; and where they may stand in a container's command, or a shell's.
_MODULES = {
    "horovod": "horovodrun",
    **{name: name for name in ("colossalai", "composer", "deepspeed", "torchx")},
}
INSIDE = re.compile(
    rf"-m\s+({'|'.join(_MODULES)})\b"
    r"|(?:^|[\s;&|/])(colossalai|deepspeed|horovodrun|mpiexec|mpirun|orterun|torchx)(?=\s)",
    re.MULTILINE,
)
# Programs that start a command outside the job's steps.
ELSEWHERE = frozenset({"clush", "parallel-ssh", "pdsh", "pssh", "ssh"})
OUTSIDE = "starts it outside the job's steps, so nothing is handled"
INSTEAD = "put `srun torchrun --nproc-per-node=N` in its place"
# Where a script chooses between commands.
_CHOICE = re.compile(r"\b(?:else|elif|esac)\b")


def name_of(word: str) -> str:
    return word.rpartition("/")[2]


def unseen(words: Sequence[str]) -> str:
    """The launcher whose ranks jurymast does not see that a command starts: as a module of Python's, or as
    its program, also after a wrapper or in a container; "" if there is none."""
    if not words:
        return ""
    if found := re.match(r"\S*\bpython[\d.]*(?: -(?!m )\S+)* -m (\w+)", " ".join(words)):
        return _MODULES.get(found[1], "")
    names = [_VARIANT.sub("", name_of(word)) for word in words]
    if names[0] not in AROUND | recognise.CONTAINERS:
        return names[0] if names[0] in UNSEEN else ""
    inside = next(filter(None, (INSIDE.search(f"{name} ") for name in names)), None)
    return of_module(inside) if inside else ""


def of_module(inside: re.Match[str]) -> str:
    return _MODULES[inside[1]] if inside[1] else inside[2]


def unseen_within(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Why jurymast does not see what the commands start that a step has a shell read; "" if it sees one of
    torch's launchers among them, if they start nothing of others', or if a script chooses among several."""
    why, python = "", False
    for words in _within_shell(command, variables):
        line, program = " ".join(words), unseen(words)
        starts = recognise.LAUNCHER.search(line) or recognise.PYTHON.search(line)
        if program:
            why = why or f"{program}: {UNSEEN[program]}, so nothing is handled; {INSTEAD}"
        elif words and name_of(words[0]) in ELSEWHERE and starts:
            why = why or f"{name_of(words[0])}: {OUTSIDE}; {INSTEAD}"
        elif words and starts and may_start(words):
            python = True
            if recognise.LAUNCHER.search(line):
                return ""
    texts = recognise.texts(command, recognise.read_shell_script, variables) if why and python else []
    return "" if any(map(_CHOICE.search, texts)) else why


def _within_shell(
    command: Sequence[str], variables: Mapping[str, str], deep: int = DEEP_MAX
) -> Iterator[list[str]]:
    """The words of the command; if it is a shell, maybe in a container or after a wrapper, those of all that
    this one reads."""
    words = stripped(command)
    if words and name_of(words[0]) in AROUND | recognise.CONTAINERS:
        words = words[next((at for at, word in enumerate(words) if name_of(word) in recognise.SHELLS), 0) :]
    text = for_another_shell(words) if deep else ""
    if not text:
        yield words
        return
    for one in shell.commands(text, variables):
        yield from _within_shell(one.words, {**variables, **one.exported}, deep - 1)


def stripped(words: Sequence[str]) -> list[str]:
    """The words from the one on that names the program."""
    words = list(words)
    if words[:1] == ["coproc"] and words[2:3] == ["{"]:  # after its name
        del words[:2]
    while words and (words[0] in BEFORE or re.match(r"\w+=", words[0])):
        words.pop(0)
    return words


def for_another_shell(words: Sequence[str]) -> str:
    """The text that a command has a shell read: `eval`'s words, a trap's, a shell's -c, or a script's text,
    if it can be read here; "" if there is none."""
    if not words:
        return ""
    program, rest = name_of(words[0]), list(words[1:])
    if program == "eval":
        return " ".join(rest)
    if program == "trap":
        return rest[0] if len(rest) > 1 and rest[0] != "-" else ""
    if program in recognise.SHELLS or words[:1] in (["source"], ["."]):
        options, rest = options_of(rest)
        if any(re.fullmatch(r"-\w*c\w*", option) for option in options):
            return rest[0] if rest else ""
        return recognise.read_shell_script(rest[0]) if rest else ""
    text = recognise.read_shell_script(words[0]) if "/" in words[0][:-1] else ""
    return text if re.match(rf"#!\s*\S*(/|env\s+)({'|'.join(recognise.SHELLS)})\b", text) else ""


def options_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A shell's options, without the names that follow -o, and what comes after them."""
    rest, options = list(words), list[str]()
    while rest and re.match(r"[-+]\w|--", rest[0]):
        options.append(rest.pop(0))
        if re.fullmatch(r"[-+]\w*[oO]", options[-1]) and rest:
            rest.pop(0)
    return options, rest


def may_start(words: Sequence[str]) -> bool:
    """Whether the command's program, rather than one of its arguments, may be what starts a training."""
    program = name_of(words[0])
    known = program in recognise.SHELLS or program in AROUND or program in recognise.CONTAINERS
    named = re.match(r"python|torchrun|accelerate|fabric|lightning", program) is not None
    return known or named or recognise.read_shell_script(words[0]).startswith("#!")
