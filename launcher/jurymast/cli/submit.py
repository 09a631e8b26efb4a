"""`jurymast submit`: makes a policy, a plan and a request from a command line, and submits the request."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from jurymast.cli.options import (
    examples,
    file_option,
    json_text,
    resolved_policy,
    runs_of,
    spares_option,
)
from jurymast.cli.output import echo
from jurymast.cli.patience import follow_on
from jurymast.cluster.sbatch import (
    STANDARD_INPUT,
    BatchScript,
    CommandLine,
    find_script,
    merged,
    parse,
    read_script,
    split_command_line,
    wrapped,
)
from jurymast.errors import UsageError
from jurymast.rundir import default_runs

if TYPE_CHECKING:
    from jurymast.cluster.slurm import Request, Submitted
    from jurymast.core.state.settings import RunPlan


class SubmitCommand(click.Command):
    """Takes sbatch's options and the script from the command line before click reads our own options."""

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(context, incomplete)
        return found if incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if context.resilient_parsing:  # only for the shell's completion
            return super().parse_args(context, args)
        options = [p for p in self.get_params(context) if isinstance(p, click.Option)]
        own = {
            flag: not option.is_flag for option in options for flag in (*option.opts, *option.secondary_opts)
        }
        line = split_command_line(args, own)
        script = _batch_script(line, own)
        if "--observe" in (*(script.own if script else ()), *line.own):  # how many nodes is then sbatch's
            slurms = {flag: takes for flag, takes in own.items() if flag not in ("-N", "--nodes")}
            line = replace(split_command_line(args, slurms), command=line.command)
        context.meta["jurymast.line"], context.meta["jurymast.script"] = line, script
        # The command line overrides the script: click takes the last value.
        return super().parse_args(context, [*(script.own if script else ()), *line.own])

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        return ["[OPTIONS] [SBATCH OPTIONS] JOB.sbatch|-- SCRIPT.py [ARGS]..."]


def _batch_script(line: CommandLine, own: dict[str, bool]) -> BatchScript | None:
    """The batch script to submit, if there is one: a file, --wrap, or standard input."""
    wrap = line.last("wrap")
    if wrap is not None:
        if line.command:
            raise UsageError("--wrap and a batch script exclude each other", hint="leave one of the two out")
        line.command.append("wrap")
        return wrapped(wrap)
    if not line.command and not sys.stdin.isatty() and (text := sys.stdin.read()):
        line.command.append(STANDARD_INPUT)
        return parse(text, STANDARD_INPUT, own)
    path = find_script(line.command, Path.cwd())
    return read_script(path, own) if path else None


@click.command(
    cls=SubmitCommand,
    epilog="All of sbatch's options (man sbatch) and SBATCH_* variables work as with sbatch. "
    "Write -- -m MODULE to run a module instead of a script.\n\n"
    + examples(
        "jurymast submit --spares 2 job.sbatch",
        "jurymast submit -N 32 --gpus-per-node 8 --time 7-00:00:00 -- train.py --config 7b.yaml",
        "jurymast submit -N 2 --cluster local -- -m my.training",
    ),
)
@click.option(
    "-N",
    "--nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Active nodes.  [as the batch script says, or 1]",
)
@spares_option("Spare nodes, kept warm to replace failed ones.")
@click.option(
    "--nproc-per-node", "--nproc_per_node", type=click.IntRange(1), metavar="K",
    help="Ranks on each node.  [the GPUs per node requested from Slurm, else 1]",
)  # fmt: skip
@file_option("--policy", help="Policy file: what to do about failures.")
@click.option(
    "--cluster", type=click.Choice(["slurm", "local"]), default="slurm",
    help="Submit to Slurm, or run on this machine.  [slurm]",
)  # fmt: skip
@click.option(
    "--train", type=click.Choice(["", "yes", "no"]), default="", metavar="yes|no",
    help="Whether tasks of Python that a script's srun starts are one training.  [as they show]",
)  # fmt: skip
@click.option(
    "--observe", is_flag=True,
    help="Have sbatch run the script as it is, and only report what jurymast would have done and saved.",
)  # fmt: skip
@click.option("--name", default="", metavar="NAME", help="Part of the run's id.  [the script's name]")
@runs_of("Where run directories are kept; all nodes must see it.  [$JURYMAST_RUNS, or ./runs]")
@click.option("--shared-runs", is_flag=True, help="Accept a runs directory in which others can replace runs.")
@click.option(
    "-W",
    "--wait",
    is_flag=True,
    help="Follow the run to its end, until its last checkpoint is on storage, and return its exit code.",
)
@click.option("--parsable", is_flag=True, help="Print only JOBID[;CLUSTER], as sbatch does.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> int:
    """Submit a batch script or a training script, with spare nodes, as a run that survives failures."""
    line: CommandLine = context.meta["jurymast.line"]
    script: BatchScript | None = context.meta["jurymast.script"]
    runs = options["runs"] or default_runs()
    # The command line together with the variables and the script.
    told = merged(script, os.environ, line)
    from jurymast.cluster.planning import OwnOptions
    from jurymast.cluster.request import check_request, make_request
    from jurymast.cluster.submitter import submitter_of

    policy = resolved_policy(options["policy"], options["spares"], submitter_of(told, options["cluster"]))
    own = {name: options[name] for name in ("nodes", "nproc_per_node", "name", "cluster", "train")}
    request, notes = make_request(
        OwnOptions(**own, runs=runs), line, policy, script,
        observe=options["observe"], shared_runs=options["shared_runs"],
    )  # fmt: skip
    for note in [*policy.contradictions, *notes]:
        echo(f"jurymast: note: {note}", err=True)
    _note_unused(line, options["cluster"])
    if policy.policy.nodes_policy.refill and options["cluster"] == "local":
        echo("jurymast: note: nodes_policy.refill has no effect on the local cluster", err=True)
    observed = request.plan.observed
    if options["dry_run"]:
        lines = [] if observed else _lines(script, told, request.plan)
        values = request.to_json() | ({"lines": lines} if script else {})
        echo(json_text(values, indent=1) if options["as_json"] else _shown(request) + _lines_shown(lines))
        return 0
    check_request(request, told)
    if told.has("test-only") and request.plan.cluster == "slurm" and not observed:
        from jurymast.cluster.slurm import test_only

        echo(test_only(request))
        return 0
    from jurymast.executor import JurymastExecutor

    submitted = JurymastExecutor(runs).send(request).submitted
    follow_on()  # the job is submitted even if storage hangs now
    try:
        if not line.has("quiet"):  # sbatch ignores it in a script
            if submitted.notes:
                echo(submitted.notes, err=True)
            for shown in [] if observed else _lines(script, told, request.plan):
                if shown["differs"]:
                    echo(f"jurymast: note: line {shown['line']}: {shown['differs']}", err=True)
            options["parsable"] = options["parsable"] or told.has("parsable")
            _announce(submitted, options, runs)
        waits = options["wait"] or told.has("wait")
        if waits and (request.plan.batch or told.has("array")):
            from jurymast.cluster.slurm import wait as wait_for_job

            return wait_for_job(submitted.slurm_job, submitted.slurm_cluster)
        if waits:
            from jurymast.report.follow import wait

            return wait(request.plan.directory)
    except KeyboardInterrupt:
        ends = f"jurymast cancel {shlex.quote(request.plan.directory)}"
        echo(f"the run goes on; to end it: {ends}", err=True)
        raise
    return 0


def _note_unused(line: CommandLine, cluster: str) -> None:
    """Print which of sbatch's options have no effect on the local cluster."""
    used = ("gpus-per-node", "gpus-per-task", "gres", "job-name", "chdir", "requeue", "no-requeue")
    unused = [" ".join(given.words) for given in line.options if given.name not in used]
    if cluster == "local" and unused:
        echo(f"jurymast: note: not used on the local cluster: {' '.join(unused)}", err=True)


def _shown(request: Request) -> str:
    """A dry run for people: the command line, the batch script and the policy."""
    from jurymast.cluster.slurm import script_file

    parts = [f"# {request.plan.directory}", shlex.join(request.argv)]
    if request.script:
        parts += ["", f"# {script_file(request.plan)}", request.script.rstrip()]
    return "\n".join([*parts, "", f"# {request.run_directory.policy_file}", request.policy.rstrip()])


def _lines(script: BatchScript | None, told: CommandLine, plan: RunPlan) -> list[dict[str, Any]]:
    from jurymast.cluster.control import around_tasks
    from jurymast.script.foreseen import foreseen

    if script is None:
        return []
    around = around_tasks() if plan.cluster == "slurm" else []
    return [asdict(one) for one in foreseen(script.text, told, plan.active, plan.train, around)]


def _lines_shown(lines: list[dict[str, Any]]) -> str:
    """What will happen to the lines of a batch script, for people."""
    if not lines:
        return ""
    texts = ["", "", "# what happens to its lines; all others run as under sbatch"]
    for one in lines:
        fate = {True: "protected", False: "unprotected", None: "unknown"}[one["protected"]]
        texts += [f"line {one['line']:<5} {fate:<12} {one['command']}", f"{'':24}{one['why']}"]
        texts += [f"{'':24}{one['differs']}"] if one["differs"] else []
    return "\n".join(texts)


def _announce(submitted: Submitted, options: dict[str, Any], runs: Path) -> None:
    plan = submitted.request.plan
    if options["as_json"]:
        values = {
            "run": plan.run,
            "cluster": plan.cluster,
            "slurm_job": submitted.slurm_job or None,
            "slurm_cluster": submitted.slurm_cluster or None,
            "pid": submitted.pid,
            "directory": plan.directory,
        }
        echo(json_text(values))
        return
    if options["parsable"]:
        echo(";".join(filter(None, (submitted.job, submitted.slurm_cluster))))
        return
    name = plan.run if runs == default_runs() else shlex.quote(plan.directory)
    if plan.observed:
        echo(
            f"run        {plan.run}\n"
            f"job        {submitted.job} (observed: sbatch has {plan.script} as it is)\n"
            f"directory  {plan.directory}\n"
            f"report     jurymast report {name}"
        )
        return
    spare = f" + {plan.spares} spare" if plan.spares else ""
    nodes = "nodes" if plan.nodes > 1 else "node"
    each = "" if plan.batch else f", {plan.ranks_per_node} rank{'s' if plan.ranks_per_node > 1 else ''} each"
    echo(
        f"run        {plan.run}\n"
        f"job        {submitted.job} ({plan.active} active{spare} {nodes}{each})\n"
        f"directory  {plan.directory}\n"
        f"watch      jurymast status {name}\n"
        f"           jurymast logs {name} --follow"
    )
