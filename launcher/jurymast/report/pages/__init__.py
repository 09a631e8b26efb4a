"""Pages for a browser. Each is one file that loads nothing, can be read without scripts, and prints.

A template lays out the JSON object from which a page is made, and what the page's module computes from it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jurymast.report import text
from jurymast.report.text import clean


def render(template: str, data: Mapping[str, Any], computed: Mapping[str, Any]) -> str:
    """Render the page. `data` is the JSON object from which it is made, and is part of the page; `computed`
    are further names of the template."""
    return _environment().get_template(template).render(computed, data=data)


@cache
def _environment() -> Environment:
    loader = PackageLoader("jurymast.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {}
    for own in (
        text.amounts, text.count, text.duration, text.minutes, text.node_time, text.percent,
        text.percent_fine, text.plain_seconds, text.size,
    ):  # fmt: skip
        environment.filters[own.__name__] = own
    for name in ("style", "script"):
        source, _, _ = loader.get_source(environment, f"page.{'css' if name == 'style' else 'js'}")
        # The only style and script that a browser accepts, whatever a run's texts contain.
        environment.globals[name] = Markup(source)
        environment.globals[f"{name}_hash"] = _hash(source)
    return environment


def _hash(source: str) -> str:
    """The hash by which a Content-Security-Policy allows a source."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _shown(value: object) -> object:
    """The value without control characters, whatever a run's texts contain; autoescape follows. None means
    not known."""
    if value is None:
        return "-"
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
