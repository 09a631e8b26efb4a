"""The policy's JSON Schema, made from its model, for editors and for checks without jurymast. It has the
names, forms and ranges of values. `policy check` finds more mistakes, such as durations that must not be 0
and circles of `extends`, and explains them better."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jurymast.core.texts import DURATION
from jurymast.policy.model import Policy

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    made = Policy.model_json_schema()
    names = {"type": "string", "minLength": 1}
    made["properties"] = {
        "extends": {
            "description": "files whose values this one overrides; paths are relative to this file",
            "anyOf": [names, {"type": "array", "items": names}],
        },
        **made["properties"],
    }
    return {"$schema": DIALECT, **made, "title": "jurymast policy"}


def schema_text() -> str:
    """The text of `configs/policy.schema.json`."""
    return json.dumps(schema(), indent=2) + "\n"


class Key(NamedTuple):
    """A key of the policy. `takes`: what one may write; `default`: as one would write it, "" if there is
    none."""

    name: str
    takes: str
    default: str
    meaning: str


def keys() -> list[Key]:
    whole = schema()
    return list(_keys("", whole, whole["$defs"]))


def keys_text() -> str:
    """The text of `docs/policy-keys.md`."""
    rows = (f"| `{key.name}` | {key.takes} | {_code(key.default)} | {key.meaning} |" for key in keys())
    return "\n".join(
        [
            "# All keys of a policy", "",
            "A duration has a unit: `0.5s`, `10m`, `1h30m`, `2d`. `jurymast policy keys` prints this.", "",
            "| key | takes | default | meaning |", "| --- | --- | --- | --- |", *rows, "",
        ]
    )  # fmt: skip


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _keys(above: str, level: dict[str, Any], defined: dict[str, Any]) -> Iterator[Key]:
    for name, found in level["properties"].items():
        path = f"{above}{name}"
        default = "" if "default" not in found else _written(found["default"])
        below = _section(found, defined)
        takes = _takes(found, defined)
        meaning = found.get("description", "")
        if below is None:
            yield Key(path, takes, default, meaning)
        else:
            if takes:  # it can be switched as a whole
                more = ", or the keys below" if below["properties"] else ""
                yield Key(path, f"{takes}{more}", default if default == "off" else "on", meaning)
            yield from _keys(f"{path}.", below, defined)


def _section(found: dict[str, Any], defined: dict[str, Any]) -> dict[str, Any] | None:
    """The keys below this one, if there are any."""
    if "$ref" in found:
        section: dict[str, Any] = defined[found["$ref"].rpartition("/")[2]]
        return section
    sections = (_section(one, defined) for one in found.get("anyOf", ()))
    return next((one for one in sections if one is not None), None)


def _takes(found: dict[str, Any], defined: dict[str, Any]) -> str:
    if "anyOf" in found:
        return ", ".join(dict.fromkeys(filter(None, (_takes(one, defined) for one in found["anyOf"]))))
    if "const" in found:
        return _code(found["const"])
    if "enum" in found:
        return ", ".join(dict.fromkeys(_code(_written(value)) for value in found["enum"]))
    return _of_type(found)


def _of_type(found: dict[str, Any]) -> str:
    match found.get("type"):
        case "string" if found.get("pattern") == DURATION:
            return "a duration"
        case "string" if "examples" in found:
            return f"a text like {_code(found['examples'][0])}"
        case "string":
            return "a text"
        case "integer":
            return f"a whole number from {found.get('minimum', 0)}"
        case "number":
            least = found.get("exclusiveMinimum")
            return "a number" if least is None else f"a number above {least:g}"
        case "array":
            return "a list"
        case "object":
            return "a mapping"
        case _:
            return ""


def _written(value: object) -> str:
    """The value as written in YAML."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else re.sub(r"^null$", "", json.dumps(value))
