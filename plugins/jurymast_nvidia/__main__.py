"""Prints what the nvidia probe sees on this machine, check by check, and its cost: `python -m
jurymast_nvidia`.

`--json` prints one object: gpus: [{gpu, bus, checks: [{check, answers, problems}]}], findings, and the median
processor time in microseconds of all checks of all GPUs (batch_us) and of asking for events (events_us).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jurymast_nvidia
from jurymast.health.probe import Context

LOOKS = 20


def main() -> int:
    """Return exit code 0 if the probe could look, 1 if there is nothing to look at, 2 for wrong arguments."""
    arguments = sys.argv[1:]
    if arguments not in ([], ["--json"]):
        print("usage: python -m jurymast_nvidia [--json]", file=sys.stderr)
        return 2
    probe = jurymast_nvidia.probe(Context())
    if probe is None:
        print(
            "nothing to see: no NVIDIA GPU or driver here, or no nvidia-ml-py in this Python", file=sys.stderr
        )
        return 1
    try:
        seen = _seen(probe)
    finally:
        probe.close()
    print(json.dumps(seen) if arguments else _text(seen))
    return 0 if seen["gpus"] else 1


def _seen(probe: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {"findings": [finding.to_json() for finding in probe.look(time.time())]}
    seen["gpus"] = [_checked(watched) for watched in getattr(probe, "gpus", [])]
    if seen["gpus"]:
        seen["batch_us"] = _median_us(lambda: probe.batch(time.time()))
        seen["events_us"] = _median_us(lambda: probe.look(time.time()))
    return seen


def _checked(watched: Any) -> dict[str, Any]:
    from jurymast_nvidia.checks import CHECKS, attempt

    checked = []
    for name, check in CHECKS:
        answers: list[str] = []
        watched.gpu.trace = answers
        problems, _ = attempt(name, check, watched, time.time())
        words = [problem.message for problem in problems]
        checked.append({"check": name, "answers": answers, "problems": words})
    watched.gpu.trace = None
    return {"gpu": watched.gpu.name, "bus": watched.gpu.bus, "checks": checked}


def _median_us(run: Callable[[], object]) -> float:
    spent = []
    for _ in range(LOOKS):
        begin = time.process_time_ns()
        run()
        spent.append((time.process_time_ns() - begin) / 1000)
    return statistics.median(spent)


def _text(seen: dict[str, Any]) -> str:
    lines = []
    for gpu in seen["gpus"]:
        lines.append(f"{gpu['gpu']} {gpu['bus']}")
        for check in gpu["checks"]:
            lines += [f"  {check['check']}", *(f"    {answer}" for answer in check["answers"])]
            lines += [f"    -> {problem}" for problem in check["problems"]]
    for finding in seen["findings"]:
        lines.append(f"{finding['verdict']}: {finding['message']}")
    if seen["gpus"]:
        lines.append(
            f"processor time: {seen['batch_us']:.0f} us for all checks of {len(seen['gpus'])} GPUs, "
            f"{seen['events_us']:.0f} us to ask for events"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
