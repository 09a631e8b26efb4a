"""Values of a policy that are right each by itself, but cannot both be meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from jurymast.policy.model import Policy

Key = tuple[str | int, ...]
TIERS = ("checkpoint", "tiers")
# The probes that a threshold is for, by the beginning of its name.
_PROBES = {"ib-": ("infiniband",), "storage-": ("storage",), "gpu-": ("nvidia", "amd")}


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
    shared_every_s = tiers.shared.every or 0.0
    both = {("checkpoint", "max_loss"), (*TIERS, "shared", "every")} <= {*meant}
    if both and tiers.memory is None and shared_every_s > checkpoint.max_loss:
        yield (
            (*TIERS, "shared", "every"),
            "is longer than checkpoint.max_loss, and checkpoint.tiers.memory is off: nothing else is saved",
        )
    if tiers.memory is None and tiers.peer is not None and (*TIERS, "peer") in meant:
        yield (
            (*TIERS, "peer"),
            "has no effect while checkpoint.tiers.memory is off: a peer's copy is made of that in memory",
        )
    if tiers.memory is None and tiers.local is not None:
        yield (
            (*TIERS, "local"),
            "has no effect while checkpoint.tiers.memory is off: what is written there is the copy in memory",
        )
    if tiers.object is not None and shared_every_s > tiers.object.every:
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
    hang_s = policy.detect.hang
    if hang_s and hang_s <= policy.detect.heartbeat:
        yield (
            ("detect", "hang"),
            "must be longer than detect.heartbeat: ranks would count as hung between two heartbeats",
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
    if policy.health.xid and "nvidia" in policy.health.skip:
        yield ("health", "xid"), "is for the probe nvidia, which health.skip leaves out"
    if policy.pool.nodes and not policy.pool.directory:
        yield ("pool", "nodes"), "needs pool.directory, in which these nodes tell that they wait"
    yield from _for_no_probe(policy)
    yield from _switched_off(policy, meant)


def _for_no_probe(policy: Policy) -> Iterator[tuple[Key, str]]:
    for name in policy.health.thresholds:
        probes = next((probes for start, probes in _PROBES.items() if name.startswith(start)), ())
        if probes and {*probes} <= {*policy.health.skip}:
            told = " and ".join(probes)
            yield ("health", "thresholds", name), f"is for the probe {told}, which health.skip leaves out"


def _switched_off(policy: Policy, meant: Collection[Key]) -> Iterator[tuple[Key, str]]:
    """Keys that do nothing while another one has the value that somebody gave it. A site may well prepare the
    one and leave the other as it is."""
    hold, drain = ("nodes_policy", "hold"), policy.nodes_policy.bad == "drain"
    refill = ("nodes_policy", "refill")
    avoids, skipped = policy.health.workaround, "infiniband" in policy.health.skip
    for key, by, off, effect in (
        (hold, refill, not policy.nodes_policy.refill, "nodes_policy.refill is off"),
        (("pool", "nodes"), refill, not policy.nodes_policy.refill, "nodes_policy.refill is off"),
        (("nodes", "batch"), ("nodes", "min"), not policy.nodes.min, "nodes.min is off"),
        (
            ("health", "workaround"),
            ("health", "skip"),
            avoids and skipped,
            "health.skip leaves out infiniband",
        ),
        (("nodes_policy", "spool"), ("nodes_policy", "bad"), not drain, "nodes_policy.bad is not drain"),
    ):
        if off and {key, by} <= {*meant}:
            yield key, f"has no effect while {effect}"
