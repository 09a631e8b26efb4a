"""Texts that several decisions need, and lists of hosts as Slurm writes them: `n[01-03,07],m1`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from itertools import groupby


def compressed(hosts: Iterable[str]) -> str:
    """Write the hosts in this order; hosts with consecutive numbers become one range."""
    ranges: list[tuple[str, list[str]]] = []  # a name without its number, and consecutive numbers of it
    for host in hosts:
        name = host.rstrip("0123456789")
        number = host[len(name) :]
        last = ranges[-1][1][-1] if ranges and ranges[-1][0] == name else ""
        if last and number == str(int(last) + 1).zfill(len(last)):
            ranges[-1][1].append(number)
        else:
            ranges.append((name, [number]))
    parts = []
    for name, group in groupby(ranges, key=lambda one: one[0]):
        texts = [f"{first}-{rest[-1]}" if rest else first for _, (first, *rest) in group]
        alone = len(texts) == 1 and "-" not in texts[0]
        parts.append(name + (texts[0] if alone else f"[{','.join(texts)}]"))
    return ",".join(parts)


def expanded(hosts: str) -> list[str]:
    """Read what `compressed`, or Slurm, wrote."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else [one for text in ranges.split(",") for one in _numbers(text)]
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _numbers(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit()):
        return [text]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


# At most this many nodes of an incident are named; a switch can take hundreds along.
NODES_TOLD = 20

_UNITS_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = r"(\d+(?:\.\d+)?)\s*(ms|sec|s|min|m|h|d)"
DURATION = f"^\\s*(?:{_PART}\\s*)+$"


def some(names: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    """List the first names, and count the others."""
    if len(names) <= most:
        return separator.join(names)
    return f"{separator.join(names[:most])} and {len(names) - most} more"


def on(nodes: Sequence[str]) -> str:
    """Return " on n1, n2"; "" for what is on no node."""
    return f" on {some(nodes)}" if nodes else ""


def count(number: int, thing: str) -> str:
    """Return a number with its noun: 1 node, 2 nodes."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Format bytes with a decimal unit: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:.3g} PB"


def memory_size(count: int) -> str:
    """Format bytes in the units of Slurm's --mem, in which people request memory: 1.5 GiB."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def spoken_s(seconds: float) -> str:
    """Render seconds for people: 190 ms, 9.5 s, 42 s, 14 min."""
    if seconds >= 120.0:
        return f"{seconds / 60:.0f} min"
    if seconds >= 10.0:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.3g} ms"


def signal_name(number: int) -> str:
    """Render a signal: SIGKILL; `signal 36` for one that has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def request(what: str, node: str = "") -> str:
    """Describe what a user requested, like "restart" or "replacement of node n2". The journal calls a
    replacement by a user a drain, and a cancel by an end of the agents' step step_ended."""
    if what == "save" and node:
        return f"save before node {node} is removed"
    named = {"drain": "replacement", "step_ended": "cancel"}.get(what, what)
    return f"{named} of node {node}" if node else named


def reservation(name: str, *, maintenance: bool) -> str:
    """Describe a reservation of Slurm's, like "maintenance july" or "reservation exam"."""
    return f"{'maintenance' if maintenance else 'reservation'} {name}"


def seconds_in(text: str) -> float | None:
    """Parse a duration as people write it (0.5s, 10m, 1h30m, 90 min, 2d) into seconds; None for anything
    else."""
    plain = text.strip().lower()
    if not re.match(DURATION, plain):
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, plain))


def age_s(text: str) -> float:
    """The same for how long ago something was. Raises ValueError."""
    seconds = seconds_in(text)
    if not seconds:
        raise ValueError(f"{text} is not a duration; write one like 28d or 12h")
    return seconds


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `word`, or None if none is. `_` and `-` count as the same character."""
    import difflib  # seldom needed

    plain = {name.replace("_", "-").lower(): name for name in names}
    close = difflib.get_close_matches(word.replace("_", "-").lower(), plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return " (did you mean X?)", or ""."""
    name = nearest(word, names)
    return f" (did you mean {name}?)" if name else ""


def clean(text: str) -> str:
    """`text` without control characters: what a script printed must not control the reader's terminal."""
    if text.isprintable():  # nearly always
        return text
    return "".join(c if c in "\n\t" or (c.isprintable()) else "�" for c in text)
