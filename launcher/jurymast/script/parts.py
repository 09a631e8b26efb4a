"""A training that a batch script starts by one srun for each node: each srun is a part.

The parts meet here. The first part starts one step for all, and the others relay what their node's ranks
print. torchrun would wait for all parts as well, so this loses no time. If some parts do not come, the others
run unchanged.
"""

from __future__ import annotations

import hmac
import itertools
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jurymast.cluster.sbatch import CommandLine, Given
from jurymast.jobs import has_ended
from jurymast.rundir import RunDirectory, make_folder
from jurymast.script.notes import note, note_first, noted, say
from jurymast.script.output import Output, relayed
from jurymast.script.recognise import named_node
from jurymast.script.signals import PartSignals
from jurymast.script.step import ANSWER, POLL_S, Step

# The parts of a loop in a script come within seconds, or within minutes if it sleeps after the first one.
LIMIT_S = 300.0
PART, WORD, ENDED = "part-{}.json", "word.json", "ended.json"
# Options that only one part has, or that would mean something else for all nodes together.
OWN = frozenset({"relative", "exclude", "gpus"})
SHELLS = frozenset({"_", "SHLVL"})


@dataclass(frozen=True)
class Part:
    """One srun. `node`: the node that it names, if any. `environment`: the variables of its command."""

    command: tuple[str, ...]
    node: str
    environment: dict[str, str]
    pid: int

    @classmethod
    def of(cls, srun: CommandLine, environment: Mapping[str, str], nodes: Sequence[str]) -> Part:
        node = named_node(srun, nodes)
        return cls(tuple(srun.command), node, {**environment, **_exported(srun)}, os.getpid())


def _exported(srun: CommandLine) -> dict[str, str]:
    """The variables to which srun's --export gives a value."""
    entries = [entry.partition("=") for entry in (srun.last("export") or "").split(",")]
    return {name: value for name, equals, value in entries if equals}


def run(step: Step, srun: CommandLine, training: str) -> int | None:
    """Run a part of this training; returns its exit code, or None if the part has to run unchanged. Raises
    CannotOpen before the others count on this part."""
    Output(srun, os.environ, step.seen())
    part = Part.of(srun, os.environ, step.nodes)
    folder, number = join(step.parts / training, part, step.active)
    return _lead(step, srun, folder, part) if number == 0 else _follow(step, srun, folder, number)


def join(place: Path, part: Part, size: int) -> tuple[Path, int]:
    """Return the folder where the parts of this training meet, and this part's number among them. If the
    parts of one training are complete, the next part begins another: a script may start the same training
    again."""
    for count in itertools.count(1):
        folder = place.with_name(f"{place.name}-{count}")
        make_folder(folder)
        for number in range(size):
            first = noted(folder / PART.format(0)) if number else None
            if note_first(folder / PART.format(number), _kept(part, first)):
                return folder, number
    raise AssertionError("unreachable")


def _kept(part: Part, first: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a part writes to its file. Its variables may be secrets: the first part writes only hashes of
    them, with a random key, and each other part only those that differ (None: it has no such variable)."""
    kept = {"command": part.command, "node": part.node, "pid": part.pid}
    if first is None or "hashes" not in first:
        key = os.urandom(32).hex()
        return {**kept, "key": key, "hashes": _hashes(part.environment, key)}
    theirs, ours = first["hashes"], _hashes(part.environment, first["key"])
    differ = [name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)]
    return {**kept, "own": {name: part.environment.get(name) for name in differ}}


def _hashes(environment: Mapping[str, str], key: str) -> dict[str, str]:
    keyed = key.encode()
    return {name: hmac.digest(keyed, os.fsencode(text), "sha256").hex() for name, text in environment.items()}


def gather(folder: Path, first: Part, size: int, limit_s: float = LIMIT_S) -> list[Part] | None:
    """Return all parts once they have come, the `first` one of which is this process; None if some do not
    come in time: then no part can join any more."""
    end = time.monotonic() + limit_s
    files = [folder / PART.format(number) for number in range(size)]
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            taken = [note_first(file, None) for file in files]
            if any(taken):
                _forget(files)
                return None
            break
        time.sleep(POLL_S)
    parts = [first, *(_part_in(noted(file), first) for file in files[1:])]
    _forget(files)
    return parts


def _part_in(kept: Mapping[str, Any], first: Part) -> Part:
    environment = {**first.environment, **kept["own"]}
    return Part(
        tuple(kept["command"]), kept["node"],
        {name: text for name, text in environment.items() if text is not None}, kept["pid"],
    )  # fmt: skip


def _forget(files: Sequence[Path]) -> None:
    """Drop what the files say of variables. Their names stay, and with them who has joined."""
    for file in files:
        note(file, {"pid": (noted(file) or {}).get("pid")})


def places(parts: Sequence[Part], nodes: Sequence[str]) -> list[int]:
    """The place of each part's ranks among `nodes`: that of the node that the part names, or a free one."""
    left = list(range(len(nodes)))
    chosen: dict[int, int] = {}
    for number, part in enumerate(parts):
        if part.node in nodes and (place := nodes.index(part.node)) in left:
            left.remove(place)
            chosen[number] = place
    return [chosen[number] if number in chosen else left.pop(0) for number in range(len(parts))]


def shell_text(part: Part, first: Part) -> str:
    """Shell text that turns the first part's command and environment into those of another part."""
    ours, theirs = first.environment, part.environment
    differ = [n for n in sorted({*ours, *theirs} - SHELLS) if ours.get(n) != theirs.get(n)]
    differ = [name for name in differ if name.isidentifier()]  # skips shell functions, whose names differ
    lines = [f"export {name}={shlex.quote(theirs[name])}" for name in differ if name in theirs]
    lines += [f"unset {name}" for name in differ if name not in theirs]
    return "\n".join([*lines, f"set -- {shlex.join(part.command)}"])


def for_all(srun: CommandLine) -> CommandLine:
    """The first part's srun, changed into one for all nodes."""
    options = [given for given in srun.options if given.name not in OWN]
    if gpus := srun.last("gpus"):
        options.append(Given("gpus-per-node", gpus, (f"--gpus-per-node={gpus}",)))
    return replace(srun, options=options)


def _lead(step: Step, srun: CommandLine, folder: Path, first: Part) -> int | None:
    parts = gather(folder, first, step.active)
    if parts is None:
        note(folder / WORD, {})
        say(
            f"not all {step.active} steps of one node each started within {LIMIT_S:g} s: "
            "they run without failure handling"
        )
        return None
    found = places(parts, step.nodes[: step.active])
    # A part may name a spare node, so shell text is chosen by the ranks that the node has.
    own = {step.likely[place]: shell_text(part, parts[0]) for part, place in zip(parts, found, strict=True)}
    together = step.new_folder()
    note(folder / WORD, {"step": str(together), "places": found})
    code = step.run(for_all(srun), together, own, found[0])
    note(folder / ENDED, {"code": code})
    return code


def _follow(step: Step, srun: CommandLine, folder: Path, number: int) -> int | None:
    leader = noted(folder / PART.format(0))["pid"]
    PartSignals(srun, leader).listen()
    while (word := noted(folder / WORD)) is None:
        if has_ended(leader):
            return 1
        time.sleep(POLL_S)
    if not word:
        return None
    place, together = word["places"][number], Path(word["step"])
    output = Output(srun, os.environ, step.seen(place), folder=together)
    try:
        return _hand_on(folder, together, leader, output, place)
    finally:
        output.close()


def _hand_on(folder: Path, step: Path, leader: int, output: Output, place: int) -> int:
    """Relay what this part's ranks print in the step's trainings until the step ends; returns its exit
    code."""

    def over() -> bool:
        return (folder / ENDED).exists() or has_ended(leader)

    for training in itertools.count(1):
        file = step / ANSWER.format(training)
        while (answer := noted(file)) is None and not over():
            time.sleep(POLL_S)
        # Once it is over, every answer is there.
        if answer is None and (answer := noted(file)) is None:
            break
        if "run" in answer:
            with relayed(RunDirectory(answer["run"]), output, answer["after"], place):
                while not (over() or (step / ANSWER.format(training + 1)).exists()):
                    time.sleep(POLL_S)
    return int((noted(folder / ENDED) or {"code": 1})["code"])
