"""Each object that a command prints with --json says which version of its fields it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.cli.options import json_text
from support.commands import LAUNCHER, RUN, Place, swapped


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.story(swapped())
    (tmp_path / "train.py").touch()
    return made


@pytest.mark.parametrize(
    "words",
    [
        f"checkpoints {RUN}", "doctor", f"events {RUN}", "fleet", "health --thresholds",
        "health --explain 79", "nodes --all", "plan --nodes 4", "policy show", "ps --all", f"report {RUN}",
        f"status {RUN}", "simulate --nodes 2 --days 1 --seeds 1",
        "submit --cluster local --dry-run -- train.py",
    ],
)  # fmt: skip
def test_what_is_printed_has_a_version(place: Place, words: str) -> None:
    before, *after = words.split(" -- ")
    text = place.run(*before.split(), "--json", *(f"-- {after[0]}".split() if after else [])).stdout
    told = [json.loads(line) for line in text.splitlines()] if "events" in words else json.loads(text)
    objects = told if isinstance(told, list) else [told]
    assert objects
    assert {one["schema"] for one in objects} == {1}
    assert all([*one][0] == "schema" for one in objects)


def test_all_json_is_printed_in_one_way() -> None:
    commands = (LAUNCHER / "jurymast" / "cli").glob("*.py")
    assert [path.name for path in commands if "json.dumps" in path.read_text()] == ["options.py"]
    assert json_text([{"a": 1}, {}]) == '[{"schema": 1, "a": 1}, {"schema": 1}]'
