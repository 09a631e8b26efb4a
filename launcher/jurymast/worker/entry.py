"""A rank's first code: become the user's script, in a process forked from a warm one."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from jurymast.processes import die_with_parent
from jurymast.worker import error_file, forkserver, hooks, link, stack_signal

TEMPORARY_VARIABLE = "JURYMAST_USER_TMPDIR"
LOG_VARIABLE = "JURYMAST_LOG"


_forked_by = 0  # the server's process id, in a rank


def _remember_self() -> None:
    global _forked_by
    _forked_by = os.getpid()


os.register_at_fork(before=_remember_self)


@dataclass(frozen=True)
class Script:
    """What to run: a path or, with `module`, a module name; `arguments` follow it in sys.argv."""

    path: str
    arguments: tuple[str, ...]
    module: bool
    directory: str


def run(script: Script) -> None:
    """Run the script as `__main__` and end the process with its exit code; never returns."""
    _tether()
    _redirect_output()
    _restore_environment()
    _reseed()
    stack_signal.listen()
    rank_link = link.current()
    hooks.watch_steps(rank_link)
    code = 1
    try:
        code = _execute(script)
        rank_link.enter(link.DONE)
        _finish_interpreter()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch's elastic agent waits for a return value before it lets a worker go; an exit code is enough.
        os._exit(code)


def _tether() -> None:
    """A rank must not outlive its node: the agent's end ends the host, that the server, that the ranks.

    The server may have ended already, unheard. Only its id tells: the host, of many threads, ends bit by bit,
    and for a moment the server is gone while the pipe to the host still looks alive.

    Like a rank of torchrun's it leads a session of its own: Linux may share processors out by session
    (sched_autogroup), and steps of two ranks on two cores took about 7 % longer when they shared one.
    """
    die_with_parent()
    if _forked_by not in (0, os.getppid()):
        os._exit(1)
    os.setsid()
    for number in (*forkserver.DEAF_TO, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Log(io.FileIO):
    """Loses what finds no room: a full disk must not end a training for a line that it prints."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _redirect_output() -> None:
    path = os.environ.get(LOG_VARIABLE)
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        print(f"a rank writes here, for it has no log of its own: {error}", file=sys.stderr)
    else:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    sys.stdout, sys.stderr = _logged(1, sys.stdout), _logged(2, sys.stderr)


def _logged(descriptor: int, like: TextIO) -> TextIO:
    raw = _Log(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=like.encoding, errors=like.errors, line_buffering=True
    )


def _restore_environment() -> None:
    """The host keeps its temporary files in the agent's directory; the user's code gets the user's."""
    theirs = os.environ.pop(TEMPORARY_VARIABLE, "")
    if theirs:
        os.environ["TMPDIR"] = theirs
    else:
        os.environ.pop("TMPDIR", None)
    import tempfile

    tempfile.tempdir = None


def _reseed() -> None:
    """Ranks are forks of one process: without this all would draw the same numbers from numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _execute(script: Script) -> int:
    try:
        os.chdir(script.directory)
        sys.argv = [script.path, *script.arguments]
        if script.module:
            sys.path.insert(0, script.directory)
            runpy.run_module(script.path, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script.path)))
            runpy.run_path(script.path, run_name="__main__")
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:  # the edge of the user's code: everything is reported, then ends the rank
        _report(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Traceback to the log, and to the error file for the torchrun host."""
    trail = _users_part(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trail))
    sys.stderr.write(text)
    error_file.write(error, text)


def _users_part(trail: TracebackType | None) -> TracebackType | None:
    """Without the frames of this file and of runpy, which only say how the script was started."""
    start = trail
    while start is not None:
        name = start.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            return start
        start = start.tb_next
    return trail


def _finish_interpreter() -> None:
    """What a plain interpreter does at its end: wait for threads, run exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
