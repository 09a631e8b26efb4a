"""An agent's data server in a process of its own: holds one image, and stops after some blocks if told so.

    keeper_serving.py STEP RANK WORLD BLOCK_BYTES STOP_AFTER

Prints its port, then "stopped" when it has sent STOP_AFTER blocks (0: it never stops).
"""

from __future__ import annotations

import sys
import threading

import pytest

from jurymast.core.state.images import ALL, MEMORY
from jurymast.keeper import transfer
from jurymast.keeper.copies import CopyTable, StoredCopy
from jurymast.keeper.manifest import Manifest
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.transfer import BytesFollow
from support.keepers import ACCESS, COMMON_BYTES, SIZE, image_bytes, use_small_blocks

step, rank, world, block_bytes, stop_after = map(int, sys.argv[1:])
use_small_blocks(pytest.MonkeyPatch(), block_bytes)
buffer = MappedBuffer(SIZE)
buffer.map[:SIZE] = image_bytes(step, rank)
manifest = Manifest(step, 1, rank, world, "2.13", SIZE, COMMON_BYTES).with_blocks(buffer)
copies = CopyTable()
copies.add(StoredCopy(manifest, MEMORY, ALL, buffer))

sent = 0
send_from = transfer._send_from


def send_until_stopped(peer: transfer.KeeperLink, copy: StoredCopy, at: int, length: int, way: str) -> None:
    global sent
    if stop_after and sent >= stop_after:
        peer.send(BytesFollow(length=length, way=way))
        peer.send_bytes(buffer[at : at + length // 2], way)
        sys.stdout.write("stopped\n")
        sys.stdout.flush()
        threading.Event().wait()
    send_from(peer, copy, at, length, way)
    sent += 1


transfer._send_from = send_until_stopped
server = transfer.ImageServer(copies, ACCESS, "served", lambda copy: None)
server.listen_at("127.0.0.1")
sys.stdout.write(f"{server.port}\n")
sys.stdout.flush()
threading.Event().wait()
