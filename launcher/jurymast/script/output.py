"""Where a step's output goes: into the file that its srun names, or files, one a task; else where the step's
front end writes, which is the job's output unless the script says otherwise."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from jurymast.script.srun_options import Srun

# %n and %t are the same where a node has one task, and a rank's number is what people look for.
TASK_FIELDS = "tnN"
FIELDS = {
    "j": "SLURM_JOB_ID", "A": "SLURM_ARRAY_JOB_ID", "a": "SLURM_ARRAY_TASK_ID", "x": "SLURM_JOB_NAME",
    "u": "USER",
}  # fmt: skip
FIELD = re.compile(r"%(\d*)([a-zA-Z%])")


def expanded(pattern: str, environment: Mapping[str, str], task: int) -> str:
    """srun's file name with its % fields filled in; unknown ones stay."""

    def fill(match: re.Match[str]) -> str:
        width, name = int(match[1] or 0), match[2]
        if name == "%":
            return "%"
        if name in TASK_FIELDS:
            return str(task).zfill(width)
        variable = FIELDS.get(name)
        if variable is None or variable not in environment and name != "A":
            return match[0]
        value = environment.get(variable) or environment["SLURM_JOB_ID"]  # %A of what is no array
        return value.zfill(width) if value.isdigit() else value

    return FIELD.sub(fill, pattern)


def is_each_tasks(pattern: str) -> bool:
    """Whether each task has a file of its own."""
    return any(match[2] in TASK_FIELDS for match in FIELD.finditer(pattern))


class Output:
    """Of one step."""

    def __init__(self, srun: Srun, environment: Mapping[str, str]) -> None:
        self._pattern = srun.last("output") or ""
        self._label = srun.last("label") is not None
        self._environment = environment
        mode = srun.last("open-mode") or environment.get("SLURM_OPEN_MODE", "")
        self._new = 0 if mode.startswith("a") else os.O_TRUNC
        self._files: dict[str, int] = {}

    @property
    def common(self) -> int:
        """A descriptor for what the step's command prints itself."""
        return 1 if is_each_tasks(self._pattern) else self._descriptor(0)

    def write(self, rank: int, lines: Sequence[bytes]) -> None:
        """Raises OSError: nobody reads it any more, or the disk is full."""
        prefix = b"%d: " % rank if self._label else b""
        data = b"".join(prefix + line + b"\n" for line in lines)
        while data:
            data = data[os.write(self._descriptor(rank), data) :]

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _descriptor(self, rank: int) -> int:
        if not self._pattern:
            return 1
        name = "/dev/null" if self._pattern == "none" else expanded(self._pattern, self._environment, rank)
        if name not in self._files:
            how = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | self._new
            self._files[name] = os.open(name, how | os.O_CREAT, 0o666)
        return self._files[name]
