"""What a run's key vouches for in a bucket, to which others may write: a checkpoint's files, by keyed hashes.

URL/RUN/step-00000100/jurymast.seal   {"step", "manifest": keyed hash, "files": {name: keyed hash}, "seal"}
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from jurymast import foreign
from jurymast.checkpoint.directory import MANIFEST
from jurymast.storage.job import StorageFailure

SEAL = "jurymast.seal"
HASH_BYTES = 32


class Key:
    """Of one run, for what it has in buckets."""

    def __init__(self, secret: bytes, run: str) -> None:
        self._key = hmac.digest(secret, f"bucket|{run}".encode(), "sha256")

    def hasher(self, name: str) -> Any:
        """To be fed with what is in the file of this name."""
        return hashlib.blake2b(f"{name}\0".encode(), key=self._key, digest_size=HASH_BYTES)

    def seal(self, step: int, manifest: bytes, files: dict[str, str]) -> bytes:
        values = {"step": step, "manifest": self._hash(MANIFEST, manifest), "files": files}
        return json.dumps({**values, "seal": self._of(values)}).encode()

    def vouched(self, step: int, manifest: bytes, sealed: bytes) -> dict[str, str]:
        """The keyed hashes of the step's files, by name. Raises StorageFailure when this run has not sealed
        it so."""
        try:
            values = foreign.parse(sealed)
            seal = values.pop("seal")
            right = hmac.compare_digest(seal, self._of(values)) and values["step"] == step
            if right and hmac.compare_digest(values["manifest"], self._hash(MANIFEST, manifest)):
                return dict(values["files"])
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        raise StorageFailure(f"its {SEAL} is not this run's")

    def _of(self, values: dict[str, Any]) -> str:
        return self._hash(SEAL, json.dumps(values, sort_keys=True).encode())

    def _hash(self, name: str, data: bytes) -> str:
        state = self.hasher(name)
        state.update(data)
        return str(state.hexdigest())
