"""Turns layers into one checked policy and the frozen values with which the core decides. Reports all errors
together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from jurymast.core.settings import Settings
from jurymast.core.texts import did_you_mean
from jurymast.errors import PolicyError
from jurymast.policy.load import Key, Layer, Origin, merge, spelled
from jurymast.policy.model import Policy

DEFAULT = Origin("default")
# Nothing implements these yet: a policy may only give the values that hold anyway.
NOT_YET: tuple[Key, ...] = (("nodes", "min"), ("notify",))


@dataclass(frozen=True)
class Resolved:
    """A checked policy, with the values as written and the origin of each."""

    policy: Policy
    values: dict[str, Any]
    origins: dict[Key, Origin]

    @property
    def digest(self) -> str:
        """A hash of the policy for the journal: equal values have equal digests, wherever they were
        written."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:16]

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
            requeues=policy.failures.requeues,
            stop_grace_s=policy.failures.stop_grace,
            cadence_steps=every.steps,
            cadence_s=every.seconds,
            memory=tiers.memory is not None,
            replicas=tiers.peer.copies if tiers.memory and tiers.peer else 0,
            parity=tiers.peer.parity if tiers.memory and tiers.peer else 0,
            prefer_spares=tiers.peer is None or tiers.peer.prefer == "spares",
            local_path=tiers.local.path if tiers.local else "",
            shared_every_s=tiers.shared.every,
            keep=tiers.shared.keep,
            object_url=tiers.object.url if tiers.object else "",
            object_every_s=tiers.object.every if tiers.object else Settings.object_every_s,
            rate=policy.failures.rate,
            half_life_s=policy.failures.half_life,
            burst_s=policy.failures.burst,
            max_loss_s=policy.checkpoint.max_loss,
            probes_off=tuple(policy.health.skip),
            xid=dict(policy.health.xid),
            thresholds=dict(policy.health.thresholds),
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
        )

    def yaml(self, *, origins: bool = False) -> str:
        """The values as a policy file; with `origins`, each is followed by its origin."""
        return "".join(_lines(self.values, (), self.origins if origins else None))


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Check each layer by itself, so that a mistake shows even if a higher layer hides it, then the whole.

    Raises PolicyError with one line per mistake: `file:line: key.path: what is wrong`.
    """
    problems = [one for layer in layers for one in _problems(layer)]
    merged = merge(layers)
    problems += [one for one in _problems(merged) if one not in problems]
    if problems:
        lines = (f"{place}: {text}" for place, text in sorted(problems, key=lambda one: one[0]))
        raise PolicyError("\n".join(lines))
    policy = Policy.model_validate(merged.values)
    written = _with_defaults(Policy, merged.values)
    origins = {key: merged.origins.get(key, DEFAULT) for key in _leaves(written, ())}
    return Resolved(policy, written, origins)


def _problems(layer: Layer) -> Iterator[tuple[Origin, str]]:
    """(where, `key.path: what is wrong`) of each mistake."""
    for key in NOT_YET:
        if _value(layer.values, key):
            yield layer.origin(key), f"{spelled(key)}: is not supported yet; leave it out"
    try:
        Policy.model_validate(layer.values)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            key = tuple(part for part in one["loc"] if part != "[key]")  # about a mapping's own names
            if one["type"] == "extra_forbidden":
                what = f"unknown key{did_you_mean(str(key[-1]), _keys(key[:-1]))}"
            elif one["type"] == "value_error":
                what = str(one["ctx"]["error"])
            elif one["type"] == "string_too_short":
                what = "must not be empty"
            elif one["type"] in ("model_type", "dict_type", "model_attributes_type"):
                what = f"needs keys below it: {', '.join(_keys(key))}"
            else:
                what = one["msg"].removeprefix("Input ")
            yield layer.origin(key), f"{spelled(key)}: {what}"


def _value(values: Any, key: Key) -> Any:
    """The value at `key`; None if there is none."""
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class in a field's annotation, alone, optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part))), None)


def _keys(key: Key) -> list[str]:
    """The valid names below `key`."""
    section: type[BaseModel] | None = Policy
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


def _lines(values: dict[str, Any], key: Key, origins: dict[Key, Origin] | None) -> Iterator[str]:
    for name, value in values.items():
        place = (*key, name)
        indent = "  " * len(key)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:\n"
            yield from _lines(value, place, origins)
            continue
        # JSON text is also YAML, and distinguishes text from numbers.
        text = (
            value if isinstance(value, str) and _plain_word(value) else json.dumps(value, ensure_ascii=False)
        )
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else text
        line = f"{indent}{name}: {text}"
        yield f"{line:<40} # {origins.get(place, DEFAULT)}\n" if origins is not None else f"{line}\n"


def _plain_word(text: str) -> bool:
    """Whether YAML reads `text` without quotes back as the same text."""
    import yaml

    try:
        loaded: object = yaml.safe_load(f"key: {text}\n")
    except yaml.YAMLError:
        return False
    return loaded == {"key": text} and "\n" not in text
