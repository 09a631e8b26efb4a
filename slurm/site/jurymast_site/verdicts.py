"""Reads the verdicts that users left in the spool, and refuses those that prove nothing."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurymast_site.system import Failed, run

SIZE_MAX = 16_384
# For all verdicts of one check. The rest waits for the next check; root's own findings do not wait.
READ_LIMIT_S = 10.0
# Verdicts of one user in one check. Further ones are removed unread, and delay nobody else's.
READ_MAX = 32
NOBODY = -1  # owner of what cannot be a verdict: links may be to other users' files
SPOOL_MODE = 0o1733
# Files for nodes that never read them are removed after this time, in seconds.
ABANDONED_S = 7 * 86_400.0
# Files of one user in the spool; nobody has so many bad nodes.
HEAP_MAX = 1000
CLEAN_LIMIT_S = 10.0
_METADATA_KEYS = "STATUS,ENCODE_TIME,TTL,UID"
# Texts for the numbers of unmunge's STATUS.
_MUNGE_WORDS = {
    "15": "it has expired",
    "16": "its time is in the future: clocks differ",
    "17": "it was used before (replayed)",
}
_TEXT = ("node", "boot_id", "job", "kind", "code", "device", "message", "nonce")
_NONCE = re.compile(r"[0-9a-f]{32}")


class Refused(Exception):
    """Why a verdict does not count, in one line."""


@dataclass(frozen=True)
class Verdict:
    """A verdict. `uid` and `sealed_at` (seconds since the epoch) come from munge, the rest from the user."""

    uid: int
    sealed_at: float
    node: str
    boot_id: str
    job: str
    kind: str
    code: str
    device: str
    message: str
    nonce: str


@dataclass(frozen=True)
class Here:
    """What root knows itself. `jobs`: {job id: uid} of the jobs that have or recently had this node."""

    node: str
    boot_id: str
    now: float
    max_age_s: float
    jobs: Mapping[str, int]
    nonces: Mapping[str, Any]


def waiting(spool: Path, node: str) -> list[str]:
    """Return the names of the verdicts for this node, in random order, so that no user can always be the
    first. Raises Failed."""
    descriptor = _open_spool(spool)
    try:
        with os.scandir(descriptor) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(f"{node}.")]
            random.shuffle(names)
            return names
    finally:
        os.close(descriptor)


def taken(spool: Path, names: Iterable[str]) -> Iterator[bytes | Refused]:
    """Remove these verdicts; yields each one's content, or why it cannot be read. Raises Failed."""
    descriptor = _open_spool(spool)
    end_s = time.monotonic() + READ_LIMIT_S
    try:
        read: Counter[int] = Counter()
        for name in names:
            if time.monotonic() > end_s:
                return
            found: bytes | Refused
            owner = _owner(name, descriptor)
            try:
                found = _read(name, descriptor) if read[owner] < READ_MAX else b""
            except Refused as refusal:
                found = refusal
            # A directory with files in it cannot be removed, and must not fill the log at every check.
            if _remove(name, descriptor) and read[owner] < READ_MAX:
                read[owner] += 1
                yield found
    finally:
        os.close(descriptor)


def clean(spool: Path, now: float) -> None:
    """Remove verdicts that no node reads, and those beyond a user's limit; what takes too long is left for
    the next check. The age is that of the last change to the inode, which users cannot set. Raises Failed."""
    descriptor = _open_spool(spool)
    end_s = time.monotonic() + CLEAN_LIMIT_S
    seen: Counter[int] = Counter()
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if time.monotonic() > end_s:
                    return
                try:
                    status = os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                owner = _owner(entry.name, descriptor)
                seen[owner] += 1
                if status.st_ctime < now - ABANDONED_S or seen[owner] > HEAP_MAX:
                    _remove(entry.name, descriptor)
    finally:
        os.close(descriptor)


def _open_spool(spool: Path) -> int:
    """Raise Failed unless the spool is root's own, and nobody can list it or replace another user's file."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(spool, flags)
    except OSError as error:
        raise Failed(f"the spool {spool}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if status.st_uid != 0 or stat.S_IMODE(status.st_mode) != SPOOL_MODE:
        os.close(descriptor)
        raise Failed(f"the spool {spool} must be root's, with mode {SPOOL_MODE:o}")
    return descriptor


def _owner(name: str, directory: int) -> int:
    """The uid of the owner of an ordinary file; `NOBODY` for anything else."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return NOBODY
    return status.st_uid if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else NOBODY


def _read(name: str, directory: int) -> bytes:
    """The content of a small ordinary file with one name. Raises Refused."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for a process at its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        raise Refused(f"{name}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise Refused(f"{name}: not an ordinary file")
        if status.st_size > SIZE_MAX:
            raise Refused(f"{name}: {status.st_size} bytes (limit {SIZE_MAX})")
        return os.read(descriptor, SIZE_MAX)
    finally:
        os.close(descriptor)


def _remove(name: str, directory: int) -> bool:
    """Remove an entry; False if it is still there, or was already gone."""
    try:
        os.unlink(name, dir_fd=directory)
        return True
    except IsADirectoryError:
        pass
    except OSError:
        return False
    try:
        os.rmdir(name, dir_fd=directory)
        return True
    except OSError:
        return False


def decoded(content: bytes) -> Verdict:
    """Ask munge who sealed the verdict, and when. Raises Refused if it is forged, expired, replayed, or not a
    verdict."""
    try:
        told = run(["unmunge", "--numeric", f"--keys={_METADATA_KEYS}"], given=content, codes=())
    except Failed as error:
        raise Refused(str(error)) from error
    metadata, _, payload = told.partition("\n\n")
    values = dict(line.split(":", 1) for line in metadata.splitlines() if ":" in line)
    status = values.get("STATUS", "").strip()
    if status != "0":
        raise Refused(f"munge: {_MUNGE_WORDS.get(status, 'it is not a credential of this cluster')}")
    try:
        uid, sealed_at = int(values["UID"]), float(values["ENCODE_TIME"])
        body = json.loads(payload)
        if body["v"] != 1 or not all(isinstance(body[key], str) for key in _TEXT):
            raise Refused(f"uid {uid}: a verdict of another version")
        return Verdict(uid, sealed_at, **{key: body[key] for key in _TEXT})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"not a verdict: {error!r}") from error


def check(verdict: Verdict, here: Here) -> None:
    """Raise Refused unless the verdict is of this boot, recent, new, and from a user whose job has this
    node."""
    who = f"uid {verdict.uid}"
    if verdict.node != here.node:
        raise Refused(f"{who}: it is about node {verdict.node}")
    if verdict.boot_id != here.boot_id:
        raise Refused(f"{who}: it is about another boot of this node")
    age_s = here.now - verdict.sealed_at
    if not -60.0 <= age_s <= here.max_age_s:
        raise Refused(f"{who}: sealed {age_s:.0f} s ago (limit {here.max_age_s:.0f} s)")
    if not _NONCE.fullmatch(verdict.nonce) or verdict.nonce in here.nonces:
        raise Refused(f"{who}: it was used before")
    if here.jobs.get(verdict.job) != verdict.uid:
        raise Refused(f"{who}: job {verdict.job} is not theirs, or was not on this node recently")
