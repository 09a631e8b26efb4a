"""Whether a failure is the same as an earlier one.

Scripts, libraries and file systems report errors as text. `error_signature` turns that text into a value, and
decisions compare values: no other code compares such text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Ports, addresses, process ids, steps, sizes, names of temporary files: they differ each time. Matches begin
# at a word's start only: tried at every character, a long word takes a supervisor seconds.
_VARYING = re.compile(r"\b\w*\d\w*")
_FRAME = re.compile(r'^[ |]*File "(.+)", line (\d{1,9})\b', re.MULTILINE)
MESSAGE_CHARACTERS = 400


@dataclass(frozen=True)
class ErrorSignature:
    """`error`: the exception's class, "" for an error without one. In `message` and `file` every word with a
    digit is replaced by #. `file` and `line` are where it was raised; "" and 0 without a traceback."""

    error: str = ""
    message: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Signature:
    """Equal for two incidents of the same cause. `kind`: the incident's class; `code`: that of the finding to
    blame; the rest is "" or 0 if the class alone identifies the cause."""

    kind: str = ""
    node: str = ""
    code: str = ""
    exit_code: int = 0
    error: ErrorSignature = ErrorSignature()


def error_signature(error: str, message: str, traceback: str = "") -> ErrorSignature:
    """Return the signature of an exception: its class, its message, and the frame that raised it, the last
    one in `traceback`."""
    file, line = (_FRAME.findall(traceback) or [("", "0")])[-1]
    masked = _VARYING.sub("#", message)[:MESSAGE_CHARACTERS]
    return ErrorSignature(error, masked, _VARYING.sub("#", file), int(line))
