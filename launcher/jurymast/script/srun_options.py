"""srun's option grammar, needed to find the command after its options.

The union of the options of srun 22.05 and 24.11 and of the pyxis plugin.
"""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.cluster import sbatch_options as sbatch
from jurymast.errors import UsageError

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
SHORT = {
    **{letter: name for letter, name in sbatch.SHORT.items() if letter not in "aFW"},
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait",
    "X": "disable-status", "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
}  # fmt: skip
SRUN = sbatch.Grammar(REQUIRED, OPTIONAL, NONE, SHORT)


def parse(arguments: Sequence[str]) -> sbatch.CommandLine | None:
    """Parse srun's arguments; None if this grammar does not know them: the real srun may."""
    try:
        line = sbatch.split_command_line(arguments, {}, SRUN)
    except UsageError:
        return None
    return None if ":" in line.command else line  # options of a second step: heterogeneous
