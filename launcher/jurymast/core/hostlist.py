"""Lists of hosts as Slurm writes them: `n[01-03,07],m1`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby


def compressed(hosts: Iterable[str]) -> str:
    """Write the hosts in this order; hosts with consecutive numbers become one range."""
    parts = []
    for prefix, ranges in groupby(_ranges(hosts), key=lambda one: one[0]):
        texts = [low if low == high else f"{low}-{high}" for _, low, high in ranges]
        numbered = texts != [""]
        alone = len(texts) == 1 and "-" not in texts[0]
        parts.append(prefix + (texts[0] if alone else f"[{','.join(texts)}]" if numbered else ""))
    return ",".join(parts)


def _ranges(hosts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Return (name without its number, first number, last number); "" for names without one."""
    now: tuple[str, str, str] | None = None
    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d*)", host)
        assert match is not None
        prefix, number = match[1], match[2]
        if now is not None and number and now[0] == prefix and number == _next(now[2]):
            now = (prefix, now[1], number)
            continue
        if now is not None:
            yield now
        now = (prefix, number, number)
    if now is not None:
        yield now


def _next(number: str) -> str:
    return str(int(number) + 1).zfill(len(number)) if number else ""
