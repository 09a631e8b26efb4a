"""What a forecast rests on besides what was said, a line each, with the option that says it better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.report.words import count, duration, size
from jurymast.sim.durations import NODE_BYTES, TRAINING_START_S, Durations, Measured


def restart_lines(
    measured: Measured, durations: Durations, nodes: int, checkpoint_bytes: float | None
) -> list[str]:
    """How the restart time comes about when nobody said it. The option is `--restart` (of `plan`:
    `--restart-s`)."""
    own_s = durations.detection_s + durations.stop_s + durations.launch_s
    node_bytes = NODE_BYTES if checkpoint_bytes is None else checkpoint_bytes / nodes
    guess = "; the checkpoint's size is a guess (--checkpoint-bytes)" if checkpoint_bytes is None else ""
    rate = f"{size(round(measured.restore))}/s"
    return [
        f"{duration(own_s)} from a lost node to new ranks: {measured.source} (--durations)",
        f"{duration(durations.restore_s)} to restore {size(round(node_bytes))} on a new node at {rate}, "
        f"measured{guess}",
        f"{TRAINING_START_S:g} s from new ranks to their first step, for communicators, compiled code and "
        "data loaders: not measured",
    ]


def simulated_lines(
    measured: Measured, durations: Durations, setup: Mapping[str, Any], said: Mapping[str, Any]
) -> list[str]:
    """Of `simulate`: `setup` has nodes, rate and replicas, `said` the options, None where not said."""
    lines = ["failures are noticed, and ranks restarted, as quickly among all these nodes as among four"]
    if said["restart"] is None:
        lines += restart_lines(measured, durations, setup["nodes"], said["checkpoint_bytes"])
    if said["stall"] is None:
        rate = f"{size(round(measured.copy))}/s"
        lines.append(
            f"training waits {duration(durations.stall_s)} for a save: {rate} a node, measured (--stall)"
        )
    if durations.write_s is not None:
        if said["storage_gb_per_s"] is None:
            written = duration(durations.write_s)
            lines.append(f"storage takes a whole checkpoint in {written} (--storage-gb-per-s)")
        held = f"replicas on {count(setup['replicas'], 'other node')}, a spare or half the run away"
        lines.append(
            f"{held if setup['replicas'] else 'no replicas'}: if all that hold a copy are lost at once, back "
            "to the newest save in storage"
        )
    for name, text in (
        ("step", f"a step takes {duration(durations.step_s)}"),
        ("repair", f"a lost node is replaced after {duration(durations.repair_s)}"),
        ("requeue", f"a requeue takes {duration(durations.requeue_s)}"),
    ):
        if said[name] is None:
            lines.append(f"{text} (--{name})")
    if said["rate"] is None and said["trace"] is None:
        lines.append(f"{setup['rate']:.3g} failures per 1,000 node-days, not measured here (--rate)")
    if not said["hang_rate"]:
        lines.append("nothing hangs (--hang-rate)")
    if not said["script_rate"]:
        lines.append("the script never fails (--script-rate)")
    return lines
