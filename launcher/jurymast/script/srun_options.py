"""srun's option grammar, to find the command behind its options.

The union of srun 22.05 and 24.11, and of the pyxis plugin's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jurymast.cluster import sbatch_options as sbatch

REQUIRED = (sbatch.REQUIRED - {"array", "wrap", "export-file", "ignore-pbs"}) | {
    "accel-bind", "bcast-exclude", "cpu-bind", "epilog", "het-group", "jobid", "launch-cmd", "launcher-opts",
    "max-exit-timeout", "max-threads", "mpi", "msg-timeout", "pack-group", "prolog", "relative",
    "slurmd-debug", "task-epilog", "task-prolog", "threads", "treewidth", "wait",
    "container-image", "container-mounts", "container-workdir", "container-name", "container-save",
    "container-env",
}  # fmt: skip
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
LONG = REQUIRED | OPTIONAL | NONE
SHORT = {
    **{letter: name for letter, name in sbatch.SHORT.items() if letter not in "aFW"},
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait",
    "X": "disable-status", "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
}  # fmt: skip


@dataclass(frozen=True)
class Srun:
    """One call of srun: (name, value, words as typed) of each option, and the command."""

    options: tuple[tuple[str, str | None, tuple[str, ...]], ...]
    command: tuple[str, ...]

    def last(self, *names: str) -> str | None:
        """Value of the last of these; "" without one, None when none is there."""
        found = [value or "" for name, value, _ in self.options if name in names]
        return found[-1] if found else None

    def without(self, names: frozenset[str]) -> list[str]:
        """The options as typed, but for these."""
        return [word for name, _, words in self.options if name not in names for word in words]


def parse(arguments: Sequence[str]) -> Srun | None:
    """None for what this grammar does not know: the real srun may."""
    options: list[tuple[str, str | None, tuple[str, ...]]] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        found = _long(word, rest) if word.startswith("--") else _short(word, rest)
        if found is None:
            return None
        options += found
    if ":" in rest:  # a second step's options: heterogeneous
        return None
    return Srun(tuple(options), tuple(rest))


def _long(word: str, rest: list[str]) -> list[tuple[str, str | None, tuple[str, ...]]] | None:
    typed, equals, value = word[2:].partition("=")
    names = [typed] if typed in LONG else [name for name in LONG if name.startswith(typed)]
    if len(names) != 1:
        return None
    if equals:
        return [(names[0], value, (word,))]
    if names[0] in REQUIRED:
        if not rest:
            return None
        value = rest.pop(0)
        return [(names[0], value, (word, value))]
    return [(names[0], None, (word,))]


def _short(word: str, rest: list[str]) -> list[tuple[str, str | None, tuple[str, ...]]] | None:
    found: list[tuple[str, str | None, tuple[str, ...]]] = []
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = SHORT.get(letter)
        if name is None:
            return None
        if name in REQUIRED:
            if not letters and not rest:
                return None
            value, words = (
                (letters, (f"-{letter}{letters}",)) if letters else (rest[0], (f"-{letter}", rest.pop(0)))
            )
            return [*found, (name, value, words)]
        if name in OPTIONAL and letters:
            return [*found, (name, letters, (f"-{letter}{letters}",))]
        found.append((name, None, (f"-{letter}",)))
    return found
