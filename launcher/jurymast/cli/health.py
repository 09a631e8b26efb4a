"""`jurymast health`: run every health probe on this machine now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast.cli.options import (
    Number,
    examples,
    file_option,
    json_option,
    resolved_policy,
    show,
    show_json,
)
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import UsageError

if TYPE_CHECKING:
    from jurymast.core.state.settings import Settings
    from jurymast.policy.resolve import Resolved

# The words with which Nagios begins a line, by its exit codes.
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


@click.command(epilog=examples("jurymast health", "jurymast health --explain 79"))
@click.option("--probe", "names", multiple=True, metavar="NAME", help="Run only this probe; may be repeated.")
@click.option(
    "--limit", type=Number(0.1), metavar="S",
    help="Seconds a probe may take; one that takes longer is run once more.  [look-limit-s: 30]",
)  # fmt: skip
@click.option("--explain", type=int, metavar="XID", help="Explain an Xid code of NVIDIA's driver.")
@click.option("--thresholds", is_flag=True, help="List the probes' limits.")
@file_option("--policy", help="Use the limits of this policy.")
@json_option
@click.pass_context
def command(
    click_context: click.Context, names: tuple[str, ...], limit: float | None, explain: int | None,
    thresholds: bool, policy: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Check this machine with every probe, now.

    The exit code is 0 if nothing was found that a run would act on, 1 if something is suspect, 2 if
    something is bad, and 3 if no probe could check anything. Messages of the last hour in the kernel's log
    count, if the log can be read.
    """
    resolved = resolved_policy(policy)
    if explain is not None:
        _explain(explain, resolved, as_json)
    elif thresholds:
        _list_thresholds(resolved, as_json)
    else:
        click_context.exit(_look(resolved.settings(), names, limit, as_json))


def _look(settings: Settings, names: tuple[str, ...], limit_s: float | None, as_json: bool) -> int:
    from jurymast.health.once import look
    from jurymast.health.watcher import names_to_ask
    from jurymast.reference import installed

    for name in names:
        if name not in installed():
            raise UsageError(
                f"there is no probe {name}{did_you_mean(name, installed())}",
                hint=f"the installed probes are {', '.join(installed())}",
            )
    limits = settings.thresholds | ({"look-limit-s": limit_s} if limit_s is not None else {})
    view = look(
        names or names_to_ask(settings.probes_off), limits=limits, readings=dict(settings.xid),
        data_paths=settings.data_paths, local_path=settings.local_path,
    )  # fmt: skip
    if as_json:
        show_json(view)
    else:
        _show(view)
    return int(view["exit_code"])


def _show(view: dict[str, Any]) -> None:
    from jurymast.report.text import Block, Line, Table

    by_state: dict[str, list[str]] = {}
    for probe in view["probes"]:
        by_state.setdefault(probe["state"], []).append(probe["name"])
    said = {
        "looked": "checked:", "nothing": "nothing to check for:", "failed": "failed:",
        "left out": "left out:",
    }  # fmt: skip
    parts = [f"{said[state]} {', '.join(by_state[state])}" for state in said if state in by_state]
    style = ("green", "yellow", "bold red", "yellow")[view["exit_code"]]
    blocks: list[Block] = [Line(f"{WORDS[view['exit_code']]}: {view['node']}: {'; '.join(parts)}", style)]
    rows = [
        (f["verdict"], f["kind"], f["probe"], f["code"], f["device"] or "-", f["message"])
        for f in sorted(view["findings"], key=lambda f: ("bad", "suspect", "unknown").index(f["verdict"]))
    ]
    if rows:
        blocks.append(Table(("VERDICT", "KIND", "PROBE", "CODE", "DEVICE", "WHAT"), rows))
    show(blocks)


def _explain(code: int, resolved: Resolved, as_json: bool) -> None:
    """The packaged reading of an Xid code, and the policy's. Raises UsageError for an unknown code."""
    from jurymast.health.probe import Context, reading
    from jurymast.reference import recovery_actions, xids
    from jurymast.report.text import Line

    entry = xids().get(code)
    if entry is None:
        raise UsageError(
            f"Xid {code} is not in the table; a run would report it and do nothing else",
            hint=f"known codes are {', '.join(map(str, xids()))}",
        )
    own = resolved.settings().xid.get(str(code))
    verdict, kind = reading(code, "", Context(xid={str(code): own} if own else {}))
    follows = entry.group == "text" and not own
    view = {
        "xid": code, "class": entry.group, "verdict": verdict.value, "kind": kind, "meaning": entry.meaning,
        "action": entry.action, "source": entry.source, "policy": own,
        "origin": str(resolved.origins[("health", "xid", str(code))]) if own else None,
    }  # fmt: skip
    if as_json:
        show_json(view)
        return
    by_text = ", ".join(f"{one.words}: {one.verdict.value}" for one in recovery_actions().values())
    lines = [
        ("Xid", f"{code}: {entry.meaning}"),
        ("class", entry.group),
        ("verdict", f"depends on its text ({by_text})" if follows else f"{verdict.value} ({kind})"),
        ("action", entry.action),
        ("source", entry.source),
        ("policy", f"reads it as {own} ({view['origin']})" if own else "does not change this"),
    ]
    show([Line(f"{name:<9}{text}") for name, text in lines])


def _list_thresholds(resolved: Resolved, as_json: bool) -> None:
    from jurymast.reference import thresholds
    from jurymast.report.text import Table

    own = resolved.settings().thresholds
    view = [
        {
            "name": name, "value": own.get(name, limit.value), "unit": limit.unit, "meaning": limit.meaning,
            "source": str(resolved.origins.get(("health", "thresholds", name), limit.source)),
        }
        for name, limit in thresholds().items()
    ]  # fmt: skip
    if as_json:
        show_json(view)
        return
    rows = [
        (str(v["name"]), f"{v['value']:g}", str(v["unit"]), f"{v['meaning']} [{v['source']}]") for v in view
    ]
    show([Table(("NAME", "VALUE", "UNIT", "MEANING"), rows, right=frozenset({1}))])
