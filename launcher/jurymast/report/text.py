"""Text for terminals: numbers and times as words, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from jurymast.core.state.failure_rate import MERGE_S
from jurymast.core.state.texts import clean as clean
from jurymast.core.state.texts import count as count
from jurymast.core.state.texts import size as size
from jurymast.core.state.texts import some as some

# Of failures of the infrastructure (nodes, network, storage), why an MTBF has fewer of them, and less time,
# than one sees.
MERGED = f"the {MERGE_S / 60:.0f} min after a failure count as part of it"


def iso(t: float | None) -> str | None:
    """Render seconds since the epoch as ISO 8601 in the local zone, with milliseconds; None stays None."""
    if t is None:
        return None
    return datetime.fromtimestamp(t, timezone.utc).astimezone().isoformat(timespec="milliseconds")


def clock(t: float) -> str:
    """Render seconds since the epoch as local date and time, to the second."""
    return datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Render a duration: 12.3 s, 4 min 05 s, 3 h 07 min, 2 d 04 h; - if it is not known."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 or seconds == 0 else "<1 ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def step_told(step: int, attempt: int, *, known: bool) -> str:
    return f"step {step}" + ("" if known else f" of attempt {attempt}, begun at a step that is not known")


def begins(what: str, nodes: Sequence[str], starts_at: float, now: float) -> str:
    """Render when `what` begins on nodes, or since when it has begun."""
    left_s, at = starts_at - now, clock(starts_at)
    if left_s < 0.0:
        return f"{what} has begun on {some(nodes)} at {at}, {duration(-left_s)} ago"
    return f"{what} begins on {some(nodes)} at {at}, in {duration(left_s)}"


def minutes(value: float) -> str:
    """Render minutes: 6.2 min below two hours, else hours or days."""
    if value < 1.0:
        return f"{60.0 * value:.3g} s"
    return (
        f"{value:.3g} min" if value < 99.95 else f"{value:.0f} min" if value < 180.0 else duration(60 * value)
    )


def plain_seconds(seconds: float) -> str:
    """Render a number of seconds without unit, for columns; - for none."""
    return "-" if seconds == 0 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def squeue_time(seconds: float) -> str:
    """Render a run time as squeue does: [days-]hours:minutes:seconds, minutes:seconds below an hour."""
    whole = max(0, int(seconds))
    days, hours, minutes, rest = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60, whole % 60
    if days:
        return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def amounts(tiers: Mapping[str, int]) -> str:
    """Render bytes by tier: 31 MB from memory, 10 MB from peer."""
    return ", ".join(f"{size(count)} from {tier}" for tier, count in tiers.items() if count)


def throughput(samples_s: float, tokens_s: float) -> dict[str, float | None]:
    """What a training takes a second, for JSON; null for what its script does not say."""
    return {"samples": round(samples_s, 3) or None, "tokens": round(tokens_s, 3) or None}


def rates(found: Mapping[str, float | None]) -> list[str]:
    """Render what is known of a throughput: 512 samples/s, 1.05 M tokens/s."""
    return [f"{amount(value)} {name}/s" for name, value in found.items() if value]


def amount(value: float) -> str:
    """Render a large number to three digits: 4.2, 512, 52,400, 1.05 M."""
    return f"{value / 1e6:,.3g} M" if value >= 1e6 else f"{float(f'{value:.3g}'):,.10g}"


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def points(change: float | None) -> str:
    """A difference of two ratios, in percentage points; never -0.0."""
    return "-" if change is None else f"{round(100 * change, 1) + 0.0:+.1f}"


def between(least: float | None, most: float | None) -> str:
    """A ratio of which only bounds are known, as a range: a single number would be wrong."""
    low, high = percent(least), percent(most)
    return low if low == high else f"{low} to {high}"


def percent_fine(ratio: float) -> str:
    return f"{100.0 * ratio:.2f} %"


def node_time(node_seconds: float) -> str:
    """Render node-time: 12.3 node-s, 45 node-min, 6.7 node-h."""
    if node_seconds < 120:
        return f"{node_seconds:.1f} node-s"
    if node_seconds < 7200:
        return f"{node_seconds / 60:.1f} node-min"
    return f"{node_seconds / 3600:.1f} node-h"


# Colours of words on a terminal. No meaning depends on colour alone.
STYLES = {
    "succeeded": "bold green", "running": "green", "active": "green", "failed": "bold red",
    "cancelled": "yellow", "recovering": "bold yellow", "suspect": "yellow", "requeued": "yellow",
    "spare": "cyan", "joining": "dim", "queued": "dim", "starting": "cyan",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line. With `indent`, a terminal that is too narrow shows the rest of it below, between words and so
    far to the right; without it the terminal breaks it anywhere, so that it can be copied whole."""

    text: str
    style: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Table:
    """A table. `right` has the indexes of right-aligned columns. With `wrap`, the last column may take
    several lines on a terminal; without it rows stay whole, however long they are."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = field(default_factory=frozenset)
    wrap: bool = True


Block = Line | Table


def one_line(text: str, most: int | None = None) -> str:
    """`text` on one line, with control characters replaced, cut after `most` characters."""
    line = clean(" ".join(text.split("\n")) if "\n" in text else text)
    return line if most is None or len(line) <= most else f"{line[: most - 4].rstrip()} ..."


def render(blocks: Sequence[Block], *, terminal: bool, width: int = 100) -> str:
    """Render the blocks as text that ends with a newline. `width` in columns matters only on a terminal."""
    return _rich(blocks, width) if terminal else _plain(blocks)


def _plain(blocks: Sequence[Block]) -> str:
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Line):
            lines.append(one_line(block.text))
        else:
            lines += plain_table(block)
    return "\n".join(lines) + "\n"


def plain_table(table: Table) -> list[str]:
    """Lines with columns two spaces apart, as squeue and kubectl print them."""
    rows = [[one_line(str(cell)) for cell in row] for row in (table.headers, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in table.right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _wrapped(line: Line, width: int) -> str:
    text = one_line(line.text)
    if not line.indent or len(text) <= width:
        return text
    from textwrap import fill

    return fill(
        text, width, subsequent_indent=" " * line.indent, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip


def _rich(blocks: Sequence[Block], width: int) -> str:
    import io

    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, highlight=False, emoji=False)
    for block in blocks:
        if isinstance(block, Line):
            console.print(Text(_wrapped(block, width), style=block.style), soft_wrap=True)
            continue
        if not block.wrap:
            for number, line in enumerate(plain_table(block)):
                console.print(Text(line, style="" if number else "bold"), soft_wrap=True)
            continue
        shown = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for number, header in enumerate(block.headers):
            last = number == len(block.headers) - 1
            shown.add_column(
                header, justify="right" if number in block.right else "left", no_wrap=not last,
                overflow="fold" if last else "ellipsis",
            )  # fmt: skip
        for row in block.rows:
            shown.add_row(*(Text(one_line(str(cell)), style=STYLES.get(str(cell), "")) for cell in row))
        console.print(shown)
    return out.getvalue()
