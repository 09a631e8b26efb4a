"""Another script, begun once somebody has opened a pipe for writing: `gated.py PIPE SCRIPT ARGUMENTS...`."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    pipe, *sys.argv = sys.argv[1:]
    os.close(os.open(pipe, os.O_RDONLY))
    runpy.run_path(sys.argv[0], run_name="__main__")
