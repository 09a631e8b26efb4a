"""What commands print with --json, checked by its own schemas with no field allowed that they do not name."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

from jurymast.cli.schemas import journal_schema, output_schema, source


def closed(schema: Any) -> Any:
    """The schema, with further fields of its objects refused."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(told) for name, told in schema.items()}
    if isinstance(schema.get("properties"), dict) and isinstance(schema.get("required"), list):
        made.setdefault("additionalProperties", False)
    return made


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = output_schema(name)
    if source(name).get("open"):  # the further fields are those of the journal
        journal = journal_schema()
        del journal["$defs"]["HealthFound"]["properties"]["at"]  # `found_at` here
        schema |= {
            "allOf": journal["allOf"], "$defs": journal["$defs"], "unevaluatedProperties": False,
        }  # fmt: skip
    else:
        schema = closed(schema)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker)


def problems(name: str, value: Any) -> list[str]:
    """What does not fit the schema of this output."""
    return [
        f"{name}: {error.json_path}: {error.message[:300]}" for error in validator(name).iter_errors(value)
    ]


def output_of(*words: str) -> str:
    """The name of what a command line prints."""
    command, rest = words[0], words[1:]
    options = [word.partition("=")[0] for word in rest]
    if command == "checkpoints":
        action = rest[1] if len(rest) > 1 and not rest[1].startswith("-") else "ls"
        return {"ls": "checkpoints", "unpin": "checkpoints-pin"}.get(action, f"checkpoints-{action}")
    if command == "report":
        array = "--user" in options
        return "report-compare" if "--compare" in options else "report-jobs" if array else "report"
    if command == "health":
        found = [name for name in ("explain", "thresholds") if f"--{name}" in options]
        return "-".join(["health", *found])
    if command == "policy":
        return f"policy-{rest[0]}"
    if command == "submit":
        return "submit-dry-run" if "--dry-run" in options else "submit"
    return command


def checked(value: Any, *words: str) -> Any:
    """`value`, which the command line `words` has printed."""
    name = output_of(*words)
    found = problems(name, value)
    assert found == [], found
    return value
