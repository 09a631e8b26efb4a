"""A run's forecast as one JSON object: what `plan` prints, and what its text and its page are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jurymast.core.planning.failure_rate import DAY_S
from jurymast.core.planning.forecast import (
    COPY_BYTES_PER_S,
    REPLICATE_BYTES_PER_S,
    Forecast,
    Needed,
    SpareChoice,
    Way,
    durable_per_day,
)
from jurymast.core.planning.optimum import RATE_FACTOR
from jurymast.core.planning.reliability import LEVEL

GB = 1e9
DEFINITIONS = {
    "goodput": "share of the time in which training makes steps that count, while all nodes are there",
    "ettr": "the same, with the time in which the run waits for a node; no queue before the start",
    "allocation_goodput": "the same with the spares' time in the denominator",
}


def plan_view(found: Forecast, restart: Sequence[str] = ()) -> dict[str, Any]:
    """Times in minutes or seconds as named, sizes in bytes, bandwidths in GB (1e9 bytes) per second, ratios
    0..1. None: needs the checkpoint's size or the storage's speed. `restart`: what the restart time rests on
    when nobody said it."""
    question, way = found.question, found.way
    size = question.checkpoint_bytes
    bytes_per_day = None if size is None else size * durable_per_day(way)
    low_rate, high_rate = question.rate.interval()
    return {
        "nodes": question.nodes, "gpus_per_node": question.gpus_per_node,
        "gpus": question.nodes * question.gpus_per_node,
        "rate": {
            "per_1000_node_days": question.rate.rate, "low": low_rate, "high": high_rate, "level": LEVEL,
            "evidence": question.rate.evidence(),
        },
        "mttf_minutes": found.mtbf_s / 60.0,
        "way": way.name,
        "cadence_minutes": way.interval_s / 60.0,
        "checkpoints_per_day": DAY_S / way.interval_s,
        "durable_cadence_minutes": way.durable_interval_s / 60.0,
        "durable_checkpoints_per_day": durable_per_day(way),
        "checkpoint_bytes": size,
        "bytes_per_day": bytes_per_day,
        "average_write_gb_per_s": None if bytes_per_day is None else bytes_per_day / DAY_S / GB,
        "burst_write_gb_per_s": None if size is None or not way.write_s else size / way.write_s / GB,
        "stall_seconds": way.stall_s, "write_seconds": way.write_s, "restart_seconds": question.restart_s,
        "spares": found.spares.spares,
        "spares_by_risk": found.spare_rule,
        "goodput": way.goodput, "goodput_low": found.low, "goodput_high": found.high,
        "ettr": found.spares.ettr, "allocation_goodput": found.spares.allocation_goodput,
        "definitions": DEFINITIONS,
        "ways": [_way(each) for each in found.ways],
        "spare_choices": [_spares(each) for each in found.more_spares],
        "gain": {"storage_twice_as_fast": found.faster_storage, "one_more_spare": _one_more(found)},
        "sensitivity": {"rate_factor": RATE_FACTOR, "goodput_lost": found.sensitivity},
        "needed_for_target": [_needed(each) for each in found.needed] if size is not None else [],
        "assumed": _assumed(found, restart),
    }  # fmt: skip


def _way(way: Way) -> dict[str, Any]:
    return {
        "way": way.name, "cadence_minutes": way.interval_s / 60.0,
        "durable_cadence_minutes": way.durable_interval_s / 60.0, "stall_seconds": way.stall_s,
        "write_seconds": way.write_s, "goodput": way.goodput,
    }  # fmt: skip


def _spares(choice: SpareChoice) -> dict[str, Any]:
    return {
        "spares": choice.spares, "waiting": choice.waiting, "ettr": choice.ettr,
        "allocation_goodput": choice.allocation_goodput,
    }  # fmt: skip


def _one_more(found: Forecast) -> float:
    """Allocation goodput gained by one more spare; negative when it costs more than it saves."""
    next_one = next(c for c in found.more_spares if c.spares == found.spares.spares + 1)
    return next_one.allocation_goodput - found.spares.allocation_goodput


def _needed(needed: Needed) -> dict[str, Any]:
    return {
        "goodput": needed.goodput, "restart_seconds": needed.restart_s,
        "blocking_gb_per_s": None if needed.blocking is None else needed.blocking / GB,
        "asynchronous_gb_per_s": None if needed.asynchronous is None else needed.asynchronous / GB,
    }  # fmt: skip


def _assumed(found: Forecast, restart: Sequence[str]) -> list[str]:
    """What was not said and stands on a guess, for people."""
    question = found.question
    said = []
    if question.by_target:
        said.append(f"the storage writes as fast as {100 * question.target:g} % needs (--storage-gb-per-s)")
    elif question.stall_s is None:
        source = "guessed" if question.checkpoint_bytes is None else "from the checkpoint's size"
        said.append(f"training waits {question.stall_used_s:.2g} s for each save, {source} (--stall-s)")
    if question.rate.incidents == 0.0:
        said.append(f"{question.rate.rate:.3g} failures per 1,000 node-days, not measured here (--rate)")
    said.append(f"{question.restart_s:.3g} s from a failure to new steps (--restart-s)")
    said += [f"  {line}" for line in restart]
    said.append("failures are noticed, and ranks restarted, as quickly among all these nodes as among four")
    if found.way.name == "memory":
        said.append(
            f"{100 * question.durable_share:g} % of failures take both copies in memory along; a node copies "
            f"{COPY_BYTES_PER_S / GB:g} GB/s in its memory, {REPLICATE_BYTES_PER_S / GB:g} GB/s to another"
        )
    said.append(f"a lost node is replaced in {question.replace_s / 3600.0:g} h (--replace-h)")
    return said
