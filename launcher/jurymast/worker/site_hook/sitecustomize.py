"""Runs in a new interpreter before the training script does: see `worker.startup`.

The agent starts `python -u SCRIPT ARGUMENTS` with this directory in front of PYTHONPATH, and site imports
this file before Python looks at the script. Nothing of it is left when the script runs.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _take_back() -> None:
    """The path as the user has it, so that no child of this process comes here."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    _, _, users = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if users:
        os.environ["PYTHONPATH"] = users
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.modules.pop("sitecustomize", None)


def _import_users() -> bool:
    """The file of this name that Python would have found; False when there is none."""
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name == "sitecustomize":
            return False
        _complain(error)
    except Exception as error:
        _complain(error)
    return "sitecustomize" in sys.modules


def _complain(error: Exception) -> None:
    """As site does."""
    sys.stderr.write(
        f"Error in sitecustomize; set PYTHONVERBOSE for traceback:\n{type(error).__name__}: {error}\n"
    )


def _begin() -> None:
    """Returns in ranks."""
    import json

    from jurymast.worker.startup import VARIABLE

    what = json.loads(os.environ.pop(VARIABLE))
    if "server" in what:
        from jurymast.worker.server import ForkServer

        ForkServer(_loaded, what["server"]).serve()
    elif "below" in what:
        from jurymast.worker.rank import begin_below

        begin_below(_loaded)
    else:
        from jurymast.worker.rank import begin_cold

        begin_cold(_loaded, what["cold"])


_take_back()
_found = _import_users()
_loaded = frozenset(sys.modules)

try:
    _begin()
except BaseException:  # whatever it is, the script must not run as if it were a rank
    import traceback

    traceback.print_exc()
    os._exit(1)

if not _found:
    # What site expects where there is no such file.
    raise ImportError("no sitecustomize", name="sitecustomize")
