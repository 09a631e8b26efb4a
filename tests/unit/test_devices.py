"""Leaving a failing network device out: NCCL's filters, the user's own values, and when it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.agent.ranks import NetworkWorkaround, interfaces, rdma_ports
from jurymast.core.judges.devices import leave_out, lets_through, names, work_around
from jurymast.core.state.findings import HARDWARE, NETWORK, Finding, Verdict
from jurymast.core.state.messages import HealthFound
from support.sysfs_trees import Sysfs

PORTS = [f"mlx5_{number}:1" for number in (*range(4), 10)]
NETS = ["docker0", "eth0", "eth1", "lo"]


def finding(
    device: str, code: str = "ib-link-down", verdict: Verdict = Verdict.SUSPECT, kind: str = NETWORK
) -> Finding:
    return Finding(
        probe="infiniband", code=code, verdict=verdict, kind=kind, device=device, message=f"{device} is DOWN"
    )


def test_nothing_found_nothing_left_out() -> None:
    around = work_around([], PORTS, NETS, {"NCCL_IB_HCA": "mlx5"})
    assert (around.environment, around.devices, around.reason) == ({}, (), "")


def test_one_port() -> None:
    around = work_around([finding("mlx5_1:1")], PORTS, NETS, {})
    assert around.environment == {"NCCL_IB_HCA": "^=mlx5_1"}
    assert (around.devices, around.reason) == (("mlx5_1:1",), "mlx5_1:1 is DOWN")


def test_two_findings_on_one_port_and_one_on_another() -> None:
    found = [finding("mlx5_1:1"), finding("mlx5_1:1", "ib-flapping"), finding("mlx5_3:1", "ib-symbol-errors")]
    around = work_around(found, PORTS, NETS, {})
    assert around.environment == {"NCCL_IB_HCA": "^=mlx5_1,mlx5_3"}


def test_one_interface_and_what_nccl_would_not_have_used_anyway() -> None:
    around = work_around([finding("eth1", "net-link-down")], PORTS, NETS, {})
    assert around.environment == {"NCCL_SOCKET_IFNAME": "^=eth1,docker0,lo"}


def test_gloo_s_list_where_it_names_the_interface() -> None:
    found = [finding("eth1", "net-link-down")]
    both = {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0,eth1"}
    assert work_around(found, PORTS, NETS, both).environment == {
        "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    other = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert work_around(found, PORTS, NETS, other).environment == {}
    only = {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    around = work_around(found, PORTS, NETS, only)
    assert (around.environment, around.devices) == ({}, ())


@pytest.mark.parametrize(
    "other",
    [
        finding("mlx5_1:1", verdict=Verdict.BAD),  # no other one is up: nothing to go around by
        finding("mlx5_1:1", verdict=Verdict.UNKNOWN),
        finding("mlx5_1:1", verdict=Verdict.OK),
        finding("gpu1", "gpu-hot", kind=HARDWARE),
        finding("", "ib-link-down"),
    ],
)
def test_other_findings_change_nothing(other: Finding) -> None:
    assert work_around([other], PORTS, NETS, {}).environment == {}


@pytest.mark.parametrize(
    ("users", "failing", "wanted"),
    [
        ("", "mlx5_1:1", "^=mlx5_1"),
        ("^=mlx5_0", "mlx5_1:1", "^=mlx5_0,mlx5_1"),
        ("^=mlx5_1", "mlx5_1:1", ""),  # out already
        ("=mlx5_0,mlx5_1", "mlx5_1:1", "=mlx5_0"),
        ("=mlx5_1:1,mlx5_2:1", "mlx5_1:1", "=mlx5_2"),
        ("=mlx5_0", "mlx5_1:1", ""),  # never in
        ("=mlx5_1", "mlx5_1:1", ""),  # nothing would be left
        ("mlx5", "mlx5_10:1", "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"),
        ("mlx5_1", "mlx5_1:1", "=mlx5_10"),  # a prefix names both
        ("^mlx5_1", "mlx5_2:1", "=mlx5_0,mlx5_3"),
    ],
)
def test_the_user_s_own_filter_is_kept_to(users: str, failing: str, wanted: str) -> None:
    left = leave_out(users, [failing], PORTS)
    assert left == wanted
    if left:
        still = {name for name in PORTS if lets_through(left, name)}
        assert still == {name for name in PORTS if lets_through(users, name)} - {failing}


def test_one_port_of_two() -> None:
    assert leave_out("", ["mlx4_0:2"], ["mlx4_0:1", "mlx4_0:2"]) == "^=mlx4_0:2"


def test_all_ports_fail_none_is_left_out() -> None:
    found = [finding(port, "ib-symbol-errors") for port in PORTS]
    around = work_around(found, PORTS, NETS, {})
    assert (around.environment, around.devices) == ({}, ())


@pytest.mark.parametrize(
    ("users", "name", "through", "named"),
    [
        ("", "eth0", True, False),
        ("eth", "eth0", True, True),
        ("=eth", "eth0", False, False),
        ("^eth", "eth0", False, False),
        ("^=eth", "eth0", True, False),
        ("mlx5_0:1", "mlx5_0:1", True, True),
        ("mlx5_0:2", "mlx5_0:1", False, False),
        ("^=mlx5_0:2", "mlx5_0:1", True, False),
    ],
)
def test_filters_are_read_as_nccl_reads_them(users: str, name: str, through: bool, named: bool) -> None:
    assert (lets_through(users, name), names(users, name)) == (through, named)


def test_the_agent_reads_names_only(tmp_path: Path) -> None:
    tree = Sysfs(tmp_path, "infiniband")
    assert rdma_ports(tree.root) == [f"mlx5_{number}:1" for number in range(6)]
    assert interfaces(tree.root) == ["eth0", "eth1", "eth2", "lo"]
    assert (rdma_ports(tmp_path / "none"), interfaces(tmp_path / "none")) == ([], [])


def test_the_policy_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    told: list[HealthFound] = []
    for enabled, wanted in ((False, {}), (True, {"NCCL_IB_HCA": "^=mlx9_1"})):
        workaround = NetworkWorkaround(enabled, lambda: [finding("mlx9_1:1")], told.append)
        assert workaround.environment(2) == wanted
    assert [message.finding.verdict for message in told] == [Verdict.UNKNOWN]
    assert "do not use mlx9_1:1 (NCCL_IB_HCA=^=mlx9_1)" in told[0].finding.message
