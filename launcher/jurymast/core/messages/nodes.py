"""The nodes themselves: their health, their tests, and where their ranks stand when nothing moves."""

from __future__ import annotations

from jurymast.core.message import ToAgent, ToSupervisor
from jurymast.core.nodes.findings import Finding
from jurymast.core.nodes.flight import Entered
from jurymast.core.nodes.stacks import Stand
from jurymast.core.nodes.tests import Alone


class Look(ToAgent, frozen=True, kw_only=True):
    """Where do the ranks of `attempt` stand? `number` of the question."""

    attempt: int
    number: int


class Looked(ToSupervisor, frozen=True, kw_only=True):
    """The answer, by rank."""

    attempt: int
    number: int
    stands: dict[int, Stand]


class Stacks(ToSupervisor, frozen=True, kw_only=True):
    """Where ranks stood just before they were stopped; the fields are those of `core.events.StacksTaken`."""

    attempt: int
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    folder: str
    recorded: bool = False
    records: tuple[int, ...] = ()
    flights: tuple[Entered, ...] = ()


class Health(ToSupervisor, frozen=True, kw_only=True):
    """A finding on the node that says so."""

    finding: Finding


class LeaveVerdict(ToAgent, frozen=True, kw_only=True):
    """Tell the site that the node is bad, in the name of this Slurm `job`."""

    job: str
    finding: Finding


class VerdictLeft(ToSupervisor, frozen=True, kw_only=True):
    """`why` it could not be left, or ""."""

    why: str = ""


class TestAlone(ToAgent, frozen=True, kw_only=True):
    """Test the node by itself, within `limit_s` seconds."""

    limit_s: float


class TestPair(ToAgent, frozen=True, kw_only=True):
    """Test it with another node, which has the other `rank` of 0 and 1; both meet at the store of the first,
    under the pair's `name`."""

    name: str
    host: str
    port: int
    rank: int
    limit_s: float


class TestOver(ToAgent, frozen=True, kw_only=True):
    """End the test processes."""


class TestedAlone(ToSupervisor, frozen=True, kw_only=True):
    """`port` of the node's store for pairs; 0: none."""

    port: int
    found: Alone


class TestedPair(ToSupervisor, frozen=True, kw_only=True):
    """Seconds by measure, none when the test failed: `error`."""

    name: str
    times: dict[str, float]
    error: str = ""
