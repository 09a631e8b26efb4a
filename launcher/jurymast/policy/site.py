"""The layers below a policy file: the site's, those of the teams that the site's file names, and the user's
own; and the keys that a site locks.

The site's file is a policy with two more keys. `teams` lists files that lie over it for some jobs; all that
match are used, in their order. `locked` lists keys that no layer above may change. A team's file may lock
keys as well.

    teams:
      - {account: "vision*", policy: teams/vision.yaml}   # relative to this file
    locked:
      - nodes_policy
      - {keys: [failures.restarts], unless: {account: ops}}

Locks keep people from mistakes, and a site's numbers true. They do not hold whoever wants around them: what a
user's job does with its own nodes is that user's affair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from jurymast import foreign
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import PolicyError
from jurymast.policy.model import Section, schema
from jurymast.policy.resolve import Layer, Problem, file_layers, keys_below, problems_of, refuse

SITE_FILE = Path("/etc/jurymast/site.yaml")


class Submitter(Protocol):
    """Who submits, and where."""

    def names(self, what: str) -> tuple[str, ...]:
        """The user, the account, the QOS or the partitions of the job; none if that is not known."""


class _OneOrMore:
    """Marks a list of which one alone may be written without brackets, and perhaps in a `short` form."""

    def __init__(self, short: str = "") -> None:
        self._short = short  # the key that a text alone stands for

    def _listed(self, value: object) -> list[Any]:
        several = value if isinstance(value, list) else [value]
        return [{self._short: one} if self._short and isinstance(one, str) else one for one in several]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        made = handler(core)
        one = made["items"]
        one = {"anyOf": [one, {"type": "string", "minLength": 1}]} if self._short else one
        rest = {name: value for name, value in made.items() if name not in ("items", "type")}
        return {**rest, "anyOf": [one, {"type": "array", "items": one}]}


Names = Annotated[list[Annotated[str, Field(min_length=1)]], _OneOrMore()]


class Who(Section):
    """Some jobs: those that fit all that is given, each by a name or by a pattern with * and ?."""

    user: Names = Field([], description="users, or patterns with * and ?")
    account: Names = Field([], description="Slurm accounts, or patterns with * and ?")
    qos: Names = Field([], description="QOS, or patterns with * and ?")
    partition: Names = Field([], description="partitions, or patterns with * and ?")

    @model_validator(mode="after")
    def somebody(self) -> Who:
        if not any(getattr(self, what) for what in Who.model_fields):
            raise ValueError(f"needs one of {', '.join(Who.model_fields)}")
        return self

    def fits(self, submitter: Submitter) -> bool:
        """Whether it fits the job; a job that may run in several partitions, in each of them. What is not
        known fits nothing."""
        for what in Who.model_fields:
            patterns: list[str] = getattr(self, what)
            names = submitter.names(what) if patterns else ()
            if patterns and not names:
                return False
            if not all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
                return False
        return True


class Team(Who):
    policy: str = Field(min_length=1, description="the team's policy; its path is relative to this file")


class Lock(Section):
    keys: Names = Field(description="keys of the policy, with dots")
    unless: Annotated[list[Who], _OneOrMore()] = Field([], description="jobs that may change them")


class OwnKeys(Section):
    """What only a site's files have."""

    teams: list[Team] = Field([], description="policies that lie over this one for some jobs")
    locked: Annotated[list[Lock], _OneOrMore("keys")] = Field(
        [], description="keys that no policy above this one may change"
    )


def site_schema() -> dict[str, Any]:
    """The JSON Schema of a site's file: that of a policy, with a site's own keys."""
    whole, own = schema(), OwnKeys.model_json_schema()
    return {
        **whole,
        "$defs": dict(sorted({**whole["$defs"], **own["$defs"]}.items())),
        "properties": {**whole["properties"], **own["properties"]},
        "title": "jurymast policy of a site",
    }


def layers_below(environment: Mapping[str, str], submitter: Submitter, *, own: bool = True) -> list[Layer]:
    """The site's layers, those of its teams to which the job belongs, and with `own` the user's. Raises
    PolicyError."""
    layers = site_layers(environment, submitter)
    return over(layers, user_layers(environment)) if own else layers


def over(below: list[Layer], above: list[Layer]) -> list[Layer]:
    """All layers, without those above that lie below already, as when a user's file extends the site's."""
    there = {layer.path for layer in below if layer.path is not None}
    return [*below, *(layer for layer in above if layer.path not in there)]


def site_layers(environment: Mapping[str, str], submitter: Submitter) -> list[Layer]:
    """The layers of $JURYMAST_SITE (must exist if set; empty means none) or of /etc/jurymast/site.yaml, and
    those of its teams. Raises PolicyError, also for another file in place of an installed one that locks
    keys."""
    named = environment.get("JURYMAST_SITE")
    installed = foreign.exists(SITE_FILE)
    if named is None:
        return layers_of_site(SITE_FILE, submitter) if installed else []
    if installed and not foreign.made(SITE_FILE) and _locks(layers_of_site(SITE_FILE, submitter)):
        raise PolicyError(f"JURYMAST_SITE: {SITE_FILE} locks keys, so no other file can take its place")
    return layers_of_site(Path(named), submitter) if named else []


def _locks(layers: list[Layer]) -> bool:
    return any(layer.locked for layer in layers)


def layers_of_site(
    file: Path, submitter: Submitter, *, teams: bool = True, lenient: bool = False
) -> list[Layer]:
    """The layers of a site's file, and with `teams` those of its teams to which the job belongs. `lenient`:
    locks on keys that no policy has are left out, to find what else is wrong. Raises PolicyError."""
    layers = file_layers(file, str(file))
    taken = [team for layer in layers for team in _taken(layer, "site", submitter, lenient=lenient)]
    for team, path in taken:
        if teams and team.fits(submitter):
            layers = over(layers, team_layers(path, submitter))
    return layers


def team_layers(path: Path, submitter: Submitter) -> list[Layer]:
    layers = file_layers(path, str(path))
    for layer in layers:
        _taken(layer, "team", submitter)
    return layers


def teams_of(file: Path) -> list[tuple[Team, Path]]:
    """All teams of a site's file, and their policies. Raises PolicyError."""
    layers = file_layers(file, str(file))
    return [team for layer in layers for team in _taken(layer, "site", Nobody(), lenient=True)]


class Nobody:
    """A job that no team has, and for which every lock holds."""

    def names(self, _what: str) -> tuple[str, ...]:
        return ()


class Members:
    """The jobs of a team, with the team's own patterns as their names."""

    def __init__(self, who: Who) -> None:
        self._who = who

    def names(self, what: str) -> tuple[str, ...]:
        return tuple(getattr(self._who, what))


def _taken(
    layer: Layer, kind: str, submitter: Submitter, *, lenient: bool = False
) -> list[tuple[Team, Path]]:
    """Take what only a site's files have out of the layer's values, and return the teams. Locks that the job
    may ignore are left out."""
    layer.kind = kind
    names = ("teams", "locked") if kind == "site" else ("locked",)
    asked: dict[str, Any] = {name: layer.values.pop(name) for name in names if name in layer.values}
    taken = Layer(layer.name, asked, layer.origins)
    refuse([*problems_of(taken, OwnKeys)])
    keys = OwnKeys.model_validate(asked)
    if not lenient:
        refuse([*_unknown(keys, taken)])
    for number, lock in enumerate(keys.locked):
        if not any(who.fits(submitter) for who in lock.unless):
            where = layer.origin(("locked", number))
            layer.locked |= {tuple(key.split(".")): where for key in lock.keys}
    folder = Path(layer.name).parent
    return [(team, folder / os.path.expanduser(team.policy)) for team in keys.teams]


def _unknown(keys: OwnKeys, layer: Layer) -> Iterator[Problem]:
    """Locks on keys that no policy has."""
    for number, lock in enumerate(keys.locked):
        for dotted in lock.keys:
            *parents, last = dotted.split(".")
            valid = [name for name in keys_below(tuple(parents)) if name != "extends"]
            if last not in valid:
                what = f"locked[{number}]: unknown key {dotted}{did_you_mean(last, valid)}"
                yield layer.origin(("locked", number)), what


def user_file(environment: Mapping[str, str]) -> Path | None:
    """Where a user's own policy is: `jurymast/policy.yaml` in $XDG_CONFIG_HOME or ~/.config (XDG Base
    Directory Specification 0.8: a path that is not absolute is ignored)."""
    named = environment.get("XDG_CONFIG_HOME", "")
    if named.startswith("/"):
        return Path(named, "jurymast/policy.yaml")
    home = environment.get("HOME", "")
    return Path(home, ".config/jurymast/policy.yaml") if home.startswith("/") else None


def user_layers(environment: Mapping[str, str]) -> list[Layer]:
    """The layers of the user's own policy, if there is one. Raises PolicyError."""
    file = user_file(environment)
    if file is None or not foreign.exists(file):
        return []
    layers = file_layers(file, str(file))
    for layer in layers:
        layer.kind = "user"
    return layers


def layers_of(file: Path | None, environment: Mapping[str, str]) -> list[Layer]:
    """The layers of a policy file, or else of the one in $JURYMAST_POLICY (must exist if set; empty means
    none). Raises PolicyError."""
    if file is not None:
        return file_layers(file, str(file))
    named = environment.get("JURYMAST_POLICY")
    if not named:
        return []
    if not foreign.exists(Path(named)):
        raise PolicyError(f"JURYMAST_POLICY: there is no file {named}")
    return file_layers(Path(named), named)
