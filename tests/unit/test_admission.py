"""Who may wait for a handshake: the machine alone, at random and in the cases that matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.judges import admission
from jurymast.core.judges.admission import OF_ADDRESS_PER_S, OF_STRANGERS_PER_S, Admission, network_of

LIMIT_S = 5.0
STEPS = st.tuples(
    st.sampled_from(["connected", "connected", "connected", "proved", "left", "late"]),
    st.integers(0, 40),
    st.floats(0.0, 1.0),
)


@given(st.lists(STEPS, max_size=80), st.integers(1, 5), st.sets(st.integers(0, 3)))
def test_at_random_few_wait_and_each_ends(
    steps: list[tuple[str, int, float]], most: int, known: set[int]
) -> None:
    machine = Admission(most, LIMIT_S, map(str, known))
    waiting: dict[int, float] = {}
    now = 0.0
    for what, number, after_s in steps:
        now += after_s
        if what == "connected" and number not in waiting:
            waiting[number] = now
            for closed in machine.connected(number, str(number % 7), now):
                del waiting[closed]
        elif what == "proved":
            machine.proved(number)
            waiting.pop(number, None)
        elif what == "left":
            machine.left(number)
            waiting.pop(number, None)
        elif what == "late":
            for closed in machine.late(now):
                assert now - waiting.pop(closed) >= LIMIT_S
            assert all(now - since < LIMIT_S for since in waiting.values())
        assert set(machine._waiting) == set(waiting)
        machine.check()


def admitted(machine: Admission, address: str, per_s: int, seconds: int, first: int) -> int:
    """How many handshakes are begun, each of which ends at once."""
    count = 0
    for number in range(first, first + per_s * seconds):
        if machine.connected(number, address, (number - first) / per_s) != [number]:
            count += 1
        machine.left(number)
    return count


def test_a_flood_from_one_address_is_closed_before_it_costs_anything() -> None:
    begun = admitted(Admission(300, LIMIT_S), "10.0.0.9", 9000, 10, 0)
    assert begun <= 10 * OF_ADDRESS_PER_S + 400


def test_floods_from_many_addresses_leave_room_for_one_that_rarely_connects() -> None:
    machine = Admission(300, LIMIT_S)
    for number in range(100_000):
        machine.connected(number, f"10.0.1.{number % 50}", number / 50_000)
        machine.left(number)
    assert machine.connected(-1, "10.0.0.1", 2.0) == [], "a node that nobody has heard of"
    assert machine.connected(-2, "10.0.1.7", 2.0) == [-2]
    assert OF_STRANGERS_PER_S < 50 * OF_ADDRESS_PER_S


def test_a_flood_from_all_addresses_of_a_network_is_closed_as_well() -> None:
    """As IPv6 lets one machine have: each connection comes from another address."""
    machine, begun = Admission(300, LIMIT_S), 0
    for number in range(90_000):
        address = f"fd00:0:0:7:{number // 256:x}:{number % 256:x}::1"
        begun += machine.connected(number, address, number / 9000) != [number]
        machine.left(number)
    assert begun <= 10 * (OF_STRANGERS_PER_S + admission.NETWORK_PER_S) + 4 * 300 + admission.NETWORK_AT_ONCE
    assert machine.connected(-1, "fd00:0:0:8::1", 10.0) == [], "of another network"


def test_what_is_remembered_of_networks_is_bounded() -> None:
    """Who has thousands of networks connects from each, and more often than one is forgotten."""
    machine = Admission(300, LIMIT_S, [])
    for number in range(3 * admission.ADDRESSES_MAX):
        machine.connected(number, f"fd00:0:{number:x}:7::1", 0.0)
        machine.left(number)
        if number % 1000 == 0:
            machine.check()
    machine.check()


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", ""), ("fd00:1:2:3:4:5:6:7", "fd00:0001:0002:0003"), ("::1", "0000:0000:0000:0000"),
        ("fd00:0:0:7::1", "fd00:0000:0000:0007"), ("fe80::1%eth0", "fe80:0000:0000:0000"),
    ],
)  # fmt: skip
def test_the_network_of_an_address(address: str, network: str) -> None:
    assert network_of(address) == network


def test_known_addresses_come_first() -> None:
    machine = Admission(2, LIMIT_S, ["10.0.0.1"])
    assert machine.connected(1, "10.0.0.9", 0.0) == machine.connected(2, "10.0.0.8", 0.1) == []
    assert machine.connected(3, "10.0.0.1", 0.2) == [1], "the oldest stranger"
    assert machine.connected(4, "10.0.0.7", 0.3) == [2], "a stranger displaces strangers"
    assert machine.connected(5, "10.0.0.1", 0.4) == [4]
    assert machine.connected(6, "10.0.0.9", 0.5) == [6], "and never one of the run"
    assert machine.connected(7, "10.0.0.1", 0.6) == [3], "those of one address displace each other"


def test_an_address_is_known_once_the_secret_was_proved_from_there() -> None:
    machine = Admission(300, LIMIT_S)
    assert machine.connected(0, "10.0.0.1", 0.0) == []
    machine.proved(0)
    assert admitted(machine, "10.0.0.1", 9000, 10, 1) == 90_000


def test_few_addresses_are_remembered() -> None:
    machine = Admission(300, LIMIT_S)
    for number in range(3 * admission.ADDRESSES_MAX):
        machine.connected(number, f"fe80::{number:x}", number / 1e6)
        machine.left(number)
        assert len(machine._rates) <= admission.ADDRESSES_MAX
    for number in range(200):
        machine.connected(number, f"10.1.0.{number}", 1000.0 + number)
        machine.left(number)
    assert len(machine._rates) < admission.ADDRESSES_MAX, "what is not used any more goes"
