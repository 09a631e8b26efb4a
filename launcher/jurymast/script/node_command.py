"""The program that a training step's srun starts on each node: it runs the step's command as the user wrote
it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from jurymast.rundir import RunDirectory
from jurymast.script import shims


def seen(environment: Mapping[str, str], active: int) -> dict[str, str]:
    """The variables that hide the step's spare nodes from its command."""
    hosts, tasks = environment.get("SLURM_JOB_NODELIST", ""), str(active)
    counts = ("SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NPROCS",
              "SLURM_STEP_NUM_TASKS")  # fmt: skip
    each = "1" if active == 1 else f"1(x{active})"
    return {
        **dict.fromkeys(counts, tasks),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"), hosts),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
    }


NODE_COMMAND = """\
#!/bin/sh
# Runs a step's command on a node, and leaves word of its end: srun waits for lost nodes as well. What the
# command says on a spare node beside so many others nobody has asked for. A container, or srun's --export,
# may have changed the variables that lead to our front ends.
{exports}
{ours}
{own}
{told}
if [ "$SLURM_NODEID" -ge {active} ]; then exec >> {log} 2>&1; fi
"$@"
code=$?
if [ "$SLURM_NODEID" -ge {active} ]; then code=0; fi
umask 077
cd {folder} && echo $code > ".ended-$SLURMD_NODENAME" && mv ".ended-$SLURMD_NODENAME" "ended-$SLURMD_NODENAME"
exit $code
"""
CONTAINER_COMMAND = """\
#!/bin/sh
# Runs the command of a container: variables of the image's may have taken the place of those that lead to our
# front ends.
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
) -> str:
    """The text of the program for a `step` of `job` (both folders) on `active` nodes. `own`: shell text, by
    node name, that turns the step's command into that of the node. `contained`: the command starts a
    container."""
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in seen.items())
    cases = [f"{shlex.quote(node)})\n{text}\n;;" for node, text in own.items()]
    text = "\n".join(['case "$SLURMD_NODENAME" in', *cases, "esac"]) if cases else ""
    telling = TELLING if contained else ()
    told = "\n".join(f'export {prefix}_{name}="${name}"' for prefix in telling for name in PLACE)
    return NODE_COMMAND.format(
        exports=exports, own=text, ours=shims.exports(job, step), told=told, active=active,
        log=shlex.quote(str(log)), folder=shlex.quote(str(step)),
    )  # fmt: skip


def container_command(job: RunDirectory, step: Path) -> str:
    """The text of the program that runs first in a container, for a `step` of `job` (both folders)."""
    return CONTAINER_COMMAND.format(ours=shims.exports(job, step))
