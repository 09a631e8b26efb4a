"""Protects bulk bytes against changes in transit by a tag on each piece, and encrypts them on request.

There are three ways. GMAC only makes the tag, GCM also encrypts; both use the processor's AES through the
package `cryptography`. If that cannot be imported, keyed BLAKE2b makes the tag, which takes several times as
long. Pieces are numbered, so that none can be left out, replayed or moved.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jurymast.errors import AuthenticationError, PolicyError

TAG_BYTES = 16
BLAKE2B, GMAC, GCM = "blake2b", "aes-gmac", "aes-gcm"
INSTALL = "pip install cryptography"


class Shield(Protocol):
    """Protects the pieces of one direction of a connection."""

    def cover(self, piece: memoryview) -> tuple[bytes | memoryview, bytes]:
        """Return the bytes to send for the next piece, of the same length, and its tag."""

    def uncover(self, piece: memoryview, tag: bytes) -> None:
        """Check the received bytes of the next piece, and decrypt them in place. Raises
        AuthenticationError."""


def ways(encrypt: bool) -> tuple[str, ...]:
    """List the ways that can be used here, best first. Raises PolicyError if bytes must be encrypted and
    cannot be."""
    if encrypt:
        if _aes() is None:
            why = "network.encrypt needs the package cryptography, which is not installed"
            raise PolicyError(why, hint=f"run {INSTALL} on every node, or set network: {{encrypt: off}}")
        return (GCM,)
    return (BLAKE2B,) if _aes() is None else (GMAC, BLAKE2B)


def agreed(offered: Sequence[str], here: Sequence[str]) -> str | None:
    """Return the first of the offered ways that can be used here, or None."""
    return next((way for way in offered if way in here), None)


def shield(way: str, key: bytes) -> Shield:
    """Return a shield; `key` must be for this way and direction alone."""
    return _Blake2b(key) if way == BLAKE2B else _Aes(key, hides=way == GCM)


class _Blake2b:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def cover(self, piece: memoryview) -> tuple[memoryview, bytes]:
        return piece, self._tag(piece)

    def uncover(self, piece: memoryview, tag: bytes) -> None:
        if not hmac.compare_digest(self._tag(piece), tag):
            raise _forged()

    def _tag(self, piece: memoryview) -> bytes:
        state = hashlib.blake2b(self._number.to_bytes(8, "big"), key=self._key, digest_size=TAG_BYTES)
        state.update(piece)
        self._number += 1
        return state.digest()


class _Aes:
    def __init__(self, key: bytes, *, hides: bool) -> None:
        self._cipher = _aes().AESGCM(key)
        self._hides = hides
        self._number = 0

    def cover(self, piece: memoryview) -> tuple[bytes | memoryview, bytes]:
        if not self._hides:
            return piece, self._cipher.encrypt(self._nonce(), b"", piece)
        sealed = self._cipher.encrypt(self._nonce(), piece, None)
        return memoryview(sealed)[:-TAG_BYTES], sealed[-TAG_BYTES:]

    def uncover(self, piece: memoryview, tag: bytes) -> None:
        try:
            if self._hides:
                piece[:] = self._cipher.decrypt(self._nonce(), bytes(piece) + tag, None)
            else:
                self._cipher.decrypt(self._nonce(), tag, piece)
        except importlib.import_module("cryptography.exceptions").InvalidTag as error:
            raise _forged() from error

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")


def _forged() -> AuthenticationError:
    return AuthenticationError("bytes of an image were changed in transit")


@functools.cache
def _aes() -> Any:
    """Return the module, which takes long to import; None if it is not installed."""
    try:
        return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError:
        return None


@dataclass(frozen=True)
class Access:
    """What an agent needs to fetch images; `encrypt` says whether the policy wants them encrypted in
    transit."""

    secret: bytes
    encrypt: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to protect images. Raises PolicyError if they must be encrypted and cannot be."""
        return ways(self.encrypt)
