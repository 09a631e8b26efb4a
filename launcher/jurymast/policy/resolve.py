"""From policy files to one checked policy and the frozen values with which the core decides. Keeps the origin
of every value, and reports all errors together.

Layers, where later ones win: the site's and the user's own (`policy/site.py`), the files that a file
`extends`, the file, the job, the command line. Mappings are merged key by key; any other value replaces the
one below it, except where a layer locks it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError

from jurymast import foreign
from jurymast.core.state.settings import Exposure, Receiver, Settings
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import PolicyError
from jurymast.policy.contradictions import contradictions
from jurymast.policy.model import Policy, Section

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
    """Plain values, and where each was written; the key () is the whole. `kind`: whose layer it is, like
    "site". `path`: the file, under its own name. `locked`: keys that no layer above may change, and where it
    says so."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, Origin] = field(default_factory=dict)
    extends: list[str] = field(default_factory=list)
    kind: str = "file"
    path: Path | None = None
    locked: dict[Key, Origin] = field(default_factory=dict)

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
    layer.path = real
    for name in layer.extends:
        target = path.parent / os.path.expanduser(name)
        _add_layers(target, str(target), (*above, real), layers)
    layers.append(layer)


def pairs_layer(name: str, pairs: Sequence[tuple[str, Any]]) -> Layer:
    """A layer from dotted keys and values, as on `#JURYMAST` lines and the command line."""
    layer = Layer(name, kind="")
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


DEFAULT = Origin("default")
# Keys that people may have or expect, and why there are none.
ABSENT: dict[Key, str] = {
    ("teams",): "only the site's own file has this",
    ("locked",): "only the files of a site have this",
    ("checkpoint", "tiers", "peer", "parity"): "is gone: other nodes hold whole replicas; leave it out",
}


@dataclass(frozen=True)
class Resolved:
    """A checked policy, with the values as written and the origin of each. `layers`: what they were made of,
    the lowest first. `contradictions`: values that cannot both be meant, as `file:line: what`."""

    policy: Policy
    values: dict[str, Any]
    origins: dict[Key, Origin]
    layers: tuple[Layer, ...] = ()
    contradictions: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the policy for the journal: equal values have equal digests, wherever they were
        written."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:16]

    def whose(self, key: Key) -> str:
        """The origin of a value, and whose it is: `site.yaml:3 (site, locked)`."""
        origin = self.origins.get(key, DEFAULT)
        kind = next((one.kind for one in self.layers if one.name == origin.source), "")
        locks = [locked for one in self.layers for locked in one.locked if locked == key[: len(locked)]]
        told = ", ".join(filter(None, (kind, "locked" if locks else "")))
        return f"{origin} ({told})" if told else str(origin)

    def settings(self) -> Settings:
        policy = self.policy
        every, tiers = policy.checkpoint.cadence, policy.checkpoint.tiers
        return Settings(
            heartbeat_s=policy.detect.heartbeat,
            node_lost_after_s=policy.detect.node_lost_after,
            hang_s=policy.detect.hang,
            start_limit_s=policy.detect.start_within,
            join_limit_s=policy.detect.join_within,
            infrastructure=policy.failures.restarts.infrastructure,
            application=policy.failures.restarts.application,
            preemption=policy.failures.restarts.preemption,
            requeues=policy.failures.requeues,
            attempts_without_step=policy.failures.attempts_without_step,
            stop_grace_s=policy.failures.stop_grace,
            cadence_steps=every.steps,
            cadence_s=every.seconds,
            memory=tiers.memory is not None,
            replicas=tiers.peer.copies if tiers.memory and tiers.peer else 0,
            prefer_spares=tiers.peer is None or tiers.peer.prefer == "spares",
            local_path=tiers.local.path if tiers.local else "",
            shared_every_s=tiers.shared.every,
            keep=tiers.shared.keep,
            object_url=tiers.object.url if tiers.object else "",
            object_every_s=tiers.object.every if tiers.object else Settings.object_every_s,
            object_keep=tiers.object.keep if tiers.object else Settings.object_keep,
            rate=policy.failures.rate,
            half_life_s=policy.failures.half_life,
            burst_s=policy.failures.burst,
            max_loss_s=policy.checkpoint.max_loss,
            probes_off=tuple(policy.health.skip),
            xid=dict(policy.health.xid),
            thresholds=dict(policy.health.thresholds),
            renews=policy.failures.at_time_limit == "requeue",
            refill=policy.nodes_policy.refill,
            hold_s=policy.nodes_policy.hold,
            pool_directory=policy.pool.directory,
            pool_nodes=policy.pool.nodes,
            pool_idle_s=policy.pool.idle,
            nodes_min=policy.nodes.min,
            batch=policy.nodes.batch,
            data_paths=tuple(policy.health.data),
            preflight_s=policy.health.preflight,
            straggler=policy.health.straggler,
            workaround=policy.health.workaround,
            bad_nodes=policy.nodes_policy.bad,
            excluded_fraction=policy.nodes_policy.max_fraction,
            exclusion_s=policy.nodes_policy.expire,
            together_s=policy.nodes_policy.together,
            spool=policy.nodes_policy.spool,
            warm_start=policy.start == "warm",
            encrypt=policy.network.encrypt,
            notify=tuple(
                Receiver(when=tuple(one.when), command=tuple(one.command), url=one.url)
                for one in policy.notify
            ),
            price=policy.price,
            metrics=Exposure(**{**policy.metrics.model_dump(), "trackers": tuple(policy.metrics.trackers)}),
        )

    def yaml(self, *, origins: bool = False) -> str:
        """The values as a policy file; with `origins`, each is followed by its origin."""
        return "".join(_lines(self.values, (), self.whose if origins else None))


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Check each layer by itself, so that a mistake shows even if a higher layer hides it, then the whole.

    Raises PolicyError with one line per mistake: `file:line: key.path: what is wrong`.
    """
    problems = [one for layer in layers for one in problems_of(layer, Policy)]
    merged = merge(layers)
    problems += [one for one in problems_of(merged, Policy) if one not in problems]
    refuse(problems)
    policy = Policy.model_validate(merged.values)
    refuse([one for number in range(len(layers)) for one in _unlocked(layers, number, policy, merged)])
    written = _with_defaults(Policy, merged.values)
    origins = {key: merged.origins.get(key, DEFAULT) for key in _leaves(written, ())}
    # A file with all keys, like that of a run or `configs/default.yaml`, says of none that it is meant.
    meant = {key for layer in layers if {*Policy.model_fields} - {*layer.values} for key in layer.origins}
    against = tuple(
        _told((merged.origin(key), f"{spelled(key)}: {what}")) for key, what in contradictions(policy, meant)
    )
    return Resolved(policy, written, origins, tuple(layers), against)


Problem = tuple[Origin, str]  # where, `key.path: what is wrong`


def _told(problem: Problem) -> str:
    return "{}: {}".format(*problem)


def refuse(problems: Sequence[Problem]) -> None:
    """Raise PolicyError if there are any."""
    if problems:
        raise PolicyError("\n".join(map(_told, sorted(problems, key=lambda one: one[0]))))


def _unlocked(layers: Sequence[Layer], number: int, policy: Policy, merged: Layer) -> Iterator[Problem]:
    """What layers above this one have changed of what it locks."""
    if not layers[number].locked:
        return
    fixed = Policy.model_validate(merge(layers[: number + 1]).values)
    for key, where in layers[number].locked.items():
        for changed in _changed(_at(fixed, key), _at(policy, key), key):
            yield merged.origin(changed), f"{spelled(changed)}: is locked by {where}; leave it out"


def _at(policy: Any, key: Key) -> Any:
    for part in key:
        policy = getattr(policy, str(part), None)
    return policy


def _changed(below: Any, above: Any, key: Key) -> Iterator[Key]:
    """The keys at which two values of the policy differ."""
    if isinstance(below, BaseModel) and isinstance(above, BaseModel):
        for name in type(below).model_fields:
            yield from _changed(getattr(below, name), getattr(above, name), (*key, name))
    elif below != above:
        yield key


def problems_of(layer: Layer, model: type[Section]) -> Iterator[Problem]:
    """Each mistake in the layer's values, which are to be those of `model`."""
    try:
        model.model_validate(layer.values)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            key = tuple(part for part in one["loc"] if part != "[key]")  # about a mapping's own names
            if one["type"] == "extra_forbidden":
                what = (
                    ABSENT.get(key) or f"unknown key{did_you_mean(str(key[-1]), keys_below(key[:-1], model))}"
                )
            elif one["type"] == "value_error":
                what = str(one["ctx"]["error"])
            elif one["type"] == "string_too_short":
                what = "must not be empty"
            elif one["type"] in ("model_type", "dict_type", "model_attributes_type"):
                what = f"needs keys below it: {', '.join(keys_below(key, model))}"
            else:
                what = one["msg"].removeprefix("Input ")
            yield layer.origin(key), f"{spelled(key)}: {what}"


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class in a field's annotation, alone, optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part))), None)


def keys_below(key: Key, model: type[BaseModel] = Policy) -> list[str]:
    """The valid names below `key`."""
    section: type[BaseModel] | None = model
    for part in key:
        if isinstance(part, str) and section is not None:
            info = section.model_fields.get(part)
            section = section_of(info.annotation) if info else None
    names = list(section.model_fields) if section else []
    return [*names, "extends"] if section is Policy else names


def _with_defaults(section: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """`values` as written, with the model's defaults for missing ones."""
    result: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        value = values.get(name, info.default) if name in values or not info.is_required() else None
        inner = section_of(info.annotation)
        if value is None and inner is not None:
            value = {}
        if inner is not None and isinstance(value, dict):
            value = _with_defaults(inner, value)
        elif inner is not None and isinstance(value, list):
            value = [_with_defaults(inner, item) for item in value]
        result[name] = value
    return result


def _leaves(value: Any, key: Key) -> Iterator[Key]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, (*key, name))
    else:
        yield key


def _lines(values: dict[str, Any], key: Key, origin: Callable[[Key], str] | None) -> Iterator[str]:
    for name, value in values.items():
        place = (*key, name)
        indent = "  " * len(key)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:\n"
            yield from _lines(value, place, origin)
            continue
        # JSON text is also YAML, and distinguishes text from numbers.
        text = (
            value if isinstance(value, str) and _plain_word(value) else json.dumps(value, ensure_ascii=False)
        )
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else text
        line = f"{indent}{name}: {text}"
        yield f"{line:<40} # {origin(place)}\n" if origin is not None else f"{line}\n"


def _plain_word(text: str) -> bool:
    """Whether YAML reads `text` without quotes back as the same text."""
    import yaml

    try:
        loaded: object = yaml.safe_load(f"key: {text}\n")
    except yaml.YAMLError:
        return False
    return loaded == {"key": text} and "\n" not in text
