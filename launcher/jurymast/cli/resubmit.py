"""`jurymast resubmit`: submits a run's command once more, as a new run."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast import foreign
from jurymast.cli.options import examples, run_argument, runs_option, the_run
from jurymast.cli.output import echo
from jurymast.cluster.planning import FUNCTION
from jurymast.errors import RunDirectoryError, UsageError
from jurymast.rundir import RunDirectory, write_atomically

if TYPE_CHECKING:
    from jurymast.core.state.settings import RunPlan


@click.command(epilog=examples("jurymast resubmit 4711", "jurymast resubmit last --set spares=2"))
@run_argument
@click.option(
    "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Change a key of the policy (repeatable)."
)  # fmt: skip
@click.option("--shared-runs", is_flag=True, help="Accept a runs directory in which others can replace runs.")
@click.option("--dry-run", is_flag=True, help="Print the command, and submit nothing.")
@runs_option
def command(run: str, pairs: tuple[str, ...], shared_runs: bool, dry_run: bool, runs: Path | None) -> Any:
    """Submit a run's command again, as a new run with the same policy."""
    from jurymast.cli import submit

    directory = the_run(run, runs)
    plan, values = directory.plan(), _values(pairs)
    if plan.observed:
        raise UsageError(
            f"{directory.root.name} was only observed", hint=f"jurymast submit {shlex.quote(plan.script)}"
        )
    try:
        os.chdir(plan.working_directory)
    except OSError as error:
        raise RunDirectoryError(f"{plan.working_directory}, where the run was: {error.strerror}") from error
    if _has_checkpoints(directory):
        echo(
            f"jurymast: note: the checkpoints in {directory.checkpoints} are that run's; a new run resumes "
            "from one only if its script names a directory with a copy: jurymast checkpoints "
            f"{directory.root.name} export STEP DIR --format directory",
            err=True,
        )
    with tempfile.TemporaryDirectory(dir=foreign.temporary_place()) as folder:
        policy, text = directory.policy_file, ""
        if values:
            policy, text = Path(folder) / "policy.yaml", _changed(directory.policy_file, values)
            write_atomically(policy, text.encode())
        shown = Path("POLICY.yaml") if values and dry_run else policy
        words = words_of(directory, plan, shown, keep_spares="spares" not in values)
        words = ["--shared-runs", *words] if shared_runs else words
        if dry_run:
            echo(f"cd {shlex.quote(plan.working_directory)}\n{shlex.join(['jurymast', 'submit', *words])}")
            if values:
                echo(f"where POLICY.yaml is:\n{text.rstrip()}")
            return 0
        return submit.command.main(words, prog_name="jurymast submit", standalone_mode=False)


def _values(pairs: tuple[str, ...]) -> dict[str, Any]:
    """The keys and values, read as in a policy file. Raises UsageError."""
    import yaml

    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--set {pair}: write KEY=VALUE, for example spares=2")
        try:
            found[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {pair}: this is no value of a policy") from error
    return found


def _changed(policy: Path, values: dict[str, Any]) -> str:
    """A policy file that extends `policy` by these dotted keys. Raises PolicyError, which names them."""
    import yaml

    from jurymast.policy.resolve import file_layers, pairs_layer, resolve

    layer = pairs_layer("--set", [*values.items()])
    resolve([*file_layers(policy, str(policy)), layer])
    return yaml.safe_dump({"extends": str(policy.absolute()), **layer.values})


def _has_checkpoints(directory: RunDirectory) -> bool:
    try:
        return bool(foreign.names(directory.checkpoints))
    except OSError:
        return False


def words_of(directory: RunDirectory, plan: RunPlan, policy: Path, *, keep_spares: bool = True) -> list[str]:
    """The words after `jurymast submit` that submit this plan. Raises RunDirectoryError if the run is a part
    of a batch script's, UsageError if it is a function's."""
    if plan.script == FUNCTION:
        raise UsageError(
            f"{directory.root.name} is a function", hint="submit it again where it was submitted"
        )
    words = ["--runs", str(directory.root.absolute().parent), "--policy", str(policy)]
    words += ["--cluster", plan.cluster, "--nodes", str(plan.active)]
    words += ["--spares", str(plan.spares)] if keep_spares else []
    words += [f"--exclude={','.join(plan.exclude)}"] if plan.exclude else []
    words += ["--train", plan.train] if plan.train else []
    if not plan.batch:
        named = ["-m", plan.script] if plan.module else [plan.script]
        own = ["--name", plan.name, "--nproc-per-node", str(plan.ranks_per_node)]
        return [*words, *own, *plan.sbatch_options, "--", *named, *plan.arguments]
    from jurymast.cluster.slurm import users_script

    copy = users_script(directory)
    if not foreign.exists(copy):
        raise RunDirectoryError(
            f"{directory.root.name} is one training of a batch script, which is kept elsewhere",
            hint="submit the script again: jurymast submit SCRIPT",
        )
    script = _original(plan, copy)
    return [*words, "--job-name", plan.name, *plan.typed_options, str(script), *plan.arguments]


def _original(plan: RunPlan, copy: Path) -> Path:
    """The batch script where the user has it, since it may look for files beside itself; the run's `copy` if
    it has changed since, or is gone."""
    script = Path(plan.working_directory, plan.script)
    try:
        limit = foreign.SCRIPT_BYTES_MAX
        if foreign.read(script, limit) == foreign.read(copy, limit):
            return script
        why = "has changed since"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    echo(f"jurymast: note: {script} {why}, so the run's copy of it is submitted", err=True)
    return copy
