"""Lists of hosts as Slurm writes them."""

from __future__ import annotations

import pytest

from jurymast.core.state.texts import compressed


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("n1", "n1"),
        ("n1 n2 n3", "n[1-3]"),
        ("n1 n3", "n[1,3]"),
        ("n2 n1", "n[2,1]"),
        ("n09 n10 n12 m7", "n[09-10,12],m7"),
        ("n9 n10", "n[9-10]"),
        ("n099 n100", "n[099-100]"),
        ("login gpu-a gpu-b", "login,gpu-a,gpu-b"),
        ("a b1 b2 a", "a,b[1-2],a"),
        ("", ""),
    ],
)
def test_hosts_in_their_order(hosts: str, text: str) -> None:
    assert compressed(hosts.split()) == text


def test_thousands_of_nodes_are_a_short_text() -> None:
    hosts = [f"node{number:05d}" for number in range(12_500)]
    hosts[70] = "node20000"
    assert compressed(hosts) == "node[00000-00069,20000,00071-12499]"
