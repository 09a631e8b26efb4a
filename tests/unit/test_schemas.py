"""What commands print with --json fits the schemas that `jurymast schema` prints, which promise it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jurymast.cli.main import main
from jurymast.cli.options import SCHEMA, json_text
from jurymast.cli.schema import OTHERS
from jurymast.cli.schemas import (
    commands_of,
    journal_schema,
    listing,
    output_schema,
    outputs,
    source,
)
from support.commands import LAUNCHER, RUN, Place, swapped
from support.outputs import output_of, problems

DOCS = Path(__file__).parents[2] / "docs"
LIST = Path(__file__).parents[1] / "data" / "json-fields.txt"
HEAD = "# All fields of what commands print with --json, of version "


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.story(swapped())
    (tmp_path / "train.py").touch()
    (tmp_path / "bad.yaml").write_text("spars: 1\n")
    (tmp_path / "job.sbatch").write_text("#!/bin/sh\n#SBATCH -N 2\nsrun python train.py\n")
    return made


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (f"checkpoints {RUN}", 0), (f"checkpoints {RUN} verify", 0), (f"checkpoints {RUN} unpin 3", 0),
        ("doctor", 1), ("doctor --install", None), (f"events {RUN}", 0),
        ("fleet", 0), ("fleet --by team,partition,user,month", 0), ("health --probe host", None),
        ("health --thresholds", 0), ("health --explain 79", 0), ("nodes --all", 0), ("plan --nodes 4", 0),
        ("plan --nodes 64 --checkpoint-bytes 5TB --storage-gb-per-s 10", 0), ("policy show", 0),
        ("policy show --origin", 0), ("policy check bad.yaml", 65), ("ps --all", 0), (f"report {RUN}", 0),
        (f"report {RUN} --compare {RUN}", 0), (f"status {RUN}", 0),
        ("simulate --nodes 2 --days 1 --seeds 1 --rate 900", 0),
        ("submit --json --cluster local --dry-run -- train.py", 0),
        ("submit --json --dry-run --spares 1 job.sbatch", 0),
    ],
)  # fmt: skip
def test_what_is_printed_fits_its_schema(place: Place, words: str, code: int | None) -> None:
    """With no field that the schema does not name. Code None: it depends on this machine."""
    line = words.split() if "--json" in words else [*words.split(), "--json"]
    done = place.run(*line)
    assert code is None or done.returncode == code, done.stderr
    several = output_of(*line) == "events"
    values = [json.loads(one) for one in done.stdout.splitlines()] if several else [json.loads(done.stdout)]
    assert values
    for value in values:
        assert problems(output_of(*line), value) == []
        objects = value if isinstance(value, list) else [value]
        assert objects
        assert all([*one][0] == "schema" for one in objects)


def test_what_a_schema_does_not_name_is_found() -> None:
    """Else the other tests would show nothing."""
    good = {"schema": 1, "run": "a", "step": 3, "tier": "memory"}
    assert problems("save", good) == []
    assert len(problems("save", {**good, "more": 1})) == 1
    assert len(problems("save", {**good, "step": 3.5})) == 1
    assert len(problems("save", {name: good[name] for name in ("schema", "run", "step")})) == 1
    entry = {
        "schema": 1, "v": 8, "epoch": 1, "n": 1, "event": "NodeFinished", "t": 1.5,
        "node": "n1", "attempt": 1,
        "at": "2026-11-20T19:43:10+00:00", "text": "n1 has finished",
    }  # fmt: skip
    assert problems("events", entry) == []
    assert len(problems("events", {**entry, "more": 1})) == 1
    assert len(problems("events", {**entry, "node": 1})) > 0


@pytest.mark.parametrize("name", [*outputs(), *OTHERS])
def test_each_schema_is_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"]
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", outputs())
def test_each_field_says_what_it_is(name: str) -> None:
    schema = output_schema(name)
    assert schema["$id"] == f"urn:jurymast:schema:{name}:{SCHEMA}"
    assert list(undescribed(schema)) == []


def undescribed(schema: Any) -> Any:
    if isinstance(schema, dict):
        for field, told in schema.get("properties", {}).items():
            if not told.get("description"):
                yield field
        for told in schema.values():
            yield from undescribed(told)
    elif isinstance(schema, list):
        for told in schema:
            yield from undescribed(told)


@pytest.mark.parametrize("name", outputs())
def test_each_output_is_of_a_command_that_has_json(name: str) -> None:
    for line in commands_of(name):
        words = line.removesuffix(" --json").split()[1:]
        command = __import__(f"jurymast.cli.{words[0]}", fromlist=["command"]).command
        command = command.commands[words[1]] if hasattr(command, "commands") else command
        assert "--json" in {flag for option in command.params for flag in option.opts}
        assert output_of(*words) in (name, "report"), "an array is seen only by Slurm's answer"


def test_each_command_with_json_has_a_schema() -> None:
    files = [path for path in (LAUNCHER / "jurymast" / "cli").glob("*.py") if path.stem != "options"]
    have = {path.stem for path in files if re.search(r'@json_option|"--json"', path.read_text())}
    assert have == {line.split()[1] for name in outputs() for line in commands_of(name)}


def test_a_field_is_removed_or_changed_only_with_a_new_version() -> None:
    """Fields that are added: JURYMAST_UPDATE_GOLDEN=1 writes them into the list."""
    head, *listed = LIST.read_text().splitlines()
    now = listing()
    same = head == f"{HEAD}{SCHEMA}."
    gone = sorted(set(listed) - set(now)) if same else []
    assert gone == [], "removed or changed: raise SCHEMA in cli/options.py, or keep them"
    if os.environ.get("JURYMAST_UPDATE_GOLDEN"):
        LIST.write_text("\n".join([f"{HEAD}{SCHEMA}.", *now]) + "\n")
    else:
        assert same, "JURYMAST_UPDATE_GOLDEN=1 writes the list of the new version"
        assert sorted(set(now) - set(listed)) == [], "JURYMAST_UPDATE_GOLDEN=1 adds them to the list"


def test_events_are_described_by_the_journal_s_version() -> None:
    rules = journal_schema()["allOf"]
    kinds = [next(iter(rule["if"]["properties"].values()))["const"] for rule in rules]
    assert {"RunStarted", "NodeLost", "Saved", "Launch", "Finish"} <= set(kinds)
    assert all(one["description"] for one in journal_schema()["$defs"].values())


def test_the_page_names_all_outputs() -> None:
    page = (DOCS / "json.md").read_text()
    rows = [
        f"| `{name}` | {', '.join(f'`{line}`' for line in commands_of(name))} | {source(name)['about']} |"
        for name in outputs()
        if name != "events"
    ]
    assert [row for row in rows if row not in page] == []
    assert "| `events` |" in page


def test_the_list_has_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*outputs(), *OTHERS]
    assert main(["schema", "statsu"]) == 64
    assert "there is no schema statsu (did you mean status?)" in capsys.readouterr().err


def test_all_json_is_printed_in_one_way() -> None:
    commands = (LAUNCHER / "jurymast" / "cli").glob("*.py")
    ways = {path.name for path in commands if "json.dumps" in path.read_text()}
    assert ways == {"options.py", "schema.py"}
    assert json_text([{"a": 1}, {}]) == '[{"schema": 1, "a": 1}, {"schema": 1}]'
