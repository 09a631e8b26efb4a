"""A process that looks through the nvidia probe when it is told to: scripts/nvidia_looks.py."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/scripts/nvidia_looks.py"
PATHS = f"{ROOT}/launcher:{ROOT}/plugins"
START = 1_700_000_000.0
BATCH_S = 15.0
LIMIT_S = 120.0
Found = tuple[str, str, str]  # code, device, verdict


class Looker:
    def __init__(self, environment: dict[str, str], options: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *options, str(SCRIPT)],
            env={**os.environ, "PYTHONPATH": PATHS, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.now = START

    def open(self, visible: str | None = None, **context: object) -> bool:
        self.now = START
        return bool(self._ask({"do": "open", "context": context, "visible": visible}))

    def look(self, after_s: float = BATCH_S) -> list[dict[str, Any]]:
        """The findings of a look `after_s` seconds after the last one."""
        self.now += after_s
        found: list[dict[str, Any]] = self._ask({"do": "look", "now": self.now})
        return found

    def found(self, after_s: float = BATCH_S) -> list[Found]:
        return [(f["code"], f["device"], f["verdict"]) for f in self.look(after_s)]

    def energy(self) -> dict[str, float]:
        """Joules by PCI address, as of the last look."""
        used: dict[str, float] = self._ask({"do": "energy"})
        return used

    def close(self) -> None:
        self._ask({"do": "close"})

    def tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answers(self, within_s: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], within_s)[0])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, order: dict[str, Any]) -> Any:
        self.tell(order)
        assert self.answers(LIMIT_S), "no answer"
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())
