"""What is wrong with policy files: mistakes, and values that contradict each other. Each problem is a line,
`file:line: key: what is wrong`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from jurymast import foreign
from jurymast.errors import PolicyError
from jurymast.policy.resolve import Layer, file_layer, file_layers, resolve
from jurymast.policy.site import (
    SITE_FILE,
    Members,
    Nobody,
    layers_of,
    layers_of_site,
    over,
    site_layers,
    team_layers,
    teams_of,
    user_file,
)


def problems_in(file: Path, environment: Mapping[str, str]) -> list[str]:
    """The problems of a policy file over what the site has for everybody; or of a site's file (one that has
    `teams` or `locked`) and its teams'."""
    try:
        own = file_layer(file, str(file)).values
    except PolicyError as error:
        return str(error).splitlines()
    if own.keys() & {"teams", "locked"}:
        return _of_site(file)
    return [*_of(lambda: over(site_layers(environment, Nobody()), file_layers(file, str(file))))]


def problems_in_force(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """By file: the problems of the site's file, of the user's, and of that in $JURYMAST_POLICY."""
    site = environment.get("JURYMAST_SITE", str(SITE_FILE) if foreign.exists(SITE_FILE) else "")
    own, named = user_file(environment), environment.get("JURYMAST_POLICY", "")
    found = {site: _of_site(Path(site))} if site else {}
    if own is not None and foreign.exists(own):
        found[str(own)] = problems_in(own, environment)
    if named:
        found[named] = [*_of(lambda: over(site_layers(environment, Nobody()), layers_of(None, environment)))]
    return found


def _of_site(file: Path) -> list[str]:
    """The problems of a site's file, alone and with each team's over it; each is told once."""
    lines = [*_of(lambda: layers_of_site(file, Nobody()))]
    lines += _of(lambda: layers_of_site(file, Nobody(), lenient=True))
    try:
        teams = teams_of(file)
    except PolicyError:  # it is among those
        teams = []
    for who, path in teams:
        lines += _of(partial(_with_team, file, Members(who), path))
    return [*dict.fromkeys(lines)]


def _with_team(file: Path, members: Members, path: Path) -> list[Layer]:
    return over(layers_of_site(file, members, teams=False, lenient=True), team_layers(path, members))


def _of(layers: Callable[[], Sequence[Layer]]) -> Iterator[str]:
    try:
        yield from resolve(layers()).contradictions
    except PolicyError as error:
        yield from str(error).splitlines()
