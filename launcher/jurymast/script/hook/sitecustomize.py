"""Runs in every Python that starts below a batch script, before anything else of it: a launcher of trainings
becomes our front end, everything else goes on as if this file were not there.

Imports nothing that Python has not loaded, and serves any Python that a script may use.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MODULES = {
    b"torch.distributed.run": "torchrun",
    b"torch.distributed.launch": "launch",
}
PROGRAMS = {b"torchrun": "torchrun"}
# Options of Python's own that take the next word.
WITH_VALUE = (b"-W", b"-X", b"--check-hash-based-pycs")


def _launcher(words):
    """(our name of the launcher, its arguments), or None."""
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word in WITH_VALUE:
            del rest[:1]
        elif word == b"-m":
            return (MODULES[rest[0]], rest[1:]) if rest and rest[0] in MODULES else None
        elif not word.startswith(b"-"):
            name = PROGRAMS.get(os.path.basename(word))
            return (name, rest) if name else None
        elif word.startswith(b"-c"):
            return None
    return None


def _become_front_end():
    if "JURYMAST_SCRIPT_RUN" not in os.environ:
        return
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
    except OSError:
        return
    found = _launcher(words)
    if found is not None:
        ours = os.path.join(os.environ["JURYMAST_SCRIPT_RUN"], "slurm", "bin", "launcher")
        os.environ["JURYMAST_LAUNCHER_PYTHON"] = sys.executable
        os.execv(ours, [ours, found[0], *found[1]])


def _go_on():
    """The file of this name that Python would have found."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


_become_front_end()
_go_on()
