"""`python -m jurymast.health`: the process of one probe; see `child`."""

from __future__ import annotations

import json
import os
import sys

from jurymast.processes import become_helper, die_first

NICE = 19


def main() -> None:
    # What a probe starts ends with it. No session, by which the agent knows what ranks left behind.
    os.setpgid(0, 0)
    die_first()  # probes may be plugins
    output = become_helper(NICE)  # before the imports, which take longer than all looks
    from jurymast.health.child import ProbeChild

    ProbeChild(json.loads(sys.stdin.readline()), output).run()


if __name__ == "__main__":
    main()
