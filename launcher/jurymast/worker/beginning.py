"""Where a script that does not number its steps begins, as far as that can be known from outside: by the
count that its optimizer keeps (Adam and others like it restore that with their state), or because it read
nothing that the run has written, so that it begins where the run's first attempt did.

Only rank 0 looks, which reads a checkpoint itself or gives it to the others.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from jurymast.core.state import within

PATH_CHARACTERS = 300
# Parameters that are looked at: one may have been frozen, or not been used yet.
PARAMETERS = 8
# The clocks of storage and of this node agree to this many seconds.
CLOCKS_S = 5.0
# What a run writes and reads again, without a training's state: programs, devices, what compilers keep.
_PROGRAMS = (".py", ".pyc", ".so")
_NO_STATE = ("/proc/", "/sys/", "/dev/", "/torchinductor_", "/.triton/", "/__pycache__/")


# Libraries that open files without Python.
_READERS = (
    "h5py", "netCDF4", "pyarrow", "safetensors.flax", "safetensors.numpy", "safetensors.tensorflow", "tables",
    "tensorstore",
)  # fmt: skip
# What the interpreter tells its hooks of programs that start (one may copy a checkpoint, say), and the place
# of the program's arguments.
_STARTS = {"os.exec": 1, "os.posix_spawn": 1, "os.system": 0, "subprocess.Popen": 1}
_BETWEEN_WORDS = re.compile(r"[\s=;|&<>()'\"]+")
WORDS = 200


class FilesRead:
    """Notes a file that an earlier attempt may have written, between `since` and `until`, and that this
    process opens to read, until `over`. A hook of the interpreter sees all that Python opens, and what torch
    maps into memory (`tell_of_mapped`), and what other programs are told to read; of a library that reads by
    itself only that it is loaded. The script finds its modules as ever; but no process can take such a hook
    out again, so it is for one rank, and only after a failure."""

    def __init__(self, since: float, until: float, own: str = "") -> None:
        self.found = ""
        self._since, self._until, self._own, self._over = since, until, own, False

    def watch(self) -> None:
        sys.addaudithook(self._seen)

    def over(self) -> None:
        self._over = True

    def told(self) -> str:
        """What may have been read of an earlier attempt's; "" if nothing was."""
        return self.found or next((f"files by {name}" for name in _READERS if name in sys.modules), "")

    def _seen(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._over or self.found:
            return
        if event == "open":
            path, mode, flags = arguments
            if not _only_writes(mode, flags):
                self._look(path)
        elif event == "sqlite3.connect":
            self._look(arguments[0])
        elif event in _STARTS:
            for word in _words(arguments[_STARTS[event]]):
                self._look(word)

    def _look(self, path: object) -> None:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return
        whole = os.path.abspath(path)
        if whole.endswith(_PROGRAMS) or any(part in whole for part in _NO_STATE):
            return
        if self._own and whole.startswith(self._own):
            return
        try:
            written_at = os.stat(path).st_mtime
        except (OSError, ValueError):
            return
        if self._since < written_at < self._until and not self.found:
            self.found = whole


def tell_of_mapped(torch: Any) -> None:
    """Have torch tell the interpreter's hooks which files it maps into memory, as Python tells of those that
    it opens. So safetensors reads weights, by functions that it looks up in torch."""
    torch.from_file = _telling(torch.from_file)
    torch.UntypedStorage.from_file = staticmethod(_telling(torch.UntypedStorage.from_file))
    torch.jit.load = _telling(torch.jit.load)


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*arguments: Any, **named: Any) -> Any:
        path = arguments[0] if arguments else named.get("filename", named.get("f"))
        sys.audit("open", path, "r", os.O_RDONLY)
        return function(*arguments, **named)

    return told


def _words(arguments: object) -> list[str]:
    """The words of a command, in which a further shell may see several; but for folders that any command may
    name."""
    texts = arguments if isinstance(arguments, (list, tuple)) else [arguments]
    names = [os.fsdecode(one) for one in texts[:WORDS] if isinstance(one, (str, bytes, os.PathLike))]
    words = [word for name in names for word in (name, *_BETWEEN_WORDS.split(name)[:WORDS])]
    return [word for word in dict.fromkeys(words) if word.strip("./")]


def _only_writes(mode: object, flags: object) -> bool:
    if isinstance(mode, str):
        return "r" not in mode and "+" not in mode
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY


def files_read(variables: Mapping[str, str]) -> FilesRead | None:
    """Return the watch over what this process reads; None where that shows nothing: in a run's first attempt,
    on other ranks than 0, and outside of runs."""
    root, attempt = variables.get("JURYMAST_RUN_DIR", ""), variables.get("JURYMAST_ATTEMPT", "")
    if not root or not attempt.isdecimal() or int(attempt) <= 1 or variables.get("RANK") != "0":
        return None
    try:
        # By the clock of storage, which may be that of the checkpoints as well.
        submitted_at = os.stat(os.path.join(root, "plan.json")).st_mtime
    except OSError:
        return None
    logs = os.path.join(os.path.abspath(root), "logs", "")
    found = FilesRead(submitted_at, time.time() + CLOCKS_S, logs)
    found.watch()
    return found


def began_at(optimizer: Any, read: FilesRead | None) -> within.BeganAt:
    """Return what is known just before the optimizer's first step of the attempt."""
    reads = ""
    if read is not None:
        read.over()
        reads = read.told()[-PATH_CHARACTERS:].encode("ascii", "replace").decode()
    return within.BeganAt(step=steps_by(optimizer), reads=reads)


def steps_by(optimizer: Any) -> int | None:
    """Return how many steps an optimizer has done, by its own count; None if it keeps none, or has not begun
    to count."""
    try:
        counts = [values["step"] for values in [*optimizer.state.values()][:PARAMETERS] if "step" in values]
        counts = counts or [group["step"] for group in optimizer.param_groups if "step" in group]
        found = [int(count) for count in counts if _is_at_hand(count)]
    except Exception:  # any optimizer may come, and nothing may disturb its training
        return None
    return max(found, default=0) or None  # some count from 0 before they have begun


def _is_at_hand(count: Any) -> bool:
    """Whether reading it does not wait for a GPU, which a captured step (CUDA graphs) does not allow."""
    device = getattr(count, "device", None)
    if device is None or device.type == "cpu":
        return True
    from torch import cuda

    return not cuda.is_current_stream_capturing()
