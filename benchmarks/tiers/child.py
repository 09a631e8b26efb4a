"""Processes of the benchmark: orders go in and words come out, a JSON object a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
END_LIMIT_S = 20.0
_answers = 1

Message = dict[str, Any]


class ChildError(Exception):
    """A process ended, failed at an order, or did not say what was waited for; one line says which."""


class Child:
    """`python -m module`, given `config` as its first line. To an order it says one {"said": ...}; whatever
    else it says is an event."""

    def __init__(self, module: str, config: Message, environment: Mapping[str, str] | None = None) -> None:
        self.name = str(config["name"])
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self._heard: list[Message] = []
        self._errors: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self._readers = [threading.Thread(target=work, daemon=True) for work in (self._hear, self._complain)]
        for reader in self._readers:
            reader.start()
        self.tell(config)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, order: Message) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ChildError(f"{self.name}: {self._why()}") from error

    def answer(self, limit_s: float = LIMIT_S) -> Message:
        """To the oldest order that has none yet. Raises ChildError."""
        found = self.wait(lambda message: "said" in message, "an answer", limit_s)
        if found["said"] == "failed":
            raise ChildError(f"{self.name}: {found['why']}")
        return found

    def ask(self, order: Message, limit_s: float = LIMIT_S) -> Message:
        self.tell(order)
        return self.answer(limit_s)

    def wait(self, fits: Callable[[Message], bool], what: str, limit_s: float = LIMIT_S) -> Message:
        """The oldest message that fits; it is not found again. Raises ChildError."""
        end = time.monotonic() + limit_s
        with self._news:
            while True:
                for number, message in enumerate(self._heard):
                    if fits(message):
                        return self._heard.pop(number)
                if self._ended:
                    raise ChildError(f"{self.name}: {self._why()}")
                if not self._news.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise ChildError(f"{self.name}: no word of {what} within {limit_s:.0f} s")

    def forget(self) -> None:
        """What was said until now is of no interest."""
        with self._news:
            self._heard.clear()

    def end(self) -> None:
        """Its memory is free when this returns."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_LIMIT_S)
        for reader in self._readers:
            reader.join(END_LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # it did not read all that was said to it

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._heard.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _complain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors = [*self._errors[-50:], line.decode(errors="replace").rstrip()]

    def _why(self) -> str:
        self.process.wait(END_LIMIT_S)
        self._readers[1].join(END_LIMIT_S)
        lines = [line for line in self._errors if line.strip()]
        return f"ended with {self.process.returncode}: {(lines or ['it said nothing'])[-1][-300:]}"


def keep_answers() -> None:
    """In a child: from here on only `say` writes to standard output; libraries print elsewhere."""
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)


def say(message: Message) -> None:
    """From a child: one line, to whoever started it."""
    os.write(_answers, json.dumps(message).encode() + b"\n")


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]
