"""Passes a rank's exception to its node's torchrun host through torch's error file, in torch's format."""

from __future__ import annotations

import json
import os
import time
from typing import Any

PATH_VARIABLE = "TORCHELASTIC_ERROR_FILE"
TRACEBACK_CHARACTERS = 16_000


def write(error: BaseException, text: str) -> None:
    """Write the exception with its traceback `text`, unless torch's @record did so already."""
    path = os.environ.get(PATH_VARIABLE)
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": text[-TRACEBACK_CHARACTERS:], "timestamp": str(int(time.time()))}
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


def read(path: str) -> dict[str, Any]:
    """Return {"error": exception class, "message", "traceback"}; {} if the file is missing or has other
    contents, because scripts may write it as well."""
    from jurymast import foreign  # imported here, because ranks only write

    try:
        message: Any = foreign.load(path)["message"]
        if isinstance(message, str):
            return {"error": "", "message": message[:1000], "traceback": ""}
        name, _, rest = str(message.get("message", "")).partition(": ")
        callstack = str(message.get("extraInfo", {}).get("py_callstack", ""))[-TRACEBACK_CHARACTERS:]
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        return {}
    return {"error": name[:200], "message": rest[:1000], "traceback": callstack}
