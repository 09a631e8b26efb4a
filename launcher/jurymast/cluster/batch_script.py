"""A batch script as sbatch reads it: its `#SBATCH` lines, and jurymast's own `#JURYMAST` lines.

Both are read up to the first line that is neither a comment nor empty. The options that decide the run's size
are merged as sbatch merges them: lines of the script, then `SBATCH_*` variables, then the command line; the
last one counts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jurymast import foreign
from jurymast.cluster.sbatch_options import CommandLine, Given, split_command_line, words_of
from jurymast.errors import ScriptError, UsageError

STANDARD_INPUT = "standard input"
HEAD_BYTES_MAX = 1 << 16
SUFFIXES = (".sbatch", ".slurm", ".sh", ".bash")
SBATCH, OURS, PBS = "#SBATCH", "#JURYMAST", "#PBS"
# The variables that jurymast reads, and the options that they stand for. All others reach sbatch unchanged.
VARIABLES = {
    "SBATCH_ARRAY_INX": "array", "SBATCH_CLUSTERS": "clusters", "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SBATCH_GRES": "gres",
    "SBATCH_IGNORE_PBS": "ignore-pbs", "SBATCH_JOB_NAME": "job-name", "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_PARTITION": "partition", "SBATCH_REQUEUE": "requeue", "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time", "SBATCH_WAIT": "wait",
}  # fmt: skip
# jurymast does what these ask for itself: with them sbatch would print no job id, or return only when the job
# ends.
DONE_HERE = frozenset({"quiet", "wait"})


@dataclass(frozen=True)
class BatchScript:
    """A batch script. `name`: as it was typed. `text`: the whole text. `head`: the comments at its top, which
    sbatch reads, without options that jurymast carries out itself. `sbatch`: the options of its `#SBATCH`
    lines. `own`: the words of its `#JURYMAST` lines."""

    name: str
    text: str
    head: str = ""
    sbatch: tuple[Given, ...] = ()
    own: tuple[str, ...] = ()

    @property
    def job_name(self) -> str:
        """The name that sbatch gives the job if no option names it."""
        return "sbatch" if self.name == STANDARD_INPUT else Path(self.name).name

    @property
    def pbs_line(self) -> int | None:
        """Number of the first `#PBS` line, which sbatch reads as well; None if there is none."""
        return next((number for number, line in _comments(self.text) if _is_for(PBS, line)), None)


def is_batch_script(path: Path) -> bool:
    """Whether this file is for sbatch rather than a training: it has a shell in its first line, a shell
    script's name, or lines for sbatch. Raises ScriptError."""
    try:
        with foreign.reading(path) as file:
            text = file.read(HEAD_BYTES_MAX).decode(errors="surrogateescape")
    except OSError as error:
        raise ScriptError(f"the script {path} cannot be read: {error.strerror}") from error
    first = text.partition("\n")[0]
    has_lines = any(line.startswith((SBATCH, OURS)) for _, line in _comments(text))
    words = first.removeprefix("#!").split()
    python = any(re.fullmatch(r"python[\d.]*", word.rpartition("/")[2]) for word in words)
    if python or path.suffix == ".py":
        return first.startswith("#!") and has_lines
    # A script without an interpreter is refused later, as sbatch does.
    return first.startswith("#!") or has_lines or path.suffix in SUFFIXES


def read_script(path: Path, own: Mapping[str, bool]) -> BatchScript:
    """Read a batch script. Raises ScriptError, and UsageError, which names the line."""
    try:
        text = foreign.read(path).decode(errors="surrogateescape")
    except OSError as error:
        raise ScriptError(f"the script {path} cannot be read: {error.strerror}") from error
    return parse(text, str(path), own)


def wrapped(command: str) -> BatchScript:
    """The script that `sbatch --wrap` makes of a command line."""
    head = "# This script was created by sbatch --wrap.\n"
    return BatchScript("wrap", f"#!/bin/sh\n{head}\n{command}\n", head)


def parse(text: str, name: str, own: Mapping[str, bool]) -> BatchScript:
    """Parse a batch script's text. `own`: our options, as for `split_command_line`. Raises UsageError, which
    names the line."""
    _check_text(text, name)
    head: list[str] = []
    sbatch: list[Given] = []
    ours: list[str] = []
    for number, line in _comments(text):
        kind = next((kind for kind in (SBATCH, OURS) if _is_for(kind, line)), None)
        if kind is not None:
            where = f"{name}, line {number}: "
            try:
                split = split_command_line(_words(line[len(kind) :]), own if kind == OURS else {})
                _check(split, kind)
            except UsageError as error:
                raise UsageError(f"{where}{error}", hint=error.hint) from error
            sbatch += [replace(given, where=where) for given in split.options]
            ours += split.own
            if split.has(*DONE_HERE):
                line = f"{SBATCH} {shlex.join(words_of(split.options, DONE_HERE))}"
        head.append(f"{line}\n")
    return BatchScript(name, text, "".join(head[1:]), tuple(sbatch), tuple(ours))


def _check_text(text: str, name: str) -> None:
    """Refuse the texts that sbatch refuses."""
    if not text.startswith("#!"):
        raise UsageError(
            f"{name}, line 1: a batch script must begin with #! and its interpreter",
            hint="for example #!/bin/bash",
        )
    for what, mark, hint in (
        ("ends with a Windows line break", "\r\n", f"for example: sed -i 's/\\r$//' {shlex.quote(name)}"),
        ("has a NUL character", "\0", ""),
    ):
        before, found, _ = text.partition(mark)
        if found:
            number = 1 + before.count("\n")
            raise UsageError(f"{name}, line {number}: {what}, which Slurm does not take", hint=hint)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of each comment at the top of the script."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            yield number, line
        elif line.strip():
            return


def _is_for(kind: str, line: str) -> bool:
    return re.match(rf"{kind}(\s|$)", line) is not None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"{text.strip()}: {error}") from error


def _check(line: CommandLine, kind: str) -> None:
    if line.command and line.command[0] in ("hetjob", "packjob"):
        raise UsageError("heterogeneous jobs are not supported", hint="submit one run of equal nodes")
    if line.command:
        raise UsageError(f"{line.command[0]} is not an option")
    if kind == OURS and line.options:
        said = line.options[0].words[0]
        raise UsageError(f"{said} is not an option of jurymast", hint=f"write {SBATCH} {said}")


def merged(script: BatchScript | None, environment: Mapping[str, str], line: CommandLine) -> CommandLine:
    """All options of the script, if there is one, the environment and the command line; the last one
    counts."""
    variables = [
        Given(name, environment[variable], (variable,))
        for variable, name in VARIABLES.items()
        if variable in environment
    ]
    in_script = script.sbatch if script else ()
    return CommandLine(line.own, [*in_script, *variables, *line.options], line.command)


def find_script(words: list[str], directory: Path) -> Path | None:
    """The batch script with which these words of a command line begin; None if they begin with something
    else."""
    if not words or words[0].startswith("-"):
        return None
    path = directory / words[0]
    return path if os.path.isfile(path) and is_batch_script(path) else None
