"""Protects bulk bytes against changes in transit by a tag on each piece, and encrypts them on request.

GMAC only makes the tag, GCM also encrypts; both use the processor's AES through the package `cryptography`.
Pieces are numbered, so that none can be left out, replayed or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jurymast.errors import AuthenticationError

TAG_BYTES = 16
GMAC, GCM = "aes-gmac", "aes-gcm"


def agreed(offered: Sequence[str], here: Sequence[str]) -> str | None:
    """Return the first of the offered ways that can be used here, or None."""
    return next((way for way in offered if way in here), None)


class Shield:
    """Protects the pieces of one direction of a connection; `key` must be for this way and direction
    alone."""

    def __init__(self, way: str, key: bytes) -> None:
        # Takes long to import, and most processes need it late or never.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._hides = way == GCM
        self._number = 0

    def cover(self, piece: memoryview) -> tuple[bytes | memoryview, bytes]:
        """Return the bytes to send for the next piece, of the same length, and its tag."""
        if not self._hides:
            return piece, self._cipher.encrypt(self._nonce(), b"", piece)
        sealed = self._cipher.encrypt(self._nonce(), piece, None)
        return memoryview(sealed)[:-TAG_BYTES], sealed[-TAG_BYTES:]

    def uncover(self, piece: memoryview, tag: bytes) -> None:
        """Check the received bytes of the next piece, and decrypt them in place. Raises
        AuthenticationError."""
        from cryptography.exceptions import InvalidTag

        try:
            if self._hides:
                piece[:] = self._cipher.decrypt(self._nonce(), bytes(piece) + tag, None)
            else:
                self._cipher.decrypt(self._nonce(), tag, piece)
        except InvalidTag as error:
            raise AuthenticationError("bytes of an image were changed in transit") from error

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")


@dataclass(frozen=True)
class Access:
    """What an agent needs to fetch images; `encrypt` says whether the policy wants them encrypted in
    transit."""

    secret: bytes
    encrypt: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to protect images that this agent accepts, best first."""
        return (GCM,) if self.encrypt else (GMAC,)
