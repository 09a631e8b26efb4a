"""Messages for people from a batch script's job: they are printed in the job's own output, next to the
script's."""

from __future__ import annotations

import sys

from jurymast.errors import JurymastError


def say(text: str) -> None:
    print(f"jurymast: {text}", file=sys.stderr, flush=True)


def complain(error: JurymastError) -> None:
    say(f"error: {error}")
    if error.hint:
        say(error.hint)
