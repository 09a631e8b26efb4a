"""A node's keeper in a process of its own, without torch, as in the agent; and what it is held against: a
plain TCP transfer and a plain write of the same bytes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.tiers.child import Message, first_line, say
from jurymast.agent.storage_processes import StorageProcesses, lent_image
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.keeper.manifest import PAGE_VARIABLE
from jurymast.keeper.real_io import RealKeeperIo
from jurymast.storage.orders import StorageFailed, WriteLocal
from jurymast.wire.protocol import GCM, GMAC, Access
from jurymast.worker import link

LOOK_EVERY_S = 0.1
RAW_BLOCK_BYTES = 16 << 20
WRITE_BYTES = 16 << 20
POPULATE_WRITE = 23


WAYS = (GMAC, GCM)


class Chosen(Access):
    """Bytes are protected in the way that was asked for last; until then in any."""

    chosen: tuple[str, ...] = WAYS

    @property
    def ways(self) -> tuple[str, ...]:
        return Chosen.chosen


class Node:
    """Carries out the orders of the benchmark, which stands in for the supervisor."""

    def __init__(self, config: Message) -> None:
        self._name = str(config["name"])
        self._local = Path(config["local"]) if config.get("local") else None
        access = Chosen(bytes.fromhex(config["secret"]))
        self._keeper = Keeper(
            RealKeeperIo(access, self._name, int(config["ranks"])), self._tell, local_root=self._local
        )
        self._storage = StorageProcesses()
        self._events, self._events_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._window = memoryview(b"")

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        await self._keeper.start()
        self._keeper.listen_at("127.0.0.1")
        loop.add_reader(self._events, self._hear)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        looking = asyncio.ensure_future(self._look())
        root = f"/proc/{os.getpid()}/fd"
        environment = {
            PAGE_VARIABLE: self._keeper.io.page_path,
            link.EVENTS_VARIABLE: f"{root}/{self._events_in}",
        }
        say({"said": "started", "port": self._keeper.port, "environment": environment})
        while line := await reader.readline():
            order = json.loads(line)
            try:
                say({"said": "done", **(await self._obey(order) or {})})
            except Exception as error:
                say({"said": "failed", "why": f"{order['do']}: {type(error).__name__}: {error}"})
        looking.cancel()
        await self._storage.close()

    async def _look(self) -> None:
        while True:
            self._keeper.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def _hear(self) -> None:
        for line in os.read(self._events, 1 << 16).splitlines():
            event = json.loads(line)
            if event["event"] == within.Image.__name__:
                self._keeper.image_published(event["local_rank"], event["slot"], event["stall_s"])

    def _tell(self, message: msg.FromKeeper) -> None:
        say({**msgspec.to_builtins(message), "at": time.monotonic()})

    async def _obey(self, order: Message) -> Message | None:
        keeper, do = self._keeper, order["do"]
        if do == "launch":
            told = order.get("restore")
            restore = msgspec.convert(told, msg.Restore, str_keys=True) if told else None
            keeper.launch(order["attempt"], order["ranks"], len(order["ranks"]), restore)
        elif do == "committed":
            keeper.obey(msg.Committed(step=order["step"], attempt=order["attempt"]))
        elif do == "replicate":
            keeper.obey(msgspec.convert(order, msg.Replicate))
        elif do == "protect":
            Chosen.chosen = (order["way"],) if order["way"] else WAYS
        elif do == "forget":
            keeper.obey(msg.Void(step=order["step"], attempt=order["attempt"]))
        elif do == "write":
            return await self._write(order)
        elif do == "write plainly":
            return await self._plain_write(order)
        elif do == "raw serve":
            loans = await self._lend(order)
            port = self._raw_serve(loans)
            for loan in loans:  # what it sends may change then, which matters to nobody
                loan.give_back()
            return {"port": port}
        elif do == "raw pull":
            return await asyncio.to_thread(self._raw_pull, order)
        else:
            raise ValueError(f"no such order: {do}")
        return None

    # ---- disk

    async def _lend(self, order: Message) -> list[Loan]:
        loans = []
        for rank in order["ranks"]:
            loan = await self._keeper.lend(order["step"], order["attempt"], rank)
            if loan is None:
                raise LookupError(f"the image of rank {rank} is not here")
            loans.append(loan)
        return loans

    async def _write(self, order: Message) -> Message:
        """As `agent.storage_processes` does it."""
        began = time.monotonic()
        loans = await self._lend(order)
        images = tuple(map(lent_image, loans))
        write = WriteLocal(root=order["root"], step=order["step"], attempt=order["attempt"], images=images)
        answer = await self._storage.carry_out(write)
        seconds = time.monotonic() - began
        for loan in loans:
            loan.give_back()
        if isinstance(answer, StorageFailed):
            raise OSError(first_line(answer.why))
        return {"seconds": seconds, "bytes": answer.bytes}

    async def _plain_write(self, order: Message) -> Message:
        loans = await self._lend(order)
        try:
            return {"seconds": await asyncio.to_thread(_write, loans, order["path"])}
        finally:
            for loan in loans:
                loan.give_back()

    # ---- TCP

    def _raw_serve(self, loans: list[Loan]) -> int:
        """Sends to whoever connects the stretch of an image that it asks for: "number at length\\n"."""
        listener = socket.create_server(("127.0.0.1", 0))
        files = [os.open(loan.path, os.O_RDONLY | os.O_CLOEXEC) for loan in loans]

        def send(connection: socket.socket) -> None:
            with connection:
                while request := _line(connection):
                    number, at, length = map(int, request.split())
                    end = at + length
                    while at < end:
                        at += os.sendfile(connection.fileno(), files[number], at, end - at)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=send, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    def _raw_pull(self, order: Message) -> Message:
        """Each stream takes its share of each image, into memory that was touched before."""
        if len(self._window) != order["window_bytes"]:
            self._window = _touched(order["window_bytes"])
        streams, sizes = order["streams"], order["sizes"]
        threads = []
        began = time.monotonic()
        for number, size in enumerate(sizes):
            for stream in range(streams):
                start, end = size * stream // streams, size * (stream + 1) // streams
                work = (order["port"], number, start, end - start, self._window)
                threads.append(threading.Thread(target=_raw_receive, args=work))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.monotonic() - began}


def _write(loans: list[Loan], target: str) -> float:
    """Seconds for the images' bytes to one file, in large writes, with fsync at the end."""
    began = time.monotonic()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    for loan in loans:
        with open(loan.path, "rb") as file:
            image = memoryview(mmap.mmap(file.fileno(), loan.manifest.size_bytes, prot=mmap.PROT_READ))
        while image:
            image = image[os.write(descriptor, image[:WRITE_BYTES]) :]
    os.fsync(descriptor)
    os.close(descriptor)
    return time.monotonic() - began


def _raw_receive(port: int, number: int, at: int, length: int, window: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{number} {at} {length}\n".encode())
        place = at % len(window)
        while length:
            place = 0 if place >= len(window) else place
            block = window[place : place + min(RAW_BLOCK_BYTES, length)]
            got = connection.recv_into(block, len(block), socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the other side ended")
            place, length = place + got, length - got


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(100)
        if not piece:
            return b""
        data += piece
    return data


def _touched(size: int) -> memoryview:
    buffer = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    populate: Callable[..., Any] = ctypes.CDLL(None).madvise
    populate(ctypes.c_void_p(address), ctypes.c_size_t(size), POPULATE_WRITE)
    return memoryview(buffer)


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as orders:  # nothing may be read ahead of the loop
        config = json.loads(orders.readline())
    asyncio.run(Node(config).serve())


if __name__ == "__main__":
    main()
