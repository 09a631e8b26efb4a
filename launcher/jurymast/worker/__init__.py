"""Starts interpreters that become, before their script runs, the server of a node's ranks or a single rank.

    agent ── python -u SCRIPT ARGUMENTS, the server: imports torch and never runs the script
              ├─ host: torch's elastic agent (`worker.elastic`), which starts and stops ranks
              └─ ranks: forks of the server that go on to run the script

So a rank has the command line `python -u SCRIPT ARGUMENTS`, the `__main__` and the kind of exit that it has
under torchrun, except that torch is loaded already. A rank that cannot use this torch replaces itself by a
new interpreter with the same command line (`start_cold` in `worker.rank`), which starts here as well.
"""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "JURYMAST_STARTUP"


def variables(what: dict[str, Any], environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` with the variables that make a new interpreter `what`: {"server": ...},
    {"cold": ...}, or {"below": {}} for those that a rank's program starts."""
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site_hook")
    users = environment.get("PYTHONPATH", "")
    path = here + (os.pathsep + users if users else "")
    return {**environment, "PYTHONPATH": path, VARIABLE: json.dumps(what)}
