"""Reads policy files, keeps the origin of every value, and merges layers.

Layers, where later ones win: site, the files that a file `extends`, the file, the job, the command line.
Mappings are merged key by key; any other value replaces the one below it.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jurymast import foreign
from jurymast.errors import PolicyError

SITE_FILE = Path("/etc/jurymast/site.yaml")
# Many times what a policy needs, and still read within a second: the file may be a colleague's or a site's.
BYTES_MAX = 64 << 10
VALUES_MAX = 1000
FILES_MAX = 20
Key = tuple[str | int, ...]
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_UNEXPECTED = re.compile(r"[-+]?(0_*[0-9]|[0-9_]+:)")


class Origin(NamedTuple):
    """The place where a value was written: `source` is a file or another layer such as "command line"; `line`
    counts from 1, 0 for none. Origins sort by source, then line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass
class Layer:
    """Plain values, and where each was written; the key () is the whole."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, Origin] = field(default_factory=dict)
    extends: list[str] = field(default_factory=list)

    def origin(self, key: Key) -> Origin:
        """The origin of `key`, or else of the nearest mapping around it."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, Origin(self.name))


def spelled(key: Key) -> str:
    """The key as text: `failures.restarts.application`, `notify[0].when`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def file_layer(path: Path, shown: str) -> Layer:
    """Read one file. Raises PolicyError if it is unreadable, too large, not YAML, not a mapping, or has a key
    twice."""
    problems: list[str] = []
    layer = Layer(shown)
    try:
        node = yaml.compose(foreign.read(path, BYTES_MAX).decode(), Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            layer.values = _plain(node, (), layer, problems)
    except OSError as error:
        raise PolicyError(f"{shown}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{shown}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        raise PolicyError(f"{where}: {getattr(error, 'problem', None) or 'is not YAML'}") from error
    except RecursionError as error:  # also for a mapping that contains itself, through an alias
        raise PolicyError(f"{shown}: is nested too deeply") from error
    if node is None:
        return layer
    if not isinstance(node, yaml.MappingNode):
        raise PolicyError(f"{shown}:{node.start_mark.line + 1}: a policy must be a mapping of keys to values")
    if problems:
        raise PolicyError("\n".join(problems))
    extends = layer.values.pop("extends", [])
    layer.extends = [extends] if isinstance(extends, str) else extends
    if not isinstance(layer.extends, list) or not all(isinstance(name, str) for name in layer.extends):
        raise PolicyError(f"{layer.origin(('extends',))}: extends: must be a file name, or a list of them")
    return layer


def _plain(node: yaml.Node, key: Key, layer: Layer, problems: list[str]) -> Any:
    """The node's plain value; records its origin and those of everything in it."""
    layer.origins[key] = Origin(layer.name, node.start_mark.line + 1)
    if len(layer.origins) > VALUES_MAX:
        top = key[:1]
        raise PolicyError(
            f"{layer.origins[top]}: {spelled(top)}: more than {VALUES_MAX} values in this file up to here "
            "(an alias counts as all that it repeats)"
        )
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*key, index), layer, problems) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(node, key, layer, problems)
    result: dict[str, Any] = {}
    for name_node, value_node in node.value:
        if not isinstance(name_node, yaml.ScalarNode):
            line = name_node.start_mark.line + 1
            problems.append(f"{layer.name}:{line}: {spelled(key) or 'the policy'}: a key must be a word")
            continue
        name = str(name_node.value)
        place = (*key, name)
        if name in result:
            line = name_node.start_mark.line + 1
            problems.append(f"{layer.name}:{line}: {spelled(place)}: is given twice")
            continue
        result[name] = _plain(value_node, place, layer, problems)
        # A key's line is that of its name: a mapping's own mark is the line of its first entry.
        layer.origins[place] = Origin(layer.name, name_node.start_mark.line + 1)
    return result


def _scalar(node: yaml.Node, key: Key, layer: Layer, problems: list[str]) -> Any:
    """YAML's own scalars (text, numbers, true and false, null). Tags of other languages are refused.

    Numbers to base 60 or 8 stay text: 1:30:00 and 010 were meant otherwise.
    """
    if node.tag in _NUMBERS and _UNEXPECTED.match(node.value):
        return node.value
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or str(error)
        problems.append(f"{layer.origins[key]}: {spelled(key)}: {reason}")
        return None
    finally:
        loader.dispose()


def file_layers(path: Path, shown: str) -> list[Layer]:
    """The layers of the file and of those it extends, lowest first. Raises PolicyError, also for a circle."""
    layers: list[Layer] = []
    _add_layers(path, shown, (), layers)
    return layers


def _add_layers(path: Path, shown: str, above: tuple[Path, ...], layers: list[Layer]) -> None:
    """`above`: the files that led here."""
    try:
        with foreign.asking(path):
            real = path.resolve()
    except RuntimeError as error:  # Python before 3.13 raises this for circular links
        raise PolicyError(f"{shown}: cannot be read: its links form a circle") from error
    if real in above:
        raise PolicyError(f"{shown}: extends itself through {' -> '.join(str(p) for p in (*above, real))}")
    if len(above) + len(layers) == FILES_MAX:
        raise PolicyError(f"{shown}: more than {FILES_MAX} files extend each other")
    layer = file_layer(path, shown)
    for name in layer.extends:
        target = path.parent / os.path.expanduser(name)
        _add_layers(target, str(target), (*above, real), layers)
    layers.append(layer)


def site_layers(environment: Mapping[str, str]) -> list[Layer]:
    """The site's layers: $JURYMAST_SITE (must exist if set; empty means none), or /etc/jurymast/site.yaml."""
    named = environment.get("JURYMAST_SITE")
    if named is not None:
        return file_layers(Path(named), named) if named else []
    return file_layers(SITE_FILE, str(SITE_FILE)) if foreign.exists(SITE_FILE) else []


def pairs_layer(name: str, pairs: Sequence[tuple[str, Any]]) -> Layer:
    """A layer from dotted keys and values, as on `#JURYMAST` lines and the command line."""
    layer = Layer(name)
    for dotted, value in pairs:
        *parents, last = dotted.split(".")
        target = layer.values
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
        layer.origins[tuple(dotted.split("."))] = Origin(name)
    return layer


def merge(layers: Sequence[Layer]) -> Layer:
    """Merge the layers, each value with its own origin. Lists and plain values replace, mappings merge."""
    merged = Layer("policy")
    for layer in layers:
        _lay(merged.values, layer.values, (), merged, layer)
    return merged


def _lay(below: dict[str, Any], above: dict[str, Any], key: Key, merged: Layer, layer: Layer) -> None:
    for name, value in above.items():
        place = (*key, name)
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _lay(below[name], value, place, merged, layer)
            continue
        for old in _places(below.get(name), place):
            merged.origins.pop(old, None)
        merged.origins.update({new: layer.origin(new) for new in _places(value, place)})
        below[name] = copy.deepcopy(value)


def _places(value: Any, key: Key) -> Iterator[Key]:
    """The key itself, and those of everything in the value."""
    yield key
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield from _places(item, (*key, name))
