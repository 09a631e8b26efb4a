"""What both ends of a connection send, whoever reads and writes it: the handshake, by which they prove that
they know the run's secret and derive keys, and then frames; and the protection of bulk bytes. No I/O.

    server -> client   MAGIC, 32 random bytes
    client -> server   32 random bytes, HMAC("client", whom, both nonces)
    server -> client   HMAC("server", whom, both nonces)
    then both          frames: u32 length, 16 bytes of HMAC(direction key, u64 sequence + payload), payload

`whom` names the server: the supervisor, or the keeper of a node. So nobody on the way can redirect a
connection to another server, not even to one of the same run.

Every frame in either direction is then sealed: none can be forged, left out, replayed or reordered.

Bulk bytes follow in pieces, each with a tag after it; on request they are encrypted as well. GMAC only makes
the tag, GCM also encrypts; both use the processor's AES through the package `cryptography`. Pieces are
numbered, so that none can be left out, replayed or moved.
"""

from __future__ import annotations

import hmac
import re
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from jurymast.errors import OTHER_VERSION_HINT, AuthenticationError, OtherProtocolError, ProtocolError

MAGIC = b"jurymast/8\n"
NAME, MAGIC_BYTES_MAX = b"jurymast/", 16
ANY_MAGIC = re.compile(rb"(jurymast/\d{1,6})\n")  # of any version
NONCE_BYTES = 32
HELLO_BYTES, ANSWER_BYTES = len(MAGIC) + NONCE_BYTES, 2 * NONCE_BYTES
SUPERVISOR = "supervisor"
HANDSHAKE_LIMIT_S = 5.0
# Pause before a client tries again to begin a handshake that the server has reset.
CONNECT_AGAIN_S = 0.05


def keeper_of(node: str) -> str:
    return f"keeper {node}"


def hello() -> bytes:
    """Return what a server sends first."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


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

    @classmethod
    def with_client(cls, secret: bytes, who: str, hello: bytes, answer: bytes) -> Handshake:
        """Do the server's part, as `who`, once the client has answered `hello`. Raises
        AuthenticationError."""
        shaking = cls(secret, who, hello[len(MAGIC) :], answer[:NONCE_BYTES])
        if not shaking.proves(b"client", answer[NONCE_BYTES:]):
            raise AuthenticationError("a connection did not prove that it knows the run's secret")
        return shaking

    @classmethod
    def with_server(cls, secret: bytes, whom: str, hello: bytes, place: str) -> tuple[Handshake, bytes]:
        """Do the client's part, and return the answer to `hello` of the server at `place`. Raises
        ProtocolError, and OtherProtocolError for a server of another version."""
        if not hello.startswith(MAGIC):
            spoken = MAGIC.decode().strip()
            if (other := ANY_MAGIC.match(hello)) is not None:
                raise OtherProtocolError(
                    f"{place} speaks {other[1].decode()}, and this jurymast {spoken}", hint=OTHER_VERSION_HINT
                )
            raise ProtocolError(f"{place} does not speak {spoken}")
        ours = secrets.token_bytes(NONCE_BYTES)
        shaking = cls(secret, whom, hello[len(MAGIC) :], ours)
        return shaking, ours + shaking.made(b"client")

    def check_server(self, proof: bytes, place: str) -> None:
        """Raises AuthenticationError."""
        if not self.proves(b"server", proof):
            raise AuthenticationError(f"{place} does not know the run's secret, or is not the {self.whom}")


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


_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size + TAG_BYTES
FRAME_BYTES_MAX = 4 * 1024 * 1024


class Frames:
    """The frames of one end of a connection; errors name the other end."""

    def __init__(self, send_key: bytes, receive_key: bytes, peer: str = "the other side") -> None:
        self._peer = peer
        self._sealing = Seal(send_key)
        self._opening = Seal(receive_key)

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame to send."""
        return _LENGTH.pack(len(payload)) + self._sealing.tag(payload) + payload

    def open(self, unread: bytearray) -> bytes | None:
        """Take the next frame out of the bytes that have arrived, and return its payload; None until all of
        it is here. Raises AuthenticationError, and ProtocolError for a frame that is too long."""
        if len(unread) < HEAD_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(unread)
        if length > FRAME_BYTES_MAX:
            raise ProtocolError(
                f"a frame from {self._peer} has {length} bytes, at most {FRAME_BYTES_MAX} are allowed"
            )
        end = HEAD_BYTES + length
        if len(unread) < end:
            return None
        tag, payload = bytes(unread[_LENGTH.size : HEAD_BYTES]), bytes(unread[HEAD_BYTES:end])
        del unread[:end]
        if not self._opening.fits(payload, tag):
            raise AuthenticationError(f"a frame from {self._peer} is not sealed with the run's key")
        return payload


def missing_bytes(unread: bytearray) -> int:
    """Return how many bytes of the next frame are still to come, as far as is known."""
    if len(unread) < HEAD_BYTES:
        return HEAD_BYTES - len(unread)
    return HEAD_BYTES + int(_LENGTH.unpack_from(unread)[0]) - len(unread)


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
