"""`jurymast doctor`: is this site ready?"""

from __future__ import annotations

import os
from pathlib import Path

import click

from jurymast.cli.options import (
    json_option,
    resolved_policy,
    runs_option,
    show,
    show_json,
)
from jurymast.report.which_run import run_ids
from jurymast.rundir import default_runs

NEWEST = 10  # runs whose directories of checkpoints are looked at


@click.command()
@click.option("--install", is_flag=True, help="Check instead what a site's other users find installed.")
@json_option
@runs_option
def command(install: bool, as_json: bool, runs: Path | None) -> int:
    """Check whether this site is ready, and say what to do where it is not.

    Run it on a login node, then with srun on a compute node. In a batch script, run it after the script's own
    set-up: it then also checks the Python that the script will find. Exit code 1: something has to be done.
    """
    from jurymast.report.doctor import NO, doctor_blocks, examine, examine_script
    from jurymast.report.install import examine_installation

    if install:
        checks = [*examine_installation(os.environ)]
    else:
        settings = resolved_policy(None).settings()
        runs = runs or default_runs()
        of_site = examine(runs, Path(settings.spool), run_ids(runs)[:NEWEST])
        checks = [*of_site, *examine_script(os.environ)]
    ready = all(check.answer != NO for check in checks)
    if as_json:
        show_json({"ready": ready, "checks": [check.to_json() for check in checks]})
    else:
        show(doctor_blocks(checks))
    return 0 if ready else 1
