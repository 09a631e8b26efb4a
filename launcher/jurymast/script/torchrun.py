"""torchrun's command line: what it trains, and how many ranks per node.

torch's own parser would have to import torch, which takes seconds. The tables are those of the parsers of
torch 2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jurymast.errors import UsageError

ALONE = frozenset({"standalone", "module", "no-python", "run-path", "use-env", "virtual-local-rank", "help"})
WITH_VALUE = frozenset({
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
})  # fmt: skip
SHORT = {"m": "module", "r": "redirects", "t": "tee", "h": "help"}
# Options for the nodes' rendezvous. They have no effect, because jurymast brings the nodes together itself.
RENDEZVOUS = frozenset({
    "nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "node-rank",
    "master-addr", "master-port", "local-addr",
})  # fmt: skip
KEPT = frozenset({"nproc-per-node", "module", "no-python", "use-env"})
# Messages for options that would change the ranks and are not supported yet.
NOT_YET = {
    "run-path": "give the script without --run-path",
    "virtual-local-rank": "leave it out",
}
# torch reads an option that is not given from a variable with this prefix.
VARIABLES = "PET_"
LOCAL_RANK = "--local-rank=${local_rank}"  # torch fills in the number


@dataclass(frozen=True)
class TorchrunLaunch:
    """What a launcher starts: a script, a `module` or a `program`, with its arguments. `ranks` per node,
    as written: a number, or auto, gpu, cpu. `nodes`: the largest number of nodes, "" if not given.
    `ignored`: options that have no effect here."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    ranks: str = "1"
    nodes: str = ""
    ignored: tuple[str, ...] = ()


@dataclass
class _Given:
    values: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)


def parse(words: Sequence[str], environment: Mapping[str, str], *, launch: bool = False) -> TorchrunLaunch:
    """What a torchrun command starts. `words` follow `torchrun`, or with `launch`, `python -m
    torch.distributed.launch`. Raises UsageError."""
    given = _split(words)
    for name in VARIABLES_READ:
        variable = VARIABLES + name.upper().replace("-", "_")
        if name not in given.values and variable in environment:
            given.values[name] = environment[variable]
    for name, hint in NOT_YET.items():
        if name in given.values:
            raise UsageError(f"torchrun's --{name} is not supported yet", hint=hint)
    if not given.rest:
        raise UsageError("torchrun: no training script given")
    arguments = tuple(given.rest[1:])
    if launch and "use-env" not in given.values:
        arguments = (LOCAL_RANK, *arguments)
    return TorchrunLaunch(
        script=given.rest[0],
        arguments=arguments,
        module="module" in given.values,
        program="no-python" in given.values,
        ranks=given.values.get("nproc-per-node", "1"),
        nodes="1" if "standalone" in given.values else given.values.get("nnodes", "").rpartition(":")[2],
        ignored=tuple(name for name in given.values if name not in RENDEZVOUS | KEPT),
    )


VARIABLES_READ = ("nproc-per-node", "nnodes", "max-restarts", "no-python", "run-path", "module")


def _split(words: Sequence[str]) -> _Given:
    given = _Given()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            given.rest = rest
            break
        if not word.startswith("-") or word == "-":
            given.rest = [word, *rest]
            break
        name, value = _option(word)
        if name in WITH_VALUE:
            if value is None and not rest:
                raise UsageError(f"torchrun: {word} needs a value")
            given.values[name] = value if value is not None else rest.pop(0)
        else:
            given.values[name] = value or "1"
        if name == "module":  # torch reads a module's name only in the script's place
            continue
    return given


def _option(word: str) -> tuple[str, str | None]:
    """The option's full name with dashes, and the value if it is part of the word."""
    if not word.startswith("--"):
        if word[1] not in SHORT:
            raise UsageError(f"torchrun: unknown option {word}")
        return SHORT[word[1]], word[2:].removeprefix("=") or None
    typed, equals, value = word[2:].partition("=")
    typed = typed.replace("_", "-")
    names = ALONE | WITH_VALUE
    found = [typed] if typed in names else sorted(name for name in names if name.startswith(typed))
    if len(found) != 1:
        what = f"ambiguous ({', '.join(found)})" if found else "unknown"
        raise UsageError(f"torchrun: option --{typed} is {what}")
    return found[0], value if equals else None


def rank_count(ranks: str, gpus: int, processors: int) -> int:
    """The number of ranks on a node, as torch counts them: a number; `gpu`, its GPUs; `cpu`, its processors;
    `auto`, its GPUs, or its processors if it has none. Raises UsageError."""
    if ranks.isdigit() and int(ranks):
        return int(ranks)
    if ranks == "gpu" and gpus:
        return gpus
    if ranks == "auto":
        return gpus or processors
    if ranks == "cpu":
        return processors
    raise UsageError(
        f"torchrun: --nproc-per-node={ranks}: must be a number, auto, cpu or gpu (if the node has one)"
    )
