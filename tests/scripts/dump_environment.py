"""Writes what this process was started with to a file of the given name and its number: variables, limits,
working directory and umask. Says something to stdout and to stderr."""

from __future__ import annotations

import json
import os
import resource
import sys

limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
mask = os.umask(0)
os.umask(mask)
told = {
    "environment": dict(os.environ),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
    "directory": os.getcwd(),
    "mask": oct(mask),
    "arguments": sys.argv[1:],
}
name, variable = sys.argv[1:3]
# Whole lines at once: ranks of torchrun's share a file.
os.write(1, f"said {name}\n".encode())
os.write(2, f"said {name} as an error\n".encode())
with open(f"{name}-{os.environ.get(variable, 0)}.json", "w", encoding="utf-8") as file:
    json.dump(told, file)
