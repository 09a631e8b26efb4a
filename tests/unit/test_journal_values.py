"""A colleague's journal in which something is of another type than it should be, or absurd: commands show the
rest and name the line, and end in no traceback. JURYMAST_FUZZ=N has N examples instead of a few."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jurymast.cli.main import main
from jurymast.core.state import effects
from jurymast.core.state import events as ev
from jurymast.errors import RunDirectoryError
from jurymast.journal import VERSION, together
from support.commands import RUN, Place, swapped

EXAMPLES = int(os.environ.get("JURYMAST_FUZZ", "40"))
LOOKS = (
    ("status", RUN, "--all"), ("status", RUN, "--json"), ("events", RUN), ("events", RUN, "--json"),
    ("report", RUN), ("report", RUN, "--json"), ("report", RUN, "--html", "page.html"),
)  # fmt: skip
# What fits into the story; of other fields any value will do.
FITTING = {"node": "n1", "attempt": 2, "rank": 0, "verdict": "suspect", "kind": "hardware", "ranks": [0]}
OTHER = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**400), 2**63, 1e308, -1, "n1", "9" * 400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def plain(kind: type[Any]) -> dict[str, Any]:
    """Every field with some value of its type."""
    values = {}
    for name, one in get_type_hints(kind).items():
        for value in (FITTING.get(name, "x"), 1, 1.0, True, ["x"], [1], {"shared": 1}):
            try:
                msgspec.convert(value, one)
            except ValueError:
                continue
            values[name] = value
            break
    return values


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The run's own, and before its end one of each other kind that there is, and one of several nodes."""
    entries = [json.loads(line) for line in (run / "journal/epoch-000001.jsonl").read_text().splitlines()]
    end = next(n for n, entry in enumerate(entries) if entry.get("event") == "NodeFinished")
    entries, last = entries[:end], entries[end:]
    at = last[0]["t"]
    told = {entry.get("event") for entry in entries}
    kinds = sorted(ev.KINDS.keys() - told - {"AllocationEnded"})
    more: list[dict[str, Any]] = [{"event": name, **plain(ev.KINDS[name])} for name in kinds]
    decisions = effects.Instruction.__subclasses__()
    more += [{"decision": kind.__name__, **plain(kind)} for kind in decisions]
    stopped = [ev.WorkersStopped(t=at, node=f"n{number}", attempt=2, store_port=1) for number in range(10)]
    more += [*together(stopped), {"event": "AllocationEnded", **plain(ev.AllocationEnded)}]
    more += last
    return entries + [
        {**entry, "v": VERSION, "epoch": 1, "n": number, "t": at}
        for number, entry in enumerate(more, end + 1)
    ]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all that is in it, at whatever depth."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


class Colleague:
    """Who has `lines` in a journal, and wants to fool whoever looks at it."""

    def __init__(self, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
        run = Place(root).story(swapped())
        self.journal = run.journal / "epoch-000001.jsonl"
        self.lines = lines_of(run.root)
        self._capfd = capfd

    def complaints(self, entries: list[dict[str, Any]], *codes: int) -> str:
        """Of all commands about this journal; each ends so, and has one line for what ends it."""
        self.journal.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        self._capfd.readouterr()
        complaints = ""
        for words in LOOKS:
            code = main(list(words))
            told = self._capfd.readouterr().err
            assert code in codes, (words, told)
            if code:
                assert told.startswith(f"jurymast: error: {self.journal}"), (words, told)
                assert len([line for line in told.splitlines() if "hint: " not in line]) == 1, (words, told)
            complaints += told
        return complaints


@pytest.fixture
def colleague(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Colleague:
    made = Colleague(tmp_path, capfd)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("JURYMAST_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return made


def with_other(entries: list[dict[str, Any]], kind: str, **values: Any) -> tuple[list[dict[str, Any]], int]:
    """The same with other values in the last entry of a kind, and the number of its line."""
    number = max(number for number, entry in enumerate(entries) if entry.get("event") == kind)
    return [*entries[:number], {**entries[number], **values}, *entries[number + 1 :]], number + 1


def test_a_line_with_a_wrong_value_is_named_and_the_rest_is_shown(colleague: Colleague) -> None:
    assert "could not be read" not in colleague.complaints(colleague.lines, 0)
    for kind, values in (
        ("Noted", {"message": ["x"]}), ("NodeTested", {"slowness": "fast"}), ("Saved", {"step": 1.5}),
        ("Fetched", {"tiers": {"shared": None}}), ("StacksTaken", {"ranks": [0, "1"]}), ("Asked", {"t": -1}),
        ("Asked", {"t": 1e300}), ("Tick", {"epoch": None}),
        ("Noted", {"epoch": 0}), ("Noted", {"epoch": 2}),
    ):  # fmt: skip
        entries, line = with_other(colleague.lines, kind, **values)
        told = colleague.complaints(entries, 0)
        assert f"epoch-000001.jsonl: line {line} could not be read" in told


@pytest.mark.parametrize(
    "each", [{}, {"t": []}, {"t": [1.0], "node": []}, {"node": ["n1"]}, {"t": [1.0], "event": [[]]}, [], None]
)
def test_several_nodes_events_in_one_line_are_whole_or_not_read(colleague: Colleague, each: Any) -> None:
    entries, line = with_other(colleague.lines, "WorkersStopped", each=each)
    told = colleague.complaints(entries, 0)
    assert f"epoch-000001.jsonl: line {line} could not be read" in told


def test_a_line_that_no_run_writes_there_is_named(colleague: Colleague) -> None:
    entries, line = with_other(colleague.lines, "HealthFound", verdict="perhaps")
    told = colleague.complaints(entries, RunDirectoryError.exit_code)
    assert f"{colleague.journal}, line {line}: HealthFound contradicts the lines before it" in told


def test_whatever_stands_there_ends_no_command_in_a_traceback(colleague: Colleague) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        entries = json.loads(json.dumps(colleague.lines))
        number = data.draw(st.integers(0, len(entries) - 1))
        container, key = data.draw(st.sampled_from(list(places(entries[number]))))
        container[key] = data.draw(OTHER)
        colleague.complaints(entries, 0, RunDirectoryError.exit_code)

    fuzz()
