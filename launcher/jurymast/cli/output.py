"""The one way in which commands print: what a file of another user holds, or is called, must not control the
reader's terminal."""

from __future__ import annotations

import click

from jurymast.core.state.texts import clean


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text of any origin; control characters other than line breaks and tabs are replaced."""
    click.echo(clean(text), err=err, nl=nl)


def echo_coloured(text: str) -> None:
    """Print what `report.text.render` made: its parts are clean, and the colours around them are its own."""
    click.echo(text, nl=False, color=True)
