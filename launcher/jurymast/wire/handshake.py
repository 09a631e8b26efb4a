"""The handshake by which both ends of a connection prove that they know the run's secret, and derive keys.

    server -> client   MAGIC, 32 random bytes
    client -> server   32 random bytes, HMAC("client", whom, both nonces)
    server -> client   HMAC("server", whom, both nonces)

`whom` names the server: the supervisor, or the keeper of a node. So nobody on the way can redirect a
connection to another server, not even to one of the same run.

Every frame in either direction is then sealed: none can be forged, left out, replayed or reordered.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

MAGIC = b"jurymast/5\n"
NONCE_BYTES = 32
SUPERVISOR = "supervisor"


def keeper_of(node: str) -> str:
    return f"keeper {node}"


@dataclass(frozen=True)
class Handshake:
    """One connection's proofs and keys, once both nonces are known."""

    secret: bytes
    whom: str
    server: bytes
    client: bytes

    def made(self, what: bytes) -> bytes:
        """Make a proof or a key, as only the two ends of the connection can."""
        parts = (what, self.whom.encode(), self.server, self.client)
        return hmac.digest(self.secret, b"|".join(parts), "sha256")

    def proves(self, what: bytes, proof: bytes) -> bool:
        return hmac.compare_digest(proof, self.made(what))


TAG_BYTES = 16
_NUMBER = struct.Struct(">Q")


class Seal:
    """HMAC-SHA256 of each frame's number and payload; the key is hashed only once."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def tag(self, payload: bytes) -> bytes:
        """Return the tag of the next frame."""
        state = self._keyed.copy()
        state.update(_NUMBER.pack(self._number) + payload)
        self._number += 1
        return state.digest()[:TAG_BYTES]

    def fits(self, payload: bytes, tag: bytes) -> bool:
        """Return whether this is the next frame, unchanged."""
        return hmac.compare_digest(self.tag(payload), tag)
