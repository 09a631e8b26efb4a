"""Slurm's HealthCheckProgram: checks this node as root, reads verdicts, drains the node or resumes it.

A verdict only makes root look: the node is drained if root's own probes find something bad of the same kind.
So nobody can drain a node by a false verdict, not even a node of their own job.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurymast_site import slurm, verdicts
from jurymast_site.config import DEFAULT, Config, ConfigError, load
from jurymast_site.guard import NotRoots, require_program
from jurymast_site.system import (
    Failed,
    Log,
    load_state,
    run,
    save_state,
    state_directory,
)
from jurymast_site.verdicts import Here, Refused, Verdict

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The kinds of findings that are this node's fault. Shared storage, the application and trouble that comes
# from other nodes never are.
KINDS = ("hardware", "network", "host")
HOUR_S = 3600.0
# The probes' exit code is the Nagios code of what they found.
HEALTH_CODES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Look:
    """The result of root's own probes: the `bad` findings that are this node's fault, and whether all was
    well."""

    bad: tuple[Mapping[str, Any], ...]
    all_well: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 1 if nothing could be checked. Slurm only logs it."""
    parser = argparse.ArgumentParser(description="jurymast's HealthCheckProgram; runs as root on a node")
    parser.add_argument("--config", type=Path, default=DEFAULT, help=f"default: {DEFAULT}")
    path: Path = parser.parse_args(arguments).config
    try:
        config = load(path)
        log = Log("jurymast-healthcheck", config.log)
    except (ConfigError, Failed) as error:
        Log("jurymast-healthcheck", "").say(str(error))
        return 1
    try:
        os.environ.update(config.environment)
        os.chdir("/")  # Python's -m imports from its directory, which must be root's
        state = state_directory(config.state)
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        HealthCheck(config, state, log).run()
    except BlockingIOError:
        return 0  # the last check is still running
    except (Failed, OSError) as error:
        log.say(f"failed: {error}")
        return 1
    return 0


class HealthCheck:
    """One run of the health check."""

    def __init__(self, config: Config, state: Path, log: Log) -> None:
        self._config = config
        self._state = state
        self._unseen = state / "unseen.json"  # a drain of ours, until the drained nodes were counted again
        self._log = log
        self._now = time.time()
        self._node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        self._boot_id = BOOT_ID.read_text().strip()

    def run(self) -> None:
        """Check the node, and drain or resume it. Raises Failed and OSError."""
        self._look_again()
        jobs = self._jobs_lately()
        # Listed before the probes run: they could not confirm a verdict that comes later.
        names = verdicts.waiting(self._config.spool, self._node)
        look = self._look()
        # Without a look verdicts wait for the next check: nothing speaks against them.
        reason = self._reason_by_verdict(look, jobs, names) if look is not None else ""
        if not reason and self._config.act_on_own_findings and look is not None and look.bad:
            reason = self._reason(look.bad[0], "-")
        if reason:
            self._drain(reason)
        elif look is not None and look.all_well and self._config.resume:
            self._let_back()
        verdicts.clean(self._config.spool, self._now)  # last: users' files must not delay the rest

    def _look(self) -> Look | None:
        """Run root's own probes; None if they could not be run."""
        config = self._config
        try:
            require_program(config.health_command)
            told = run(config.health_command, limit_s=config.health_limit_s, codes=HEALTH_CODES)
            look = parsed(told)
        except (Failed, NotRoots, OSError, ValueError) as error:
            self._log.say(f"the probes could not be run: {error}")
            return None
        for finding in look.bad:
            self._log.say(f"found {finding['code']} {finding['device']}: {finding['message']}")
        return look

    def _jobs_lately(self) -> dict[str, int]:
        """{job id: uid} of current and recent jobs: a run may give its bad node back before the next
        check."""
        path = self._state / "jobs.json"
        seen = {
            job: [uid, at]
            for job, (uid, at) in load_state(path).items()
            if at > self._now - self._config.max_age_s
        }
        seen.update({job: [uid, self._now] for job, uid in slurm.jobs_on(self._node).items()})
        save_state(path, seen)
        return {job: uid for job, (uid, _) in seen.items()}

    def _reason_by_verdict(self, look: Look, jobs: Mapping[str, int], names: Sequence[str]) -> str:
        """The reason to drain that follows from verdicts; "" if there is none. Every refusal is logged."""
        path = self._state / "nonces.json"
        # A verdict with an older nonce would be refused for its age.
        kept = self._now - self._config.max_age_s - 3600.0
        nonces = {nonce: at for nonce, at in load_state(path).items() if at > kept}
        reason = ""
        for content in verdicts.taken(self._config.spool, names):
            try:
                if isinstance(content, Refused):
                    raise content
                verdict = verdicts.decoded(content)
                here = Here(self._node, self._boot_id, self._now, self._config.max_age_s, jobs, nonces)
                verdicts.check(verdict, here)
                nonces[verdict.nonce] = self._now
                save_state(path, nonces)  # before anything else is done
                confirmed = confirming(look, verdict)
                if not self._config.act_on_verdicts:
                    raise Refused(f"uid {verdict.uid}: this site does not act on verdicts")
                reason = reason or self._reason(confirmed, verdict.job)
            except Refused as refusal:
                self._log.say(f"verdict refused: {refusal}")
        return reason

    def _reason(self, finding: Mapping[str, Any], job: str) -> str:
        stamp = time.strftime(slurm.STAMP, time.gmtime(self._now))
        device = str(finding["device"])
        what = f"gpu={device[3:]}" if device.startswith("gpu") else f"device={device or '-'}"
        told = f"[{finding['kind']}] code={finding['code']} {what} job={job} ts={stamp} boot={self._boot_id}"
        return slurm.PREFIX + "".join(c for c in told if c.isalnum() or c in " []=_.:/-")

    def _drain(self, reason: str) -> None:
        """Drain this node, unless it is out of service already, or too many nodes are drained. Raises
        Failed."""
        state, before = slurm.node_state(self._node)
        if slurm.is_foreign(state, before):
            self._log.say(
                f"not drained: it was already set to {state} by somebody else: {before or 'no reason'}"
            )
            return
        if slurm.is_out(state):
            return  # by us, earlier
        refused = self._beyond_limits()
        if refused:
            self._log.alert(f"not drained, because {refused}: {reason}")
            return
        if self._config.dry_run:
            self._log.say(f"would drain (dry run): {reason}")
            return
        save_state(self._unseen, {"drained for": reason})  # before the drain: it must not be lost
        slurm.drain(self._node, reason)
        self._look_again()

    def _look_again(self) -> None:
        """Count the drained nodes again after a drain, and take it back if they are too many: if one fault
        shows on many nodes, all drain at the same moment, and none has seen the others drained. If Slurm does
        not answer, the next check does this. Raises Failed."""
        if not load_state(self._unseen):
            return
        state, reason = slurm.node_state(self._node)
        if slurm.is_out(state) and not slurm.is_foreign(state, reason):
            refused = self._beyond_limits()
            if refused:
                slurm.resume(self._node)
                self._log.alert(f"not drained after all, because {refused}: {reason}")
            else:
                self._log.say(f"drained ({state}): {reason}")
        save_state(self._unseen, {})

    def _beyond_limits(self) -> str:
        """Why this node must not be drained in addition to those already drained by us; "" if it may. Many
        bad nodes at once usually have one cause outside of them. Raises Failed."""
        ours, nodes = slurm.drained_by_us()
        others = [reason for name, reason in ours.items() if name != self._node]
        most = max(1, int(self._config.max_fraction * nodes))
        if len(others) >= most:
            return f"{len(others)} of {nodes} nodes are already drained (max_fraction allows {most})"
        lately = sum(slurm.drained_at(reason) > self._now - HOUR_S for reason in others)
        if lately >= self._config.max_per_hour:
            return f"max_per_hour = {self._config.max_per_hour} is reached"
        return ""

    def _let_back(self) -> None:
        """Resume the node if we drained it in an earlier boot. Raises Failed."""
        state, reason = slurm.node_state(self._node)
        ours = reason.startswith(slurm.PREFIX) and "boot=" in reason
        if not state.startswith("drain") or not ours or f"boot={self._boot_id}" in reason:
            return
        if self._config.dry_run:
            self._log.say(f"would return it to service (dry run): {reason}")
            return
        slurm.resume(self._node)
        self._log.say(f"back in service after a reboot, since all checks pass; it was drained for: {reason}")


def parsed(told: str) -> Look:
    """Parse what `jurymast health --json` prints: {"findings": [...]}. Raises ValueError."""
    try:
        content = json.loads(told)
    except RecursionError:
        raise ValueError("the health command printed JSON that is nested too deeply") from None
    if not isinstance(content, dict) or not isinstance(content.get("findings"), list):
        raise ValueError("the health command did not print findings as JSON")
    against = []
    for finding in content["findings"]:
        if not isinstance(finding, dict):
            raise ValueError("the health command printed something other than findings")
        words = {key: str(finding.get(key, "")) for key in ("verdict", "kind", "code", "device", "message")}
        if words["verdict"] == "bad" and words["kind"] in KINDS:
            against.append(words)
    # "unknown" is not well: nothing could be seen.
    return Look(tuple(against), content.get("verdict") == "ok")


def confirming(look: Look, verdict: Verdict) -> Mapping[str, Any]:
    """Return root's own finding that confirms the verdict: the same sign, or another one of the same part
    (whose number differs in a job that has only some parts). Raises Refused if there is none."""
    for finding in look.bad:
        same_part = verdict.device != "" and finding["device"] == verdict.device
        if finding["kind"] == verdict.kind and (finding["code"] == verdict.code or same_part):
            return finding
    told = f"{verdict.code} {verdict.device}".strip()
    raise Refused(f"uid {verdict.uid}: root's own probes do not find {told}")
