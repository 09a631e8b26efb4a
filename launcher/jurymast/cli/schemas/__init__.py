"""The JSON Schemas of what commands print with --json.

Their sources are the YAML files beside this one, in the short form that `shared.yaml` explains, and become
JSON Schemas (draft 2020-12) when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from jurymast import foreign
from jurymast.cli.options import SCHEMA
from jurymast.policy.model import DIALECT

Schema = dict[str, Any]

BASIC: dict[str, Schema] = {
    "string": {"type": "string"}, "integer": {"type": "integer"}, "number": {"type": "number"},
    "boolean": {"type": "boolean"}, "object": {"type": "object"},
    "time": {"type": "string", "format": "date-time"},
}  # fmt: skip
FOLDER = Path(__file__).parent
SOURCE_BYTES_MAX = 1_000_000
SHARED = "shared"
_FIELD = re.compile(r"(?P<type>\S+) \| (?P<about>.+)", re.DOTALL)


def outputs() -> list[str]:
    """The names of the outputs."""
    names = foreign.names(FOLDER, "*.yaml")
    return sorted(name.removesuffix(".yaml") for name in names if name != f"{SHARED}.yaml")


@cache
def source(name: str) -> dict[str, Any]:
    """The source of an output: its `command`, what it is `about`, and its `fields`; or all that is shared."""
    found: dict[str, Any] = yaml.safe_load(foreign.read(FOLDER / f"{name}.yaml", SOURCE_BYTES_MAX))
    return found


def output_schema(name: str) -> Schema:
    """The JSON Schema of an output. Fields that it does not name are allowed: they may be added."""
    told = source(name)
    defined = {**source(SHARED), **told.get("define", {})}
    used: dict[str, Schema] = {}
    fields = _fields(told, defined)
    fields = {"schema": f"integer | version of the fields, {SCHEMA}", **fields}
    whole = _object(fields, partial(_named, defined, used))
    whole["properties"]["schema"] |= {"const": SCHEMA}
    if told.get("list"):
        whole = {"type": "array", "items": whole}
    return {
        "$schema": DIALECT, "$id": identity(name, SCHEMA),
        "title": f"Output of {_commands(told)}", "description": told["about"], **whole,
        **({"$defs": dict(sorted(used.items()))} if used else {}),
    }  # fmt: skip


def identity(name: str, version: int) -> str:
    """The `$id` of a schema: a name, not an address."""
    return f"urn:jurymast:schema:{name}:{version}"


def commands_of(name: str) -> list[str]:
    """The commands that print this output."""
    told: str = source(name)["command"]
    return [f"jurymast {one} --json" for one in told.split(", ")]


def _commands(told: dict[str, Any]) -> str:
    return " and ".join(f"jurymast {one} --json" for one in told["command"].split(", "))


def _fields(told: dict[str, Any], defined: dict[str, Any]) -> dict[str, Any]:
    like = told.get("like")
    return {**(_fields(defined[like], defined) if like else {}), **told.get("fields", {})}


def _named(defined: dict[str, Any], used: dict[str, Schema], name: str) -> Schema:
    """A reference to a shared definition, which is `used` then."""
    if name not in used:
        used[name] = {}  # while it refers to itself
        told = defined[name]
        made = _object(_fields(told, defined), partial(_named, defined, used))
        used[name] = {"description": told["about"], **made}
    return {"$ref": f"#/$defs/{name}"}


def _object(fields: dict[str, Any], named: Callable[[str], Schema]) -> Schema:
    names = {name: name.removesuffix("?") for name in fields}
    return {
        "type": "object",
        "properties": {names[name]: _field(told, named) for name, told in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
    }


def _field(told: Any, named: Callable[[str], Schema]) -> Schema:
    if isinstance(told, str):
        match = _FIELD.fullmatch(told)
        assert match, told
        return {"description": match["about"], **_type(match["type"], named)}
    inner = partial(_object, told["fields"], named)
    made = _type(told.get("type", "fields"), lambda name: inner() if name == "fields" else named(name))
    return {"description": told["about"], **made}


def _type(text: str, named: Callable[[str], Schema]) -> Schema:
    """The schema of a type word."""
    if text.endswith("[]"):
        return {"type": "array", "items": _type(text[:-2], named)}
    if text.endswith("{}"):
        return {"type": "object", "additionalProperties": _type(text[:-2], named)}
    if text.endswith("?"):
        made = _type(text[:-1], named)
        if isinstance(made.get("type"), str):
            return {**made, "type": [made["type"], "null"]}
        return {"anyOf": [*made.get("anyOf", [made]), {"type": "null"}]}
    if "|" in text:
        return {"anyOf": [_type(one, named) for one in text.split("|")]}
    return dict(BASIC[text]) if text in BASIC else named(text)


def journal_schema() -> Schema:
    """The fields of each event and decision of a journal, as this version writes them."""
    import msgspec

    from jurymast.core.state.effects import Instruction
    from jurymast.core.state.events import KINDS
    from jurymast.journal import VERSION

    kinds: dict[str, list[type]] = {
        "event": list(KINDS.values()),
        "decision": list(Instruction.__subclasses__()),
    }
    all_kinds = [kind for some in kinds.values() for kind in some]
    _, defined = msgspec.json.schema_components(all_kinds, ref_template="#/$defs/{name}")
    for one in defined.values():
        one["description"] = " ".join(one.get("description", "").split())
    rules = [
        {"if": {"properties": {word: {"const": kind.__name__}}, "required": [word]},
         "then": {"$ref": f"#/$defs/{kind.__name__}"}}
        for word, some in kinds.items() for kind in some
    ]  # fmt: skip
    return {
        "$schema": DIALECT, "$id": identity("journal", VERSION),
        "title": f"Entries of a journal of version {VERSION}",
        "description": "The fields that belong to an event or decision; times `t` are in seconds since the "
        "epoch, durations `..._s` in seconds, sizes `..._bytes` in bytes.",
        "type": "object", "properties": {"v": {"const": VERSION}}, "allOf": rules, "$defs": defined,
    }  # fmt: skip


def listing() -> list[str]:
    """Each field of each output, and of what they share, with its type: what a version promises."""
    lines = set[str]()
    for name in outputs():
        whole = output_schema(name)
        lines.update(_listed(name, whole))
        for shared, told in whole.get("$defs", {}).items():
            lines.update(_listed(f"${shared}", told))
    return sorted(lines)


def _listed(where: str, found: Schema) -> Iterator[str]:
    """The fields of a value, and of all that is in it."""
    for name, told in found.get("properties", {}).items():
        absent = "" if name in found["required"] else " (may be absent)"
        yield f"{where}.{name} {_word(told)}{absent}"
        yield from _listed(f"{where}.{name}", told)
    if "items" in found:
        yield from _listed(f"{where}[]", found["items"])
    if isinstance(found.get("additionalProperties"), dict):
        yield from _listed(f"{where}.*", found["additionalProperties"])
    for one in found.get("anyOf", []):
        yield from _listed(where, one)


def _word(found: Schema) -> str:
    """A type in a word, as in the sources."""
    if "$ref" in found:
        return "$" + str(found["$ref"]).rpartition("/")[2]
    if "anyOf" in found:
        words = [_word(one) for one in found["anyOf"]]
        return "|".join(word for word in words if word != "null") + ("?" if "null" in words else "")
    kind = found.get("type", "object")
    maybe = "?" if isinstance(kind, list) else ""
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return f"{_word(found['items'])}[]{maybe}"
    if isinstance(found.get("additionalProperties"), dict):
        return f"{_word(found['additionalProperties'])}{{}}{maybe}"
    return ("time" if found.get("format") == "date-time" else kind) + maybe
