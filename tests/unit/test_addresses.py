"""Where a node listens: at the address that others are told, and no store of torch's before it is needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, cast

import psutil
import pytest

from jurymast.agent.real_io import local_address
from jurymast.cluster.allocation import announced_by, listen, loopback
from jurymast.core.state.evidence import SparedRank
from jurymast.core.state.messages import Launch
from jurymast.wire import addresses
from jurymast.wire.addresses import ADDRESS_VARIABLE, is_up, listen_at, listen_at_each, listens_at_all
from jurymast.worker.agent_pipe import AgentPipe

HOME, ANOTHER = "127.0.0.1", "127.0.0.2"  # addresses of this machine
# Of a network that is kept for documents (RFC 5737).
NOWHERE = "192.0.2.1"
# What a client of torch's store says first, and then asks for the value of a key.
HELLO = b"\x09\x85\x3c\x13\x0c" + b"\x01\x01\x00\x00\x00\x00\x00\x00\x00a"


def test_only_the_given_address_is_listened_at() -> None:
    assert is_up(HOME)
    with listen_at(HOME) as listener:
        host, port = listener.getsockname()
        assert host == HOME
        for name, addresses in psutil.net_if_addrs().items():
            for entry in addresses:
                if entry.family == socket.AF_INET and entry.address != HOME:
                    with pytest.raises(OSError):
                        socket.create_connection((entry.address, port), 5.0)
                    assert name


def test_an_address_that_is_gone_keeps_no_node_out() -> None:
    assert not is_up(NOWHERE)
    with listen_at(NOWHERE) as listener:
        assert listens_at_all(listener)


def test_a_supervisor_listens_at_each_address_that_is_announced_and_at_no_other() -> None:
    homes = ["127.0.0.2", "127.0.0.3", "127.0.0.2", NOWHERE]
    with ExitStack() as held:
        listeners = [held.enter_context(one) for one in listen_at_each(homes)]
        assert [one.getsockname()[0] for one in listeners] == ["127.0.0.2", "127.0.0.3"]
        (port,) = {one.getsockname()[1] for one in listeners}
        socket.create_connection(("127.0.0.3", port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.4", port), 5.0)
        assert announced_by(listeners) == ["127.0.0.2", "127.0.0.3", socket.gethostname()]


def test_a_port_that_another_has_at_one_of_the_addresses_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.3", 0)) as other, ExitStack() as held:
        create, first = socket.create_server, [other.getsockname()[1]]

        def first_the_same(address: tuple[str, int], **how: Any) -> socket.socket:
            host, port = address
            return create((host, port or (first.pop() if first else 0)), **how)

        monkeypatch.setattr(socket, "create_server", first_the_same)
        listeners = [held.enter_context(one) for one in listen_at_each(["127.0.0.2", "127.0.0.3"])]
        assert len(listeners) == 2
    assert not first


def test_a_supervisor_without_an_address_listens_at_all_and_one_of_a_local_run_at_home() -> None:
    (everywhere,), (home,) = listen_at_each([NOWHERE]), listen("local")
    with everywhere, home:
        assert listens_at_all(everywhere)
        assert everywhere.getsockname()[0] not in announced_by([everywhere])
        assert home.getsockname()[0] == HOME
        assert announced_by([home]) == [HOME]


def test_who_listens_at_all_addresses_is_reached_by_both_kinds() -> None:
    with listen_at(NOWHERE) as listener:
        port = listener.getsockname()[1]
        for address in (HOME, *(["::1"] if is_up("::1") else [])):
            socket.create_connection((address, port), 5.0).close()


def test_addresses_of_ipv6_are_listened_at_as_those_of_ipv4() -> None:
    if not is_up("::1"):
        pytest.skip("this machine has no IPv6")
    with listen_at("::1") as one, ExitStack() as held:
        assert one.getsockname()[0] == "::1"
        assert local_address("::1", one.getsockname()[1]) == "::1"
        both = [held.enter_context(each) for each in listen_at_each(["::1", HOME, "2001:db8::1"])]
        assert [each.getsockname()[0] for each in both] == ["::1", HOME]
        assert len({each.getsockname()[1] for each in both}) == 1


def test_a_local_run_without_ipv4_listens_at_home_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jurymast.cluster.allocation.is_up", lambda address: address == "::1")
    assert loopback() == "::1"


@pytest.mark.torch
def test_a_node_that_is_tested_listens_where_the_others_are_told_and_nowhere_else() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "jurymast.preflight", "0"], env={**os.environ, ADDRESS_VARIABLE: HOME},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as tested:  # fmt: skip
        assert tested.stdout is not None
        port = json.loads(tested.stdout.readline())["port"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((ANOTHER, port), 5.0)
        socket.create_connection((HOME, port), 5.0).close()
        tested.kill()


class Pipe:
    """An agent that launches an attempt with this rank here, and rank 0's store at `master`."""

    def __init__(self, rank: int, master: int) -> None:
        self._rank, self._master = rank, master
        self.port = 0

    def next_launch(self, port: int, spared: tuple[SparedRank, ...]) -> Launch:
        self.port = port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((ANOTHER, port), 5.0)
        with socket.create_connection((HOME, port), 5.0) as stranger:
            stranger.sendall(HELLO)
            stranger.settimeout(0.2)
            with pytest.raises(TimeoutError):
                stranger.recv(1)
        master = self._master if self._rank else port
        return Launch(
            attempt=1, rank=self._rank, world=2, master_address=HOME, master_port=master, mtbf_s=1.0,
            cold=False, saved=0, environment={},
        )  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_is_made_only_where_rank_0_is(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody who comes before is answered."""
    from torch.distributed import TCPStore

    from jurymast.worker.rendezvous import AgentRendezvous

    monkeypatch.setenv(ADDRESS_VARIABLE, HOME)
    elsewhere = TCPStore(HOME, 0, is_master=True, wait_for_workers=False)
    pipe = Pipe(rank, elsewhere.port)
    here = AgentRendezvous(cast(AgentPipe, pipe), "run")
    here.next_rendezvous()
    assert (here.store is None) == bool(rank), "a node waits for another one"
    here.reach_store()
    assert here.store is not None
    here.store.set("a", "b")
    if rank == 0:
        assert TCPStore(HOME, pipe.port, is_master=False, wait_for_workers=False).get("a") == b"b"
    else:
        assert elsewhere.get("a") == b"b"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOME, pipe.port), 5.0)


def test_an_address_is_told_as_one_can_listen_at_it() -> None:
    with (
        addresses.listen_at_all() as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])),
    ):
        accepted, peer = listener.accept()
        with accepted:
            ours = addresses.plain(accepted.getsockname()[0])
            assert (ours, addresses.plain(peer[0])) == ("127.0.0.1", "127.0.0.1")
            addresses.listen_at(ours).close()
    assert [addresses.plain(address) for address in ("10.0.0.1", "::1", "fe80::ffff:1")] == [
        "10.0.0.1", "::1", "fe80::ffff:1",
    ]  # fmt: skip
