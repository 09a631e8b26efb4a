"""Decides which connections may wait until their other end has proved that it knows the run's secret.

Everybody on the cluster's network can connect, as often as they like. Three rules keep them from delaying the
run's own connections:

- An address is *known* if it is one of the allocation, or if the secret was proved from there. Each other
  address, and all of them together, may begin only so many handshakes per second. What exceeds this is closed
  before anything is done for it. An address that rarely connects does not wait for those that often do, but
  only so many of one network of IPv6 count as such: who has one of its addresses may have them all.
- Only so many handshakes are under way at once. The newest displaces the oldest of an unknown address or of
  its own; unknown addresses displace no known ones.
- A handshake that takes too long ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Address
from itertools import islice

# Handshakes per second that are begun for one unknown address, and for all of them: a small part of a core.
OF_ADDRESS_PER_S = 500.0
OF_STRANGERS_PER_S = 2000.0
# What an unknown address may begin whatever others do: an agent or a command connects once in a while.
RARELY_PER_S, RARELY_AT_ONCE = 1.0, 16
# And what all addresses of one network of IPv6 may begin in this way.
NETWORK_PER_S, NETWORK_AT_ONCE = 100.0, 256
NETWORK_CHARACTERS = len("2001:0db8:0000:0000")
# Addresses whose recent handshakes are remembered, and networks.
ADDRESSES_MAX = 10_000


class Rate:
    """So many per second, and `burst` at once after a while without any."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._each_s, self._ahead_s = 1.0 / per_s, burst / per_s
        self._spent_until = 0.0

    def allows(self, now: float) -> bool:
        """Return whether one more is allowed at `now`, in seconds, and count it if so."""
        begins = max(self._spent_until, now)
        if begins + self._each_s - now > self._ahead_s:
            return False
        self._spent_until = begins + self._each_s
        return True

    def is_unused(self, now: float) -> bool:
        return self._spent_until <= now


def network_of(address: str) -> str:
    """The first half of an address of IPv6, which is all that a network hands out; "" for one of IPv4."""
    if ":" not in address:
        return ""
    return IPv6Address(address.partition("%")[0]).exploded[:NETWORK_CHARACTERS]


class Admission:
    """The unproven connections of one server. The caller names each by a number that no other has at the same
    time; times are in seconds, of any clock that only goes forward."""

    def __init__(self, waiting_max: int, limit_s: float, known: Iterable[str] = ()) -> None:
        self._waiting_max, self._limit_s = waiting_max, limit_s
        self._known = dict.fromkeys(known)
        self._waiting: dict[int, tuple[str, float, bool]] = {}  # oldest first: address, since when, known
        self._unknown: dict[int, None] = {}  # those of unknown addresses, oldest first
        self._of_address: dict[str, dict[int, None]] = {}
        self._strangers = Rate(OF_STRANGERS_PER_S, 4 * waiting_max)
        self._rates: dict[str, tuple[Rate, Rate]] = {}  # of unknown addresses, the least recently used first
        self._networks: dict[str, Rate] = {}  # of IPv6, as well

    def know(self, addresses: Iterable[str]) -> None:
        """Prefer connections from these addresses from now on."""
        for address in addresses:
            self._known[address] = None
            self._rates.pop(address, None)

    def connected(self, number: int, address: str, now: float) -> list[int]:
        """Return the connections to close, which may be this new one."""
        known = address in self._known
        if not known and not self._allowed(address, now):
            return [number]
        displaced: list[int] = []
        if len(self._waiting) >= self._waiting_max:
            # Agents prove themselves within milliseconds, so the oldest is probably a stranger.
            own = self._of_address.get(address, {})
            among = self._unknown or own or self._waiting if known else own or self._unknown
            if not among:
                return [number]
            displaced = [next(iter(among))]
            self.left(displaced[0])
        self._waiting[number] = address, now, known
        self._of_address.setdefault(address, {})[number] = None
        if not known:
            self._unknown[number] = None
        return displaced

    def proved(self, number: int) -> None:
        """The other end of this connection knows the secret: it waits no more, and its address is known."""
        if number in self._waiting:
            self.know([self._waiting[number][0]])
            self.left(number)

    def left(self, number: int) -> None:
        """This connection is closed."""
        address, _, known = self._waiting.pop(number, ("", 0.0, True))
        if not known:
            del self._unknown[number]
        if (neighbours := self._of_address.get(address)) is not None:
            neighbours.pop(number, None)
            if not neighbours:
                del self._of_address[address]

    def late(self, now: float) -> list[int]:
        """Return the connections whose time is over, oldest first; the caller closes them."""
        found = []
        for number, (_, since, _) in self._waiting.items():
            if now - since < self._limit_s:
                break
            found.append(number)
        for number in found:
            self.left(number)
        return found

    def _allowed(self, address: str, now: float) -> bool:
        """Whether an unknown address may begin another handshake."""
        rates = self._rates.pop(address, None)
        if rates is None:
            rates = Rate(RARELY_PER_S, RARELY_AT_ONCE), Rate(OF_ADDRESS_PER_S, self._waiting_max)
        self._rates[address] = rarely, often = rates
        for oldest in list(islice(self._rates, 2)):  # so that all that are unused go, sooner or later
            unused = all(rate.is_unused(now) for rate in self._rates[oldest])
            if oldest != address and (unused or len(self._rates) > ADDRESSES_MAX):
                del self._rates[oldest]
        if rarely.allows(now) and self._network_allows(address, now):
            return True
        return often.allows(now) and self._strangers.allows(now)

    def _network_allows(self, address: str, now: float) -> bool:
        if (network := network_of(address)) == "":
            return True
        rate = self._networks.pop(network, None) or Rate(NETWORK_PER_S, NETWORK_AT_ONCE)
        self._networks[network] = rate
        for oldest in list(islice(self._networks, 2)):
            unused = self._networks[oldest].is_unused(now)
            if oldest != network and (unused or len(self._networks) > ADDRESSES_MAX):
                del self._networks[oldest]
        return rate.allows(now)

    def check(self) -> None:
        """What always holds."""
        assert len(self._waiting) <= self._waiting_max
        assert len(self._rates) <= ADDRESSES_MAX
        assert len(self._networks) <= ADDRESSES_MAX
        assert set(self._unknown) == {n for n, (_, _, known) in self._waiting.items() if not known}
        assert {n for found in self._of_address.values() for n in found} == set(self._waiting)
        assert all(self._of_address.values())
