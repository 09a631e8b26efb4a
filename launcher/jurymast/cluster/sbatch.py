"""What sbatch reads: its options, and a batch script's `#SBATCH` lines; also jurymast's own `#JURYMAST`
lines.

sbatch's options pass through unchanged, and mistyped ones are found here. The table is the union of the
option parsers of sbatch 22.05.8 and 24.11.5. For an option that is not in it, the installed sbatch is asked:
its `--help` has the options of newer releases and of the site's SPANK plugins.

Lines are read as sbatch's `_opt_batch_script` and `get_argument` (src/sbatch/opt.c) read them. The options
that decide the run's size are merged as sbatch merges them: lines of the script, then `SBATCH_*` variables,
then the command line; the last one counts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path

from jurymast import foreign, programs
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import ScriptError, UsageError

# ---- options

# Long options, by whether they take a value.
REQUIRED = frozenset({
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster",
    "cluster-constraint", "clusters", "comment", "constraint", "container", "container-id", "context",
    "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline",
    "delay-boot", "dependency", "distribution", "error", "exclude", "export", "export-file", "extra",
    "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name", "kill-on-invalid-dep",
    "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu",
    "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "ntasks-per-tres", "open-mode", "output",
    "partition", "power", "prefer", "priority", "profile", "qos", "reservation", "segment", "signal",
    "sockets-per-node", "switches", "tasks-per-node", "thread-spec", "threads-per-core", "time",
    "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap",
})  # fmt: skip
OPTIONAL = frozenset({
    "exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate", "resv-ports",
})  # fmt: skip
NONE = frozenset({
    "contiguous", "help", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe", "parsable",
    "quiet", "reboot", "requeue", "spread-job", "stepmgr", "test-only", "usage", "use-min-nodes",
    "verbose", "version", "wait",
})  # fmt: skip
SHORT = {
    "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "h": "help",
    "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit",
    "Q": "quiet", "S": "core-spec", "V": "version", "W": "wait",
}  # fmt: skip


@dataclass(frozen=True)
class Grammar:
    """The options of one of Slurm's commands (`program`): the long ones, by whether they take a value, and
    the long names of short ones."""

    program: str
    required: frozenset[str]
    optional: frozenset[str]
    none: frozenset[str]
    short: Mapping[str, str]

    @property
    def long(self) -> frozenset[str]:
        return self.required | self.optional | self.none

    def with_installed(self) -> Grammar:
        """This grammar, and the options that the installed command's --help has besides."""
        found = {name: (short, mark) for short, name, mark in OPTION_HELP.findall(_help_of(self.program))}
        new = found.keys() - self.long

        def taking(mark: str) -> frozenset[str]:
            return frozenset(name for name in new if found[name][1] == mark)

        short = {found[name][0]: name for name in new if found[name][0] not in self.short}
        return replace(
            self,
            required=self.required | taking("="),
            optional=self.optional | taking("[="),
            none=self.none | taking(""),
            short={**short, **self.short},
        )


# An option in the text of --help; what explains it stands further right. Slurm prints those of SPANK plugins
# (src/common/spank.c, _spank_opt_print) as it prints its own.
OPTION_HELP = re.compile(r"^ {0,8}(?:-(\w),? +)?--([a-z0-9][\w-]*)(\[?=)?", re.MULTILINE)
HELP_LIMIT_S = 10.0


@cache
def _answer(program: str, *options: str) -> str:
    """What the command prints for these options; "" if it is not here."""
    try:
        done = programs.run(
            [program, *options], capture_output=True, stdin=subprocess.DEVNULL, timeout=HELP_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _help_of(program: str) -> str:
    return _answer(program, "--help")


def version_of(program: str, *options: str) -> str:
    """The release that the command with these options says it is from, such as "slurm-wlm 22.05.8"; "" if it
    does not say."""
    said = _answer(program, *options, "--version").strip()
    return said if re.fullmatch(r"slurm\S* \S+", said) else ""


def _lacks_value(program: str, option: str) -> bool:
    """Whether an option of a plugin, which --help shows with a value, does without: the command then finds
    the next one. Else it takes that for the value, and ends for want of a script or a command."""
    return bool(version_of(program, option))


SBATCH = Grammar("sbatch", REQUIRED, OPTIONAL, NONE, SHORT)


@dataclass(frozen=True)
class Given:
    """One option: its full name, its value (None if not given) and its words as typed. `where`: its place in
    a batch script, as a message's beginning; "" if it is not from a script."""

    name: str
    value: str | None
    words: tuple[str, ...]
    where: str = ""


def last_of(options: Iterable[Given], names: Iterable[str]) -> Given | None:
    """The last of these options with one of these names, which is the one that Slurm uses."""
    found = [given for given in options if given.name in names]
    return found[-1] if found else None


def words_of(options: Iterable[Given], without: Collection[str]) -> list[str]:
    """The words of these options as typed and in their order, except those of options `without`."""
    return [word for given in options if given.name not in without for word in given.words]


@dataclass(frozen=True)
class CommandLine:
    """A split command line: the words of our own options, Slurm's options, and sbatch's script or srun's
    command, with its arguments."""

    own: list[str] = field(default_factory=list)
    options: list[Given] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def given(self, *names: str) -> Given | None:
        return last_of(self.options, names)

    def last(self, *names: str) -> str | None:
        """Value of the last of these options, which is the one that Slurm uses; None if not given."""
        given = self.given(*names)
        return given.value if given else None

    def has(self, *names: str) -> bool:
        return self.given(*names) is not None


def split_command_line(
    words: Iterable[str], own: Mapping[str, bool], grammar: Grammar = SBATCH
) -> CommandLine:
    """Split `[our options] [sbatch options] [--] SCRIPT [arguments]`.

    `own` has our option names, with their dashes, and whether each takes a value; they hide sbatch's options
    of the same name. Everything from `--` or from the first word that is no option belongs to the script.
    Raises UsageError for an unknown or ambiguous option and for a missing or superfluous value.
    """
    line = CommandLine()
    rest = list(words)
    while rest:
        _read_next(line, rest, own, grammar)
    return line


def _read_next(line: CommandLine, rest: list[str], own: Mapping[str, bool], grammar: Grammar) -> None:
    """Move the next option, or everything from the script on, from the words `rest` to `line`."""
    word = rest.pop(0)
    if word == "--" or word == "-" or not word.startswith("-"):
        if word == ":":
            raise UsageError(
                "heterogeneous jobs (`:` between options) are not supported",
                hint="submit one run of equal nodes",
            )
        line.command.extend(rest if word == "--" else [word, *rest])
        rest.clear()
        return
    read = _long_option if word.startswith("--") else _short_options
    read(line, word, rest, own, grammar)


def _long_option(
    line: CommandLine, word: str, rest: list[str], own: Mapping[str, bool], grammar: Grammar
) -> None:
    typed, equals, value = word.partition("=")
    ours, known = typed in own, grammar.long
    if not ours and not any(name.startswith(typed[2:]) for name in known):
        grammar = grammar.with_installed()
    name = typed[2:] if ours else _full_name(typed, own, grammar)
    if equals and (not own[typed] if ours else name in grammar.none):
        raise UsageError(f"option --{name} takes no value")
    # An abbreviation is passed on in full, so that later readers find the option by name.
    words = [f"--{name}{equals}{value}"]
    needs = own[typed] if ours else name in grammar.required
    if needs and not equals and (ours or name in known or not _lacks_value(grammar.program, f"--{name}")):
        value = _value(typed, rest)
        words.append(value)
    if ours:
        line.own.extend(words)
    else:
        line.options.append(Given(name, value if equals or len(words) > 1 else None, tuple(words)))


def _short_options(
    line: CommandLine, word: str, rest: list[str], own: Mapping[str, bool], grammar: Grammar
) -> None:
    """Read one word of short options: `-N4`, `-N 4`, `-HkN4`. A bundle is split."""
    letters = word[1:]
    while letters:
        flag, ours = f"-{letters[0]}", f"-{letters[0]}" in own
        if not ours and letters[0] not in grammar.short:
            grammar = grammar.with_installed()
        name, letters = grammar.short.get(letters[0], ""), letters[1:]
        if not ours and not name:
            raise UsageError(
                f"unknown option {flag} in {word}", hint="see jurymast submit --help and man sbatch"
            )
        value, words = None, [flag]
        # getopt takes the rest of the word as a value, also as an optional one: -koff is --no-kill=off
        if own.get(flag, name in grammar.required) or (letters and not ours and name in grammar.optional):
            value = letters or _value(flag, rest)
            words = [flag + value] if letters and not ours else [flag, value]
            letters = ""
        if ours:
            line.own.extend(words)
        else:
            line.options.append(Given(name, value, tuple(words)))


def _value(option: str, rest: list[str]) -> str:
    if not rest or rest[0] == "--":
        raise UsageError(f"option {option} needs a value")
    return rest.pop(0)


def _full_name(typed: str, own: Mapping[str, bool], grammar: Grammar) -> str:
    """The full name of the option `typed`, which may be abbreviated as Slurm allows. Raises UsageError."""
    word, known = typed[2:], grammar.long
    if word in known:
        return word
    matches = sorted(name for name in known if name.startswith(word))
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1 and not any(option.startswith(typed) for option in own):
        raise UsageError(f"option {typed} is ambiguous: " + ", ".join(f"--{name}" for name in matches))
    names = [*(option for option in own if option.startswith("--")), *(f"--{name}" for name in known)]
    hint = TORCHRUN_HINTS.get(word.replace("_", "-"), "see jurymast submit --help and man sbatch")
    if not _help_of(grammar.program):
        hint += f"; {grammar.program} is not here, so options of Slurm's plugins are not known"
    elif version := version_of(grammar.program):
        hint += f"; {grammar.program} is from {version} here, which does not have it"
    raise UsageError(f"unknown option {typed}{did_you_mean(typed, names)}", hint=hint)


# Options that people know from torchrun, and hints for them.
TORCHRUN_HINTS = {
    "nnodes": "use --nodes N for active nodes and --spares N for spare nodes",
    "node-rank": "leave it out; jurymast numbers the nodes",
    "standalone": "to run on this machine, use --cluster local",
    "max-restarts": "set restarts in the policy: failures.restarts.application, for example 3 per 1h",
    "monitor-interval": "leave it out; jurymast watches the ranks itself",
    "module": "write jurymast submit [options] -- -m MODULE [args]",
    **{
        f"rdzv-{name}": "jurymast does the rendezvous; leave it out"
        for name in ("backend", "endpoint", "id", "conf")
    },
    **{f"master-{name}": "jurymast does the rendezvous; leave it out" for name in ("addr", "port")},
}


# Options that decide where a job may run. The helper job of a requeue is submitted with the same ones.
WHERE = ("partition", "account", "qos", "reservation", "clusters", "cluster")


def where_options(options: Iterable[Given]) -> list[str]:
    """Those of the options that decide where the job may run, in their long form."""
    return [f"--{given.name}={given.value}" for given in options if given.name in WHERE]


# By what people ask for the GPUs of a node, or of its one task: a number of them, or a list of resources.
GPUS_OF_A_NODE, LISTS_OF_A_NODE = (
    ("gpus-per-node", "gpus-per-task"),
    ("gres", "tres-per-node", "tres-per-task"),
)


def ranks_per_node(line: CommandLine) -> int:
    """GPUs per node from whichever option asks for some, with one task per node; 1 if none does. Raises
    UsageError for a wrong count."""
    for option in (*GPUS_OF_A_NODE, *LISTS_OF_A_NODE):
        text = line.last(option) or ""
        count = _gres_gpus(text, option) if option in LISTS_OF_A_NODE else _typed_counts(text, option)
        if count:
            return count
    sockets = line.last("sockets-per-node") or "1"
    of_a_socket = _typed_counts(line.last("gpus-per-socket") or "", "gpus-per-socket")
    return of_a_socket * int(sockets) or 1 if sockets.isdigit() else 1


def _gres_gpus(text: str, option: str) -> int:
    """The number of GPUs in a list such as `gpu:h100:8,shard:4` or `cpu=4,gres/gpu=8`; a name without a count
    means one."""
    total = 0
    for entry in filter(None, text.split(",")):
        name, _, rest = re.sub("^gres[:/]", "", entry).replace("=", ":").partition(":")
        if name == "gpu":
            total += _typed_counts(rest, option) if rest else 1
    return total


def _typed_counts(text: str, option: str) -> int:
    """The sum of the counts in `[type:]count[,…]`; a type without a count means one."""
    total = 0
    for entry in filter(None, text.split(",")):
        last = entry.rpartition(":")[2]
        if last.isdigit():
            total += int(last)
        elif ":" not in entry and option in LISTS_OF_A_NODE:
            total += 1
        else:
            raise UsageError(f"--{option}={text}: {entry} has no count", hint=f"for example --{option}=8")
    return total


# The lists of the devices that a process may use, of CUDA, ROCm and oneAPI.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
DEVICE = re.compile(r"\d|GPU-|MIG-")
AMD_DEVICE = re.compile(rb"^simd_count [1-9]", re.MULTILINE)


def visible_gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs that a process with these variables may use; 0 if they do not tell. ROCm has several
    lists, each of which hides more."""
    return min((_listed(environment[name]) for name in VISIBLE if environment.get(name)), default=0)


def _listed(text: str) -> int:
    """The number of devices in a list. What is no device (-1, NoDevFiles) ends it."""
    parts = (part.strip() for part in text.split(","))
    return len(list(takewhile(DEVICE.match, parts)))


def usable_gpus(
    environment: Mapping[str, str], dev: Path = Path("/dev"), kfd: Path = Path("/sys/class/kfd/kfd/topology")
) -> int:
    """The same on this node; of GPUs that no variable limits, all that NVIDIA's driver has here, or AMD's,
    which lists processors as well."""
    if any(name in environment for name in VISIBLE):
        return visible_gpus(environment)
    if cards := [path for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit()]:
        return len(cards)
    nodes = kfd.glob("nodes/*/properties") if (dev / "kfd").exists() else ()
    return len([path for path in nodes if AMD_DEVICE.search(foreign.read(path, foreign.NOTE_BYTES_MAX))])


def seconds_of(text: str) -> int | None:
    """A time as Slurm writes it, in seconds: minutes, minutes:seconds, hours:minutes:seconds, or days-hours,
    optionally with minutes and seconds. None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is None and third is None:
        return 60 * (first or 0) + (second or 0)
    return 86_400 * (days or 0) + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)


# ---- batch scripts

STANDARD_INPUT, WRAP = "standard input", "wrap"
HEAD_BYTES_MAX = 1 << 16
SUFFIXES = (".sbatch", ".slurm", ".sh", ".bash")
SBATCH_LINE, JURYMAST_LINE, PBS_LINE = "#SBATCH", "#JURYMAST", "#PBS"
SBATCH_LINES = (SBATCH_LINE, "#SLURM")  # sbatch complains of the second, and reads it all the same
PBS_OTHERS_MAX = 100  # sbatch looks for `#PBS` up to so many lines that are no comments
SPACE = " \t\n\v\f\r"  # what C's isspace knows; a no-break space is none
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
        """Number of the first `#PBS` line, which sbatch reads as well, behind commands, too; None if there is
        none."""
        others = 0
        for number, line in enumerate(self.text.split("\n"), 1):
            if line.startswith(PBS_LINE):
                return number
            others += not line.startswith("#")
            if others > PBS_OTHERS_MAX:
                break
        return None


def is_batch_script(path: Path) -> bool:
    """Whether this file is for sbatch rather than a training: it has a shell in its first line, a shell
    script's name, or lines for sbatch. Raises ScriptError."""
    try:
        with foreign.reading(path) as file:
            text = file.read(HEAD_BYTES_MAX).decode(errors="surrogateescape")
    except OSError as error:
        raise ScriptError(f"the script {path} cannot be read: {error.strerror}") from error
    first = text.partition("\n")[0]
    has_lines = any(_is_sbatch(line) or _is_own(line) for _, line in _comments(text))
    words = first.removeprefix("#!").split()
    python = any(re.fullmatch(r"python[\d.]*", word.rpartition("/")[2]) for word in words)
    if python or path.suffix == ".py":
        return first.startswith("#!") and has_lines
    # A script without an interpreter is refused later, as sbatch does.
    return first.startswith("#!") or has_lines or path.suffix in SUFFIXES


def read_script(path: Path, own: Mapping[str, bool]) -> BatchScript:
    """Read a batch script. Raises ScriptError, and UsageError, which names the line."""
    try:
        text = foreign.read(path, foreign.SCRIPT_BYTES_MAX).decode(errors="surrogateescape")
    except OSError as error:
        raise ScriptError(f"the script {path} cannot be read: {error.strerror}") from error
    return parse(text, str(path), own)


def wrapped(command: str) -> BatchScript:
    """The script that `sbatch --wrap` makes of a command line."""
    head = "# This script was created by sbatch --wrap.\n"
    return BatchScript(WRAP, f"#!/bin/sh\n{head}\n{command}\n", head)


def parse(text: str, name: str, own: Mapping[str, bool]) -> BatchScript:
    """Parse a batch script's text. `own`: our options, as for `split_command_line`. Raises UsageError, which
    names the line."""
    _check_text(text, name)
    lines = [(f"{name}, line {number}: ", line) for number, line in _comments(text)]
    sbatch = _read_sbatch_lines([(where, _body(line)) for where, line in lines if _is_sbatch(line)])
    ours: list[str] = []
    for where, line in lines:
        if _is_own(line):
            with _naming(where):
                ours += _own_words(line.removeprefix(JURYMAST_LINE), own)
    head = [line for _, line in lines[1:]]
    if any(given.name in DONE_HERE for given in sbatch):
        kept = words_of(sbatch, DONE_HERE)
        first = [f"{SBATCH_LINE} {' '.join(map(quoted, kept))}"] if kept else []
        head = first + [line for line in head if not _is_sbatch(line)]
    return BatchScript(name, text, "".join(f"{line}\n" for line in head), tuple(sbatch), tuple(ours))


def _read_sbatch_lines(lines: Iterable[tuple[str, str]]) -> list[Given]:
    """The options in the bodies of `#SBATCH` lines, each with its line's place. sbatch reads the words of all
    lines as one command line: a value may stand on the line below its option."""
    words: list[str] = []
    places: list[str] = []
    for where, body in lines:
        with _naming(where):
            found = list(_words(body))
        words += found
        places += [where] * len(found)
    options: list[Given] = []
    while words:
        where = places[-len(words)]
        line = CommandLine()
        with _naming(where):
            _read_next(line, words, {}, SBATCH)
            _check(line)
        options += [replace(given, where=where) for given in line.options]
    return options


def _own_words(body: str, own: Mapping[str, bool]) -> list[str]:
    line = split_command_line(_words(re.sub(r"^\s*train:\s*", "--train=", body)), own)
    _check(line)
    if line.options:
        said = line.options[0].words[0]
        raise UsageError(f"{said} is not an option of jurymast", hint=f"write {SBATCH_LINE} {said}")
    return line.own


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Begin each usage error with the place where it was found."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}{error}", hint=error.hint) from error


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
    """(number, line) of each line at the top of the script that begins with `#`. Comments that begin with
    white space, and empty lines, may stand between them."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#"):
            yield number, line
        elif line.strip(SPACE)[:1] not in ("#", ""):
            return


def _is_sbatch(line: str) -> bool:
    return line.startswith(SBATCH_LINES)


def _body(line: str) -> str:
    return next(line.removeprefix(kind) for kind in SBATCH_LINES if line.startswith(kind))


def _is_own(line: str) -> bool:
    return re.match(rf"{JURYMAST_LINE}([{SPACE}-]|$)", line) is not None


def _words(text: str) -> Iterator[str]:
    """The words of one line, by sbatch's rules: a backslash makes the next character an ordinary one, also in
    quotes of either kind; from `#` on, also in the middle of a word, all is a comment; an empty word ends the
    line. Raises UsageError for an open quote."""
    at = 0
    while True:
        while at < len(text) and text[at] in SPACE:
            at += 1
        word, quote = "", ""
        while at < len(text) and (quote or text[at] not in SPACE):
            char, at = text[at], at + 1
            if char == "\\":
                taken = text[at : at + 1]
                if quote or taken == " " or taken not in SPACE:
                    word, at = word + taken, at + 1
            elif quote:
                word, quote = (word, "") if char == quote else (word + char, quote)
            elif char in "\"'":
                quote = char
            elif char == "#":
                at = len(text)
            else:
                word += char
        if quote:
            raise UsageError(f"{text.strip()}: No closing quotation")
        if not word:
            return
        yield word


def quoted(word: str) -> str:
    """The word as `_words` reads it."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def _check(line: CommandLine) -> None:
    if line.command and line.command[0].lower() in ("hetjob", "packjob"):
        raise UsageError("heterogeneous jobs are not supported", hint="submit one run of equal nodes")
    if line.command:
        raise UsageError(f"{line.command[0]} is not an option")


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
