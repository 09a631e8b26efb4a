"""How our own processes start: in a Python that imports nothing from the directory that it is started in.

Python looks for modules in that directory first (`python -m`, `python -c`), also by a relative or empty part
of PYTHONPATH. There a `queue.py` of the user's would replace Python's own, and in a directory of another user
a `json.py` would run that user's code. Python's own -P needs 3.11, and leaves PYTHONPATH as it is.

What trains is not ours: ranks, torchrun and their launchers find modules as they do without us.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# Runs first, in any Python, which need not have jurymast. It imports only what every Python has loaded.
AWAY = (
    'import os, sys; w = os.readlink("/proc/self/cwd"); '
    "r = [os.path.normpath(os.path.join(w, p)) "
    'for p in (os.environ.get("PYTHONPATH") or "/").split(":") if p[:1] != "/"]; '
    "sys.path[:] = [p for p in sys.path if p and p not in r]; "
)
# Runs the module that is the next argument.
RUN = 'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def run_module(module: str, *arguments: str, python: str = "") -> list[str]:
    """The command line that runs one of our modules, as isolated as this process is.

    `python`: another Python than this one, which has a jurymast of its own. This one's processes have the
    jurymast of this process, wherever it was found.
    """
    if python and python != sys.executable:
        return [python, "-c", f"{AWAY}{RUN}", module, *arguments]
    # Only this package is found there: what lies beside it must not replace Python's own modules.
    ours = f"sys.path.insert(0, {os.path.dirname(_PACKAGE)!r}); import jurymast; del sys.path[0]; "
    return [sys.executable, *_isolation(), "-c", f"{AWAY}{ours}{RUN}", module, *arguments]


def run_code(code: str, *, python: str = "") -> list[str]:
    """The command line that runs this text in this Python, as isolated as this process is, or in another
    one."""
    if python and python != sys.executable:
        return [python, "-c", f"{AWAY}{code}"]
    return [sys.executable, *_isolation(), "-c", f"{AWAY}{code}"]


def _isolation() -> list[str]:
    if sys.flags.isolated:
        return ["-I"]
    without = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [option for option, given in without.items() if given]


def relative_parts(environment: Mapping[str, str]) -> list[str]:
    """The parts of PYTHONPATH that mean another directory in each directory; "" is the directory itself."""
    return [part for part in (environment.get("PYTHONPATH") or "/").split(":") if part[:1] != "/"]


def leave_directory() -> None:
    """Import nothing from the directory that this process was started in from now on; for a process that
    somebody starts by hand, so that Python had its own rule until now."""
    started_in = os.readlink("/proc/self/cwd")
    if is_ours() and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]
    relative = [os.path.normpath(os.path.join(started_in, part)) for part in relative_parts(os.environ)]
    sys.path[:] = [entry for entry in sys.path if entry and entry not in relative]


def is_ours() -> bool:
    """Whether `python -m` is about to run one of our modules, by which it has come to this one."""
    # Until the module is found, argv[0] is "-m", and the module's name is where it will be.
    if sys.argv[:1] != ["-m"] or len(sys.orig_argv) < len(sys.argv):
        return False
    word = sys.orig_argv[-len(sys.argv)]
    name = word.partition("m")[2] if word.startswith("-") else word
    return name.partition(".")[0].partition("_")[0] == "jurymast"
