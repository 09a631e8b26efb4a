"""What GPUs used in a run: never more than they did, whoever takes over and whatever starts anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.judges.energy import EnergyUsed
from jurymast.report.cost import energy_json, energy_text


@dataclass
class Counted:
    """EnergyUsed of two nodes, and all that they ever counted."""

    shown: dict[str, float] = field(default_factory=lambda: {"a": 100.0, "b": 0.0})
    used: float = 0.0


@given(
    st.lists(st.tuples(st.sampled_from(["use", "look", "anew", "take over"]), st.sampled_from("ab"))),
    st.integers(0, 1000),
)
def test_no_more_is_counted_than_was_used(happens: list[tuple[str, str]], joules: int) -> None:
    nodes, energy = Counted(), EnergyUsed()
    for what, node in happens:
        if what == "use":
            nodes.shown[node] += joules
            nodes.used += joules
        elif what == "look":
            energy.take(node, nodes.shown[node])
        elif what == "anew":
            nodes.shown[node] = 0.0
        else:  # the next one knows the sum from the journal
            energy = EnergyUsed(energy.total)
        assert energy.total <= nodes.used


def test_all_is_counted_while_nothing_starts_anew() -> None:
    energy = EnergyUsed(7.0)
    for node, shows in (("a", 100.0), ("b", 0.0), ("a", 150.0), ("b", 20.0), ("a", 150.0)):
        energy.take(node, shows)
    assert energy.total == 77.0


def test_a_counter_that_is_read_wrongly_once_adds_nothing() -> None:
    """A GPU's counts since its driver was loaded, perhaps for months."""
    energy = EnergyUsed()
    for shows in (5e9, 5e9 + 10.0, 0.0, 5e9 + 20.0, 5e9 + 15.0, 5e9 + 30.0):
        energy.take("gpu", shows)
    assert energy.total == 30.0
    for shows in (40.0, 60.0):  # its driver was loaded anew
        energy.take("gpu", shows)
    assert energy.total == 90.0


def test_energy_has_the_power_of_a_gpu_while_it_was_allocated() -> None:
    found = energy_json(joules=32 * 600.0 * 3600.0, gpu_seconds=32 * 3600.0)
    assert found is not None
    assert found == {"kwh": pytest.approx(19.2), "gpu_watts": pytest.approx(600.0)}
    assert energy_text(found) == "at least 19.2 kWh, 600 W a GPU on average (by the GPUs' counters)"


def test_without_a_counter_nothing_is_told() -> None:
    assert energy_json(joules=0.0, gpu_seconds=32 * 3600.0) is None
    found = energy_json(joules=36_000.0, gpu_seconds=0.0)
    assert found is not None
    assert found["gpu_watts"] is None
    assert energy_text(found) == "at least 0.010 kWh (by the GPUs' counters)"
