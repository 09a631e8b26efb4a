"""The policy's JSON Schema, made from its model: for editors, and for whoever checks files without jurymast.

It knows names, forms and ranges of values; `policy check` knows more (durations longer than 0, circles of
`extends`) and says it better.
"""

from __future__ import annotations

import json
from typing import Any

from jurymast.policy.model import Policy

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    made = Policy.model_json_schema()
    names = {"type": "string", "minLength": 1}
    made["properties"] = {
        "extends": {
            "description": "the file, or files, that this one is laid over; relative to this one",
            "anyOf": [names, {"type": "array", "items": names}],
        },
        **made["properties"],
    }
    return {"$schema": DIALECT, **made, "title": "jurymast policy"}


def schema_text() -> str:
    """As checked in: `configs/policy.schema.json`."""
    return json.dumps(schema(), indent=2) + "\n"
