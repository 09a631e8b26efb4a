"""Prepares a rank before its script begins: like a rank of torchrun's, with a link to its agent."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import io
import os
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

from jurymast import worker
from jurymast.core.state import within
from jurymast.processes import (
    IGNORED_BY_PYTHON,
    TASKS_ALONE_VARIABLE,
    die_with_parent,
    name_process,
    signals_by_default,
)
from jurymast.worker import beginning, endings, link, preload, prolog, stack_signal

TEMPORARY_VARIABLE = "JURYMAST_USER_TMPDIR"
LOG_VARIABLE = "JURYMAST_LOG"
ERRORS_VARIABLE = "JURYMAST_STDERR"  # the log of stderr, if it has one of its own
INPUT_VARIABLE = "JURYMAST_STDIN"  # the file to read as standard input, if there is one


def users_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the agent's environment that ranks get, with the user's own TMPDIR."""
    kept = dict(variables)
    theirs = kept.pop(TEMPORARY_VARIABLE, "")
    for ours in ("JURYMAST_HOST_FD", TASKS_ALONE_VARIABLE):
        kept.pop(ours, None)
    if theirs:
        kept["TMPDIR"] = theirs
    else:
        kept.pop("TMPDIR", None)
    return kept


def begin(
    order: dict[str, Any],
    *,
    parent: int,
    name: str,
    environment: dict[str, str],
    loaded: frozenset[str],
    bundles: Sequence[preload.Bundle],
    presets: dict[str, str],
    program: str,
    cold: str,
    repeatable: bool,
    says: str,
    prologs: Sequence[str],
) -> None:
    """Make a process just forked from the server `parent` a rank, and return to run the script. A `program`
    replaces the process instead. `cold`: why the script's text demands a cold start, or "". `repeatable`: see
    `worker.before_torch`. `says`: what it prints first. `prologs`: the programs
    that run before it."""
    _bind_to_host(parent)
    name_process(name)
    variables = {**environment, **order["environment"]}
    redirect_output(variables)
    _redirect_input(variables)
    if says:
        sys.stderr.write(says)
    assumed = {**variables, **presets}
    variables = _after(prologs, variables)
    if program:
        _become(program, order["arguments"], variables)
    os.environ.clear()
    os.environ.update(variables)
    this = _Rank(loaded, variables, _log_sizes())
    if order["cold"] or len(bundles) == 1:
        this.start_cold("")
    if cold:
        this.start_cold(cold)
    this.repeatable = repeatable
    sys.argv[1:] = order["arguments"]
    sys.orig_argv[len(sys.orig_argv) - len(order["arguments"]) :] = order["arguments"]
    _renew(bundles)
    this.attach()
    this.hide(bundles, assumed)


def _after(prologs: Sequence[str], variables: dict[str, str]) -> dict[str, str]:
    """Return this rank's variables as the programs that run before it leave them; end with one that fails."""
    if not prologs:
        return variables
    try:
        return prolog.run(prologs, {**variables, "SLURM_TASK_PID": str(os.getpid())})
    except prolog.PrologError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(error.code)


def _become(program: str, arguments: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Replace this process by a program. The Python that it starts to train is the rank: see
    `begin_below`."""
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(program, [program, *arguments], worker.variables({"below": {}}, variables))
    except OSError as error:
        sys.stderr.write(f"{program}: {error.strerror}\n")
        os._exit(127)


def begin_below(loaded: frozenset[str]) -> None:
    """Prepare a new interpreter that a rank's program has started. It becomes a rank only if it loads torch;
    its output belongs to its program."""
    this = _Rank(loaded, dict(os.environ), {}, attached=False)
    this.hide([preload.Bundle(modules={n: m for n, m in sys.modules.items() if n not in loaded})], os.environ)


def begin_cold(loaded: frozenset[str], what: dict[str, Any]) -> None:
    """Prepare a new interpreter that has replaced a rank."""
    redirect_output(os.environ)
    _redirect_input(os.environ)
    this = _Rank(loaded, dict(os.environ), {int(number): size for number, size in what["logs"].items()})
    this.attach()
    this.hide([preload.Bundle(modules={n: m for n, m in sys.modules.items() if n not in loaded})], os.environ)
    this.cold, this.cold_since = what["why"], what["since"]


def _bind_to_host(parent: int) -> None:
    """Make this rank end with the server, which ends with the agent.

    The server may have ended before this; only the parent's id shows that. Like a rank of torchrun's, this
    one leads its own session: Linux may share processors by session (sched_autogroup), and steps of two ranks
    on two cores took about 7 % longer when they shared a session.
    """
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    signals_by_default()


class _Log(io.FileIO):
    """A log that drops what it cannot write: a full disk must not end a training that prints a line."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def redirect_output(variables: Mapping[str, str]) -> None:
    """Send what this process prints to the logs of the rank with these variables."""
    log, errors = variables.get(LOG_VARIABLE, ""), variables.get(ERRORS_VARIABLE, "")
    for path, streams in ((log, (1, 2)), (errors, (2,))):
        if not path:
            continue
        try:
            descriptor = _opened_log(path)
        except OSError as error:
            sys.stderr.write(f"a rank writes here, because it cannot open its own log: {error}\n")
        else:
            for number in streams:
                os.dup2(descriptor, number)
            os.close(descriptor)
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        _rebuild(stream, _Log(descriptor, "w", closefd=False))


def _opened_log(path: str) -> int:
    """Like `foreign.writing`, with which a rank would load modules that its script does not expect. Raises
    OSError for what is no ordinary file, without waiting for the other end of a pipe."""
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, how, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not an ordinary file", path)
    os.set_blocking(descriptor, True)
    return descriptor


def _redirect_input(variables: Mapping[str, str]) -> None:
    path = variables.get(INPUT_VARIABLE, "")
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        sys.stderr.write(f"this rank reads nothing, because it cannot open {path}: {error.strerror}\n")
    else:
        os.dup2(descriptor, 0)
        os.close(descriptor)


def _rebuild(stream: TextIO, raw: io.FileIO) -> None:
    """Replace a stream's raw file by `raw`. The stream object stays, because log handlers may refer to it."""
    assert isinstance(stream, io.TextIOWrapper)
    encoding, errors, name = stream.encoding, stream.errors, stream.name
    again: Any = stream.__init__  # type: ignore[misc]
    again(raw, encoding, errors, newline="\n", line_buffering=stream.line_buffering, write_through=True)
    raw.name = name


def _log_sizes() -> dict[int, int]:
    """Return the bytes in this rank's own logs so far, by descriptor."""
    sizes = {}
    for descriptor, variable in ((1, LOG_VARIABLE), (2, ERRORS_VARIABLE)):
        with contextlib.suppress(OSError, KeyError):
            own, log = os.fstat(descriptor), os.stat(os.environ[variable])
            if os.path.samestat(own, log):
                sizes[descriptor] = own.st_size
    return sizes


def _renew(bundles: Sequence[preload.Bundle]) -> None:
    """Renew the state in preloaded modules that each process must have for itself."""
    modules: dict[str, ModuleType] = {}
    for bundle in bundles:
        modules.update(bundle.modules)
    # A new __main__: nothing that the server froze is collected, but the script's objects must end with it.
    main, old = ModuleType("__main__"), sys.modules["__main__"]
    vars(main).update(vars(old))
    for name in [name for name, module in sys.modules.items() if module is old]:
        sys.modules[name] = main
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "tempfile" in modules:
        vars(modules["tempfile"])["tempdir"] = None


class _Rank:
    """A rank that is about to run its script. `logs` has the bytes in its logs when it started, by
    descriptor. If it is not `attached`, it becomes a rank when it loads torch."""

    def __init__(
        self,
        loaded: frozenset[str],
        variables: dict[str, str],
        logs: dict[int, int],
        *,
        attached: bool = True,
    ) -> None:
        self._loaded, self._variables, self._logs = loaded, variables, logs
        self._attached = attached
        self._pid = os.getpid()
        self._has_torch = False
        self._hidden: preload.Hidden | None = None
        self.cold = ""  # why it started cold
        self.cold_since = 0.0
        self.repeatable = False  # whether the script may begin anew once it has begun

    def attach(self) -> None:
        """Connect this rank to the agent, and report how it ends."""
        stack_signal.listen()
        self._link = link.current()
        self._read = beginning.files_read(self._variables)
        endings.tell_exits()
        atexit.register(self._ends)

    def hide(self, bundles: Sequence[preload.Bundle], assumed: Mapping[str, str]) -> None:
        self._hidden = hidden = preload.Hidden(
            bundles, self._loaded, assumed, self._stale, self._torch_loaded
        )
        hidden.hide()
        if len(bundles) > 1:
            os.register_at_fork(before=hidden.check)

    def _torch_loaded(self) -> None:
        import threading

        from jurymast.worker import hooks

        self._has_torch = True
        if not self._attached:
            self.attach()
        if self._read is not None:
            beginning.tell_of_mapped(sys.modules["torch"])
        told = functools.partial(beginning.began_at, read=self._read)
        hooks.watch_steps(self._link, told if self._variables.get("RANK") == "0" else None)
        if link.LOCAL_RANK_VARIABLE in self._variables:
            hooks.watch_groups(self._link)
        # After the script's end the rank may run for long, for example for uploads; no steps are due then.
        threading._register_atexit(self._script_ends)  # type: ignore[attr-defined]
        if self.cold:
            seconds = round(time.monotonic() - self.cold_since, 3)
            self._link.emit(within.ColdStart(why=self.cold, seconds=seconds))

    def _stale(self, names: list[str]) -> None:
        """Start cold because the script has set these variables before it imports torch. Warn instead if
        torch is loaded already, or if the script has done what must not be done twice."""
        if os.getpid() != self._pid:
            return  # a child of the rank, which cannot start cold
        when = "after" if self._has_torch else "before"
        late = f"the script sets {', '.join(names)} {when} it imports torch"
        if not self._has_torch:
            if self.repeatable:
                self.start_cold(late)
            if names == ["sys.path"]:
                raise ImportError(
                    "another torch is found now than before the script began; with `start: cold` in the "
                    "policy of jurymast this one is imported"
                )
        sys.stderr.write(
            f"jurymast: {late}, which has no effect here; with `start: cold` in the policy it does\n"
        )
        self._link.emit(within.ColdStart(why=late, seconds=0.0))

    def start_cold(self, why: str) -> NoReturn:
        """Replace this process by a new interpreter with nothing preloaded. It prints everything again, so
        the logs are cut."""
        what = {"cold": {"why": why, "since": time.monotonic(), "logs": self._logs}}
        for descriptor, size in self._logs.items():
            os.ftruncate(descriptor, size)
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, worker.variables(what, self._variables))

    def _script_ends(self) -> None:
        """Report that the script's last line is done, or what it ended by: its threads and exit handlers may
        still run, and others may meet what they do before this process ends."""
        if os.getpid() == self._pid:
            endings.tell_error()
            self._link.enter(link.ENDING)

    def _ends(self) -> None:
        """Report how the rank ends. Runs after the script's exit handlers, once the interpreter has printed
        the exception."""
        if os.getpid() != self._pid:
            return
        endings.tell_error()
        self._link.enter(link.ENDING)
        if self._hidden is not None:
            self._hidden.end()
