"""torchrun's command line: what it trains, and how many ranks per node.

To get torch's own parser, torch would have to be imported, which takes seconds. This one has the options of
the parsers of torch 2.6 to 2.13.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jurymast.errors import UsageError

ALONE = ("standalone", "module", "no-python", "run-path", "use-env", "virtual-local-rank", "help")
WITH_VALUE = (
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
)  # fmt: skip
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t", "help": "-h"}
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
# Options that torch reads from a variable with this prefix if they are not given.
VARIABLES = "PET_"
VARIABLES_READ = ("nproc-per-node", "nnodes", "max-restarts", "no-python", "run-path", "module")
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


SCRIPT = "training_script"  # torch's name


class _Options(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(add_help=False, argument_default=argparse.SUPPRESS)
        for name in (*ALONE, *WITH_VALUE):
            flags = (f"--{name}", f"--{name.replace('-', '_')}", SHORT.get(name, f"--{name}"))
            action = "store_true" if name in ALONE else "store"
            self.add_argument(*dict.fromkeys(flags), dest=name, action=action)
        self.add_argument(SCRIPT)
        self.add_argument("training_script_args", nargs=argparse.REMAINDER)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun: {'no training script given' if SCRIPT in message else message}")


def parse(words: Sequence[str], environment: Mapping[str, str], *, launch: bool = False) -> TorchrunLaunch:
    """What a torchrun command starts. `words` follow `torchrun`, or with `launch`, `python -m
    torch.distributed.launch`. Raises UsageError."""
    given: dict[str, Any] = vars(_Options().parse_args(words))  # in the order in which they are typed
    script, arguments = given.pop(SCRIPT), given.pop("training_script_args")
    for name in VARIABLES_READ:
        variable = VARIABLES + name.upper().replace("-", "_")
        if variable in environment:
            given.setdefault(name, environment[variable])
    for name, hint in NOT_YET.items():
        if name in given:
            raise UsageError(f"torchrun's --{name} is not supported yet", hint=hint)
    if launch and "use-env" not in given:
        arguments = [LOCAL_RANK, *arguments]
    return TorchrunLaunch(
        script=script,
        arguments=tuple(arguments),
        module="module" in given,
        program="no-python" in given,
        ranks=given.get("nproc-per-node", "1"),
        nodes="1" if "standalone" in given else given.get("nnodes", "").rpartition(":")[2],
        ignored=tuple(name for name in given if name not in RENDEZVOUS | KEPT),
    )


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
