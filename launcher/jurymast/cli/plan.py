"""`jurymast plan`: a run's estimate before it costs a GPU-hour."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast.cli.options import (
    MOST_NODES,
    POSITIVE,
    Number,
    charts_option,
    checkpoint_bytes_option,
    durations_option,
    examples,
    file_option,
    json_option,
    recovery_option,
    resolved_policy,
    show,
    show_json,
    storage_option,
    write_page,
)
from jurymast.errors import UsageError

if TYPE_CHECKING:
    from jurymast.core.judges.forecast import Question
    from jurymast.policy.resolve import Resolved


@click.command(
    epilog=examples(
        "jurymast plan --nodes 2048 --checkpoint-bytes 5TB --storage-gb-per-s 100",
        "jurymast plan --nodes 128 --rate 4 --html plan.html",
    )
)
@click.option(
    "-N", "--nodes", type=click.IntRange(1, MOST_NODES), required=True, metavar="N", help="Active nodes."
)
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, metavar="G", help="GPUs per node.  [8]")
@checkpoint_bytes_option
@storage_option
@click.option(
    "--rate", type=POSITIVE, metavar="R",
    help="Failures per 1,000 node-days.  [the policy's, or what fleets report: 5, 90 % between 1 and 11]",
)  # fmt: skip
@file_option("--policy", help="Policy file: what to do about failures.")
@click.option(
    "--restart-s", type=Number(0.0), metavar="S",
    help="Seconds from a failure to the next new step.  [as measured, plus 30 for the training's start]",
)  # fmt: skip
@durations_option
@click.option("--stall-s", type=Number(0.0), metavar="S", help="Seconds for which a save stops training.")
@click.option("--replace-h", type=POSITIVE, metavar="H", help="Hours until a lost node is replaced.  [6]")
@click.option(
    "--days", type=POSITIVE, metavar="D", help="Length of the run in days; a short run needs fewer spares."
)
@click.option(
    "--target", type=Number(0.5, 1.0, max_open=True), metavar="SHARE",
    help="Goodput for which to show the storage bandwidth needed.  [0.95]",
)  # fmt: skip
@recovery_option
@charts_option
@json_option
def command(
    policy: Path | None, figures: Path | None, html: Path | None, as_json: bool, **given: Any
) -> None:
    """Estimate how often a run fails, how often to save, how many spares it needs, and the goodput that
    remains."""
    from jurymast.core.judges.forecast import forecast
    from jurymast.report.plan import plan_view, restart_lines
    from jurymast.sim.checkpoints import read_measured

    resolved = resolved_policy(policy)
    measured = read_measured(figures)
    durations = measured.durations(given["nodes"], given["checkpoint_bytes"], settings=resolved.settings())
    lines: list[str] = []
    if given["restart_s"] is None:
        given["restart_s"] = durations.restart_s
        lines = restart_lines(measured, durations, given["nodes"], given["checkpoint_bytes"])
    found = forecast(_question(resolved, given))
    view = plan_view(found, lines)
    if html is not None:
        from jurymast.report.plan import page

        write_page(page(view, found), html)
    if as_json:
        show_json(view)
    elif html is None:
        from jurymast.report.plan import plan_blocks

        show(plan_blocks(view))


def _question(policy: Resolved, given: dict[str, Any]) -> Question:
    """The question by the command line's values, or else the policy's. Raises UsageError for a policy that
    cannot be planned for."""
    from jurymast.core.judges.forecast import Question
    from jurymast.core.state.failure_rate import prior

    settings = policy.settings()
    if settings.cadence_steps is not None:
        where = policy.origins[("checkpoint", "cadence")]
        raise UsageError(
            f"a cadence of {settings.cadence_steps} steps ({where}) cannot be planned for: "
            "how long a step takes is not known",
            hint="in the policy for the plan, write the cadence as a time (10m) or auto",
        )
    rate = given["rate"] if given["rate"] is not None else settings.rate
    said: dict[str, Any] = {
        "checkpoint_bytes": given["checkpoint_bytes"],
        "write_bytes_per_s": given["storage_gb_per_s"] and given["storage_gb_per_s"] * 1e9,
        "restart_s": given["restart_s"],
        "stall_s": given["stall_s"],
        "replace_s": given["replace_h"] and given["replace_h"] * 3600.0,
        "run_s": given["days"] and given["days"] * 86_400.0,
        "target": given["target"],
        "cadence_s": settings.cadence_s,
        "spares": policy.policy.spares,
        "in_process": given["in_process"],
    }
    return Question(
        nodes=given["nodes"],
        gpus_per_node=given["gpus_per_node"],
        rate=prior(rate),
        replicated=settings.memory and settings.replicas > 0,
        max_loss_s=policy.policy.checkpoint.max_loss,
        **{name: value for name, value in said.items() if value is not None},
    )
