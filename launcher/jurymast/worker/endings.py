"""How a rank's script ended: by an exception or an exit of its own. The rank tells its node's torchrun host,
which reads it here: exceptions in torch's error file and format, exits in a file beside that."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeAlias

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
EXIT = ".exit"  # added to the error file's name: where the script ended itself
TRACEBACK_CHARACTERS = 16_000
TOOL = 4  # a number for sys.monitoring, of those that Python leaves to all
# In Python's own memory: the place of tp_flags in a class, and its bit Py_TPFLAGS_IMMUTABLETYPE.
FLAGS_AT = 21 * ctypes.sizeof(ctypes.c_void_p)
IMMUTABLE = 1 << 8


def write_error(error: BaseException, text: str) -> None:
    """Write the exception with its traceback `text`, unless torch's @record did so already. The file is there
    with all of it or not at all, because the host looks for it at any moment."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": text[-TRACEBACK_CHARACTERS:], "timestamp": str(int(time.time()))}
    told = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump(told, file)
    os.replace(partial, path)


def tell_error() -> None:
    """Write the exception by which the script ended, if there is one."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        write_error(error, "".join(traceback.format_exception(error)))


def read_error(path: str) -> dict[str, Any]:
    """Return {"error": exception class, "message", "traceback"}; {} if the file is missing or has other
    contents, because scripts may write it as well."""
    from jurymast import foreign  # imported here, because ranks only write

    try:
        message: Any = foreign.load(path, foreign.PLAN_BYTES_MAX)["message"]
        if isinstance(message, str):
            return {"error": "", "message": message[:1000], "traceback": ""}
        name, _, rest = str(message.get("message", "")).partition(": ")
        callstack = str(message.get("extraInfo", {}).get("py_callstack", ""))[-TRACEBACK_CHARACTERS:]
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        return {}
    return {"error": name[:200], "message": rest[:1000], "traceback": callstack}


def read_exit(path: str, exit_code: int) -> dict[str, Any]:
    """Return the {"traceback"} of the call by which a script ended with this code, as `tell_exits` has it
    written beside the error file at `path`; {} if it ended otherwise."""
    from jurymast import foreign

    try:
        told = foreign.load(path + EXIT, foreign.PLAN_BYTES_MAX)
        return {"traceback": str(told["traceback"])} if told["code"] == exit_code else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


Note: TypeAlias = Callable[[object, FrameType | None], None]


def tell_exits() -> None:
    """Have each SystemExit of the main thread, and each call of os._exit, with a failure note where it is.
    The rank's exit code shows later whether it ended by that: a SystemExit may be caught."""
    path, pid, thread = os.environ.get(ERROR_FILE_VARIABLE), os.getpid(), _thread.get_ident()
    if not path:
        return

    def note(status: object, frame: FrameType | None, *, anywhere: bool = False) -> None:
        code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        if code and os.getpid() == pid and (anywhere or _thread.get_ident() == thread):
            text = "".join(traceback.format_stack(frame))[-TRACEBACK_CHARACTERS:]
            with contextlib.suppress(OSError), open(path + EXIT, "w") as file:
                json.dump({"code": code, "traceback": text}, file)

    leave = os._exit

    @functools.wraps(leave)
    def told(status: int) -> NoReturn:
        note(status, sys._getframe(1), anywhere=True)
        leave(status)

    os._exit = told
    (_watch_raised if sys.version_info >= (3, 12) else _watch_made)(note)


def _watch_raised(note: Note) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]

    def raised(_code: object, _offset: int, error: BaseException) -> None:
        # One that has passed other frames was raised in the innermost of them.
        if isinstance(error, SystemExit) and getattr(error.__traceback__, "tb_next", None) is None:
            note(error.code, sys._getframe(1))

    with contextlib.suppress(ValueError):  # the script's own tool has this number
        monitoring.use_tool_id(TOOL, "jurymast")
        monitoring.register_callback(TOOL, monitoring.events.RAISE, raised)
        monitoring.set_events(TOOL, monitoring.events.RAISE)


def _watch_made(note: Note) -> None:
    """Before 3.12 Python tells nobody what is raised, so that the making of a SystemExit has to do. Its class
    gets an `__init__` of ours while the flag is off that forbids that."""
    flags = ctypes.c_ulong.from_address(id(SystemExit) + FLAGS_AT)
    if flags.value != SystemExit.__flags__:  # a Python with other memory
        return
    make, leave = SystemExit.__init__, sys.exit

    def made(self: SystemExit, *status: object) -> None:
        make(self, *status)
        frame = sys._getframe(1)
        note(self.code, frame.f_back if frame.f_code.co_filename == __file__ else frame)

    @functools.wraps(leave)
    def told(status: Any = None, /) -> NoReturn:
        """Makes the exception at once, which Python would do once it is caught."""
        if not (status is None or isinstance(status, SystemExit)):
            status = SystemExit(*status) if isinstance(status, tuple) else SystemExit(status)
        leave(status)

    flags.value &= ~IMMUTABLE
    try:
        SystemExit.__init__ = made  # type: ignore[assignment, method-assign]
    finally:
        flags.value |= IMMUTABLE
    sys.exit = told
