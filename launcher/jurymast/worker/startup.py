"""What a new interpreter becomes before its script runs: the server of a node's ranks, or a rank by itself.

    agent ── python -u SCRIPT ARGUMENTS, as the server: imports torch, then stays what it is
              ├─ host: torch's elastic agent (`worker.elastic`), which decides when ranks start and stop
              └─ ranks: forks of the server that go on to the script, as its interpreter would have

So a rank is what torchrun starts, `python -u SCRIPT ARGUMENTS`, down to its command line, its `__main__` and
the way it ends; only torch is there already. A rank that cannot use that replaces itself by a new interpreter
of the same command line (`start_cold` in `worker.rank`), which comes here, too.
"""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "JURYMAST_STARTUP"


def variables(what: dict[str, Any], environment: dict[str, str]) -> dict[str, str]:
    """`environment` for a new interpreter that is to become `what`: {"server": ...}, {"cold": ...}, or
    {"below": {}}, any that a rank's program starts."""
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site_hook")
    users = environment.get("PYTHONPATH", "")
    path = here + (os.pathsep + users if users else "")
    return {**environment, "PYTHONPATH": path, VARIABLE: json.dumps(what)}
