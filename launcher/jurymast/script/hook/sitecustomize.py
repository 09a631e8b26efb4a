"""Runs in every Python that starts below a batch script, before anything else of it: a launcher of trainings
becomes our front end, everything else goes on as if this file were not there.

torchrun is known by its name, at once. Other launchers (accelerate, fabric, somebody's own) have torch's do
the work: when they call `torch.distributed.run.run` they have worked out what to start, and are ours from
there on. Imports nothing that Python has not loaded, and serves any Python that a script may use.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MODULES = {b"torch.distributed.run": "torchrun", b"torch.distributed.launch": "launch"}
# Options of Python's own that take the next word.
WITH_VALUE = (b"-W", b"-X", b"--check-hash-based-pycs")
ELASTIC = "torch.distributed.run"
# See jurymast.interpreter, whose text this is: this Python may not have it.
RUN_MODULE = (
    'import os, sys; w = os.readlink("/proc/self/cwd"); '
    "r = [os.path.normpath(os.path.join(w, p)) "
    'for p in (os.environ.get("PYTHONPATH") or "/").split(":") if p[:1] != "/"]; '
    "sys.path[:] = [p for p in sys.path if p and p not in r]; "
    'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)


def _launcher(words):
    """(our name of the launcher, its arguments), or None."""
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word in WITH_VALUE:
            del rest[:1]
        elif word == b"-m":
            return (MODULES[rest[0]], rest[1:]) if rest and rest[0] in MODULES else None
        elif word.startswith(b"-c"):
            return None
        elif not word.startswith(b"-"):
            return ("torchrun", rest) if os.path.basename(word) == b"torchrun" else None
    return None


def _command_line():
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read().split(b"\0")[:-1]
    except OSError:
        return []


def _need_jurymast():
    from importlib.util import find_spec

    if find_spec("jurymast") is None:
        text = (
            "jurymast: error: no jurymast in " + sys.executable + ", which trains: install it there as well\n"
        )
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(1)  # Python calls an exit a fatal error while it starts, and prints where


def _become_ours(name, arguments):
    _need_jurymast()
    command = [sys.executable, "-c", RUN_MODULE, "jurymast.script", name]
    os.execv(sys.executable, command + list(arguments))


def _run(arguments):
    """In place of torch's own, with the options that it has parsed."""
    words = ["--nproc-per-node", str(arguments.nproc_per_node), "--nnodes", str(arguments.nnodes)]
    words += ["--module"] if arguments.module else []
    words += ["--no-python"] if arguments.no_python else []
    sys.stdout.flush()
    sys.stderr.flush()
    _become_ours("torchrun", words + [arguments.training_script] + list(arguments.training_script_args))


class _Watch:
    """A finder that finds nothing by itself, but has a say in what the one module becomes."""

    def find_spec(self, name, path=None, target=None):
        if name != ELASTIC:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.run = _run

        spec.loader.exec_module = exec_module
        return spec


def _go_on():
    """The file of this name that Python would have found."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401


if os.environ.get("JURYMAST_SCRIPT_JOB", "") == os.environ.get("SLURM_JOB_ID"):
    _words = _command_line()
    if _words[1:2] == [b"-c"] and _words[3:4] == [b"jurymast.script"]:  # ours, in a Python of the script's
        _need_jurymast()
    _found = _launcher(_words)
    if _found is not None:
        _become_ours(*_found)
    sys.meta_path.insert(0, _Watch())
_go_on()
