"""`python -m jurymast.health`: the process of one probe; see `child`.

It only waits for a second process, in which the probe looks. So what a probe starts, in whatever session or
group, ends with it, also if the probe crashes: the kernel makes this process its parent then.
"""

from __future__ import annotations

import json
import os
import sys

from jurymast.processes import (
    adopt_orphans,
    become_helper,
    die_first,
    die_with_parent,
    end_like,
    kill_below,
    leave_no_core,
)

NICE = 19


def main() -> None:
    # No session, by which the agent knows what ranks left behind.
    os.setpgid(0, 0)
    die_first()  # probes may be plugins
    adopt_orphans()
    output = become_helper(NICE)  # before the imports, which take longer than all looks
    own = os.getpid()
    if looker := os.fork():
        os.write(output, b'{"say": "runs", "pid": %d}\n' % looker)
        os.close(0)
        os.close(output)
        _end_with(looker)
    die_with_parent()
    if os.getppid() != own:
        os._exit(1)
    from jurymast.health.child import ProbeChild

    ProbeChild(json.loads(sys.stdin.readline()), output).run()


def _end_with(looker: int) -> None:
    """Wait for this process, kill what is left below this one, and end as it did."""
    code = None
    while code is None:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status) if pid == looker else None
    kill_below(os.getpid())
    leave_no_core()
    end_like(code)


if __name__ == "__main__":
    main()
