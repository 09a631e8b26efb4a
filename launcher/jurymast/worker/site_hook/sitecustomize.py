"""Runs in a new interpreter before the training script: see `worker`.

The agent starts `python -u SCRIPT ARGUMENTS` with this directory first in PYTHONPATH, and site imports this
file before Python reads the script. The script finds no trace of it.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _take_back() -> None:
    """Restore the user's path, so that no child of this process runs this file."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    _, _, users = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if users:
        os.environ["PYTHONPATH"] = users
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.modules.pop("sitecustomize", None)


def _import_users() -> bool:
    """Import the sitecustomize that Python would have found; return False if there is none."""
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
    """Report the error as site does."""
    sys.stderr.write(
        f"Error in sitecustomize; set PYTHONVERBOSE for traceback:\n{type(error).__name__}: {error}\n"
    )


def _begin() -> None:
    """Become what the environment says. Returns only in ranks."""
    import json

    from jurymast.worker import VARIABLE

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
except BaseException:  # after any error, the script must not run as if it were a rank
    import traceback

    traceback.print_exc()
    os._exit(1)

if not _found:
    # site expects this error if there is no such file.
    raise ImportError("no sitecustomize", name="sitecustomize")
