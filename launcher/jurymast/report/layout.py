"""Text for people: lines and tables, laid out by rich on a terminal and as plain text in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Colours of words on a terminal. No meaning depends on colour alone.
STYLES = {
    "succeeded": "bold green", "running": "green", "active": "green", "failed": "bold red",
    "cancelled": "yellow", "recovering": "bold yellow", "suspect": "yellow", "requeued": "yellow",
    "spare": "cyan", "joining": "dim", "queued": "dim", "starting": "cyan",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table. `right` has the indexes of right-aligned columns. With `wrap`, the last column may take
    several lines on a terminal; without it rows stay whole, however long they are."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = field(default_factory=frozenset)
    wrap: bool = True


Block = Line | Table


def clean(text: str) -> str:
    """`text` without control characters: what a script printed must not control the reader's terminal."""
    if text.isprintable():  # nearly always
        return text
    return "".join(c if c in "\n\t" or (c.isprintable()) else "�" for c in text)


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


def _rich(blocks: Sequence[Block], width: int) -> str:
    import io

    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, highlight=False, emoji=False)
    for block in blocks:
        if isinstance(block, Line):
            console.print(Text(one_line(block.text), style=block.style), soft_wrap=True)
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
