"""Values of a policy that are right each by itself, but cannot both be meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from jurymast.policy.model import Policy

Key = tuple[str | int, ...]
TIERS = ("checkpoint", "tiers")


def contradictions(policy: Policy, meant: Collection[Key]) -> Iterator[tuple[Key, str]]:
    """Yield the key and what is wrong, for each. `meant`: the keys that somebody wrote; a default
    contradicts nothing."""
    checkpoint, tiers = policy.checkpoint, policy.checkpoint.tiers
    both = {("checkpoint", "cadence"), ("checkpoint", "max_loss")} <= {*meant}
    if both and (checkpoint.cadence.seconds or 0.0) > checkpoint.max_loss:
        yield (
            ("checkpoint", "cadence"),
            "is longer than checkpoint.max_loss allows; write a shorter time, or auto",
        )
    if tiers.memory is None and tiers.peer is not None and (*TIERS, "peer") in meant:
        yield (
            (*TIERS, "peer"),
            "has no effect while checkpoint.tiers.memory is off: a peer's copy is made of that in memory",
        )
    if tiers.object is not None and (tiers.shared.every or 0.0) > tiers.object.every:
        yield (
            (*TIERS, "object", "every"),
            "is shorter than checkpoint.tiers.shared.every, but copies are made of what is on shared storage",
        )
    lost_after_s = policy.detect.node_lost_after
    if lost_after_s is not None and lost_after_s <= policy.detect.heartbeat:
        yield (
            ("detect", "node_lost_after"),
            "must be longer than detect.heartbeat: a node would count as lost between two heartbeats",
        )
    if policy.nodes_policy.together > policy.nodes_policy.expire:
        yield (
            ("nodes_policy", "expire"),
            "is shorter than nodes_policy.together: an exclusion would end before it is decided",
        )
    if policy.network.encrypt and (tiers.memory is None or tiers.peer is None):
        yield (
            ("network", "encrypt"),
            "has no effect without checkpoint.tiers.peer: nodes send each other no images",
        )
    if policy.health.data and "storage" in policy.health.skip:
        yield ("health", "data"), "is looked at by the probe storage, which health.skip leaves out"
