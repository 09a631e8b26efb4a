"""Readers of the values in a policy. They raise ValueError with what is wrong and what to write."""

from __future__ import annotations

import math
import re

from jurymast.core.checkpoints.cadence import Cadence, parse_cadence
from jurymast.core.settings import Budget
from jurymast.core.texts import did_you_mean, seconds_in
from jurymast.reference import thresholds, xids

# Far below what the clocks of Python and of the system can count.
LONGEST_S = 100 * 365 * 86400.0
_NUMBER = re.compile(r"[-+]?(?!0\d)[\d.]+")


def duration(value: object) -> float:
    """The seconds of "0.5s", "10m", "1h30m" or "24h"."""
    seconds = seconds_in(value) if isinstance(value, str) else None
    if seconds is not None and seconds > LONGEST_S:
        raise ValueError(f"{written(value)} is longer than a hundred years")
    if seconds is None:
        raise ValueError(
            f"{written(value)} is not a duration; write a number with a unit, like 0.5s, 10m, 1h30m or 2d"
        )
    return seconds


def positive_duration(value: object) -> float:
    seconds = duration(value)
    if seconds <= 0:
        raise ValueError("must be longer than 0")
    return seconds


def whole_number(value: object, *, least: int = 0) -> int:
    """A whole number of at least `least`; YAML's true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{written(value)} is not a whole number")
    if value < least:
        raise ValueError(f"must be at least {least}")
    return value


def one_or_more(value: object) -> int:
    return whole_number(value, least=1)


def none_or_one_or_more(value: object) -> int | None:
    return None if value is None else one_or_more(value)


def budget(value: object) -> Budget:
    """A restart budget, like "3 per 1h"."""
    match = re.fullmatch(r"\s*(\d+)\s+(?:per|in)\s+(\S.*)", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"{written(value)} is not a restart budget; write unlimited, or a number per time, like 3 per 1h"
        )
    return Budget(count=int(match[1]), window_s=positive_duration(match[2]))


def cadence(value: object) -> Cadence:
    """A cadence: "auto", "200 steps" or "10m"."""
    try:
        if isinstance(value, str) and not value.strip().isdigit():  # a writer may mean 200 seconds by 200
            return parse_cadence(value)
    except ValueError:
        pass
    raise ValueError(
        f"{written(value)} is not a cadence; write auto, a number of steps (200 steps) or a time (10m)"
    )


def fraction(value: object) -> float:
    """A share between 0 and 1: "2%" or 0.02."""
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"\d+(?:\.\d+)?%", text):
        share = float(text[:-1]) / 100
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value)
    else:
        raise ValueError(f"{written(value)} is not a share; write a percentage, like 2%")
    if not 0 <= share <= 1:
        raise ValueError("must be between 0% and 100%")
    return share


def on_or_off(value: object) -> bool:
    """Whether a switch is on; YAML reads both words as true and false."""
    if isinstance(value, bool):
        return value
    if value in ("on", "off"):
        return value == "on"
    raise ValueError(f"{written(value)} is neither on nor off")


def factor(value: object) -> float:
    """A factor above 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 < value < math.inf:
        raise ValueError(f"{written(value)} is not a factor; write off, or a number above 1, like 1.5")
    return float(value)


def rate(value: object) -> float:
    """Failures per 1,000 node-days."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(
            f"{written(value)} is not a failure rate; write auto, or failures per 1,000 node-days, like 6.5"
        )
    return float(value)


def xid_code(value: str) -> str:
    """A code of the packaged Xid table, as text."""
    codes = [str(code) for code in xids()]
    if value not in codes:
        raise ValueError(
            f"{written(value)} is not an Xid code that this version knows{did_you_mean(value, codes)}; "
            f"known codes: {', '.join(codes)}"
        )
    return value


def threshold_name(value: str) -> str:
    if value not in thresholds():
        raise ValueError(
            f"there is no threshold {written(value)}{did_you_mean(value, thresholds())}; "
            "jurymast health --thresholds lists them"
        )
    return value


def written(value: object) -> str:
    """`value` as written in a YAML file, cut short; text that would be read as something else has quotes."""
    if value is None:
        return "nothing"
    if isinstance(value, str) and (not value.strip() or _NUMBER.fullmatch(value)):
        return f'"{value[:60]}"'
    return (str(value).lower() if isinstance(value, bool) else str(value))[:60]
