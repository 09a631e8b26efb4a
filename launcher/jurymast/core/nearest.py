"""The valid name nearest to a mistyped one, for "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name most like `word`, or None when nothing is near. `_` and `-` count as the same letter."""
    plain = {name.replace("_", "-").lower(): name for name in names}
    close = difflib.get_close_matches(word.replace("_", "-").lower(), plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """ " (did you mean X?)", or nothing."""
    name = nearest(word, names)
    return f" (did you mean {name}?)" if name else ""
