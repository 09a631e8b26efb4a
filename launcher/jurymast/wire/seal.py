"""The seals of the frames that go one way over a connection: nothing of it can be forged, left out, played
again or reordered."""

from __future__ import annotations

import hmac
import struct

TAG_BYTES = 16
_NUMBER = struct.Struct(">Q")


class Seal:
    """HMAC-SHA256 over each frame's number and payload; what of it is the key's is done once."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def tag(self, payload: bytes) -> bytes:
        """Of the next frame."""
        state = self._keyed.copy()
        state.update(_NUMBER.pack(self._number) + payload)
        self._number += 1
        return state.digest()[:TAG_BYTES]

    def fits(self, payload: bytes, tag: bytes) -> bool:
        """Whether this is the next frame, and whole."""
        return hmac.compare_digest(self.tag(payload), tag)
