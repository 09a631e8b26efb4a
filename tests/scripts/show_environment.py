"""Writes what a rank finds in its environment to FOLDER/ATTEMPT.json, then is train_tiny.py."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

folder = Path(sys.argv.pop(1))
partial = folder / "partial"
partial.write_text(json.dumps(dict(os.environ)))
partial.rename(folder / f"{os.environ['JURYMAST_ATTEMPT']}.json")
runpy.run_path(str(Path(__file__).with_name("train_tiny.py")), run_name="__main__")
