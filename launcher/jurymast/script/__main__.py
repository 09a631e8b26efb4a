"""`jurymast.script WHAT ...`: the programs that run in a batch script's job. They are called by files that
jurymast wrote (see `shims`, and the batch script that Slurm gets), not by people."""

from __future__ import annotations

import sys

from jurymast.errors import JurymastError
from jurymast.script import hold


def main(what: str, arguments: list[str]) -> int:
    if what == "job":
        hold()
        from jurymast.script.job import run

        return run(arguments[0], arguments[1:])
    if what == "srun":
        hold()
        from jurymast.script.srun import run as run_srun

        return run_srun(arguments)
    if what == "tasks":
        from jurymast.script.node import run_tasks

        count, guessed, shares = arguments[:3]
        return run_tasks(int(count), shares, arguments[3:], guessed=bool(int(guessed)))
    from jurymast.script.node import run as run_launcher

    return run_launcher(what, arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except JurymastError as error:
        from jurymast.script.notes import say

        say(f"error: {error}")
        if error.hint:
            say(error.hint)
        sys.exit(error.exit_code)
