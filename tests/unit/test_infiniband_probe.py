"""The infiniband probe, over trees of files as the kernel shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.core.state.findings import NETWORK, Finding, Verdict
from jurymast.health.probe import Context, Probe
from jurymast_infiniband import InfinibandProbe
from support.sysfs_trees import Sysfs

PORT = "class/infiniband/{}/ports/1"
UNUSED = ("ib-unused", "mlx5_4:1", Verdict.UNKNOWN)
Said = tuple[str, str, Verdict]


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys", "infiniband")


@pytest.fixture
def interfaces(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys", "interfaces")


def looking(sysfs: Sysfs, **users: str) -> InfinibandProbe:
    return InfinibandProbe(Context(), sysfs.root, users)


def said(found: list[Finding] | tuple[Finding, ...]) -> list[Said]:
    assert {finding.kind for finding in found} <= {NETWORK}
    return sorted((finding.code, finding.device, finding.verdict) for finding in found)


def at(probe: InfinibandProbe, *times: float) -> list[Said]:
    """What the last of these looks said, seconds after the job's start."""
    return said([*[probe.look(1e9 + t) for t in times][-1]])


def test_it_is_a_probe(sysfs: Sysfs) -> None:
    assert isinstance(looking(sysfs), Probe)
    assert looking(sysfs).anything_to_see()


def test_a_machine_without_any_of_it_has_nothing_to_see(tmp_path: Path) -> None:
    assert not InfinibandProbe(Context(), tmp_path, {}).anything_to_see()


def test_what_was_there_before_the_job_is_not_this_run_s(sysfs: Sysfs) -> None:
    """Lifetime counters and an empty socket; a virtual function is not even looked at."""
    probe = looking(sysfs)
    assert at(probe, 0, 10, 20) == [UNUSED]
    assert "when the job started" in probe.look(1e9 + 30)[0].message


def down(sysfs: Sysfs, device: str) -> None:
    sysfs.set(f"{PORT.format(device)}/state", "1: DOWN")
    sysfs.set(f"{PORT.format(device)}/phys_state", "2: Polling")
    sysfs.set(f"{PORT.format(device)}/rate", "10 Gb/sec (4X SDR)")


def test_a_port_that_goes_down_is_suspect_while_another_is_up(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    down(sysfs, "mlx5_1")
    assert at(probe, 10) == [UNUSED], "shorter than ib-down-s"
    found = probe.look(1e9 + 20)
    assert said([*found]) == [("ib-link-down", "mlx5_1:1", Verdict.SUSPECT), UNUSED]
    (finding,) = (each for each in found if each.device == "mlx5_1:1")
    assert finding.message == "mlx5_1:1: is DOWN (Polling); the ranks can use mlx5_0:1, mlx5_2:1"
    assert finding.at == 1e9 + 10


def test_the_last_one_of_its_kind_is_bad(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set("class/net/eth1/operstate", "down")  # the only RoCE port: InfiniBand is no way for it
    assert at(probe, 10, 20) == [("ib-link-down", "mlx5_3:1", Verdict.BAD), UNUSED]
    for device in ("mlx5_0", "mlx5_1", "mlx5_2"):
        down(sysfs, device)
    found = at(probe, 30, 40)
    assert [each for each in found if each[2] is Verdict.BAD] == [
        ("ib-link-down", f"mlx5_{number}:1", Verdict.BAD) for number in range(4)
    ]


def test_a_port_that_comes_back_is_well_again(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    down(sysfs, "mlx5_1")
    at(probe, 10, 20)
    sysfs.set(f"{PORT.format('mlx5_1')}/state", "4: ACTIVE")
    sysfs.set(f"{PORT.format('mlx5_1')}/rate", "400 Gb/sec (4X NDR)")
    assert at(probe, 30) == [UNUSED]
    down(sysfs, "mlx5_1")
    assert at(probe, 40) == [UNUSED], "a new outage has its own time"


def test_a_device_that_is_gone_altogether(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.remove("class/infiniband/mlx5_2")
    assert at(probe, 10, 20) == [("ib-device-gone", "mlx5_2:1", Verdict.SUSPECT), UNUSED]


def test_an_unused_port_that_comes_up_counts_from_then_on(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{PORT.format('mlx5_4')}/state", "4: ACTIVE")
    sysfs.set("class/net/eth2/operstate", "up")
    assert at(probe, 10) == []
    sysfs.set("class/net/eth2/operstate", "down")
    assert at(probe, 20, 30) == [("ib-link-down", "mlx5_4:1", Verdict.SUSPECT)]


def test_a_port_that_the_user_names_is_the_run_s_from_the_start(sysfs: Sysfs) -> None:
    probe = looking(sysfs, NCCL_IB_HCA="=mlx5_3,mlx5_4")
    assert at(probe, 0, 10) == [("ib-link-down", "mlx5_4:1", Verdict.SUSPECT)]
    down(sysfs, "mlx5_1")
    assert at(probe, 20, 30) == [("ib-link-down", "mlx5_4:1", Verdict.SUSPECT)], "ruled out by the user"


def test_a_state_that_cannot_be_read_is_no_verdict(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.remove(f"{PORT.format('mlx5_1')}/state")
    assert at(probe, 10, 20) == [UNUSED, ("not-observable", "mlx5_1:1", Verdict.UNKNOWN)]


def test_a_lower_rate_than_at_the_start(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{PORT.format('mlx5_0')}/rate", "100 Gb/sec (1X NDR)")
    assert ("ib-slow", "mlx5_0:1", Verdict.SUSPECT) in at(probe, 10)
    assert any("runs at 100 Gb/s, down from 400" in finding.message for finding in probe.look(1e9 + 20))


@pytest.mark.parametrize(
    ("counter", "code", "under", "over", "window_s"),
    [
        ("symbol_error", "ib-symbol-errors", 1439, 1, 3600),
        ("link_downed", "ib-flapping", 2, 1, 3600),
        ("link_error_recovery", "ib-retraining", 4, 1, 60),
        ("local_link_integrity_errors", "ib-integrity-errors", 0, 1, 3600),
        ("port_rcv_errors", "ib-receive-errors", 599, 1, 60),
    ],
)
def test_counters_are_judged_by_what_they_gain_within_their_window(
    sysfs: Sysfs, counter: str, code: str, under: int, over: int, window_s: float
) -> None:
    path = f"{PORT.format('mlx5_0')}/counters/{counter}"
    before = int((sysfs.root / path).read_text())
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(path, str(before + under))
    assert at(probe, 10) == [UNUSED]
    sysfs.set(path, str(before + under + over))
    assert at(probe, 20) == [(code, "mlx5_0:1", Verdict.SUSPECT), UNUSED]
    assert at(probe, 20 + window_s) == [UNUSED], "long enough ago"


def test_a_counter_that_somebody_reset_counts_on(sysfs: Sysfs) -> None:
    path = f"{PORT.format('mlx5_0')}/counters/symbol_error"
    sysfs.set(path, "4000000000")
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(path, "0")
    assert at(probe, 10) == [UNUSED]
    sysfs.set(path, "1440")
    assert ("ib-symbol-errors", "mlx5_0:1", Verdict.SUSPECT) in at(probe, 20)


def test_a_roce_port_flaps_with_its_interface(sysfs: Sysfs) -> None:
    """carrier_changes counts down and up: three times down is six."""
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set("class/net/eth1/carrier_changes", str(1 + 5))
    assert ("ib-flapping", "mlx5_3:1", Verdict.SUSPECT) in at(probe, 10)
    sysfs.set("class/net/eth1/carrier_changes", "1")
    fresh = looking(sysfs)
    at(fresh, 0)
    sysfs.set("class/net/eth1/carrier_changes", str(1 + 4))
    assert at(fresh, 10) == [UNUSED]


def test_the_policy_s_limit_counts(sysfs: Sysfs) -> None:
    probe = InfinibandProbe(Context(thresholds={"ib-down-s": 0.0, "ib-link-flaps": 1}), sysfs.root, {})
    at(probe, 0)
    down(sysfs, "mlx5_1")
    sysfs.set(f"{PORT.format('mlx5_0')}/counters/link_downed", "3")
    assert at(probe, 1) == [
        ("ib-flapping", "mlx5_0:1", Verdict.SUSPECT), ("ib-link-down", "mlx5_1:1", Verdict.SUSPECT), UNUSED,
    ]  # fmt: skip


def test_interfaces_of_a_node_without_rdma(interfaces: Sysfs) -> None:
    """Those on PCI that are used by themselves: no part of a bond, nothing on USB, nothing virtual."""
    probe = looking(interfaces)
    assert at(probe, 0) == [("net-unused", "eth2", Verdict.UNKNOWN)]
    for name in ("eth1", "eth3", "enx0", "docker0", "bond0"):
        interfaces.set(f"class/net/{name}/operstate", "down")
    found = at(probe, 10, 20)
    assert found == [("net-link-down", "eth1", Verdict.SUSPECT), ("net-unused", "eth2", Verdict.UNKNOWN)]
    interfaces.set("class/net/eth0/operstate", "down")
    assert ("net-link-down", "eth0", Verdict.BAD) in at(probe, 30, 40)


@pytest.mark.parametrize(
    ("users", "watched"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth1"}, ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, ["eth0"]),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^eth0,docker"}, ["eth1"]),
        ({}, ["eth0", "eth1"]),
    ],
)
def test_interfaces_that_the_user_names(interfaces: Sysfs, users: dict[str, str], watched: list[str]) -> None:
    probe = looking(interfaces, **users)
    at(probe, 0)
    for name in ("eth0", "eth1"):
        interfaces.set(f"class/net/{name}/operstate", "down")
    assert [device for code, device, _ in at(probe, 10, 20) if code == "net-link-down"] == watched


def test_beside_rdma_only_named_interfaces_matter(sysfs: Sysfs) -> None:
    for users, watched in (({}, []), ({"NCCL_SOCKET_IFNAME": "=eth0"}, ["eth0"])):
        sysfs.set("class/net/eth0/operstate", "up")
        probe = looking(sysfs, **users)
        at(probe, 0)
        sysfs.set("class/net/eth0/operstate", "down")
        found = at(probe, 10, 20)
        assert [device for code, device, _ in found if code.startswith("net-")] == watched


@pytest.mark.parametrize(
    ("rate", "gained", "found"),
    [
        ("10 Gb/sec (4X SDR)", 36, True),
        ("10 Gb/sec (4X SDR)", 35, False),
        ("100 Gb/sec (4X EDR)", 359, False),
        ("100 Gb/sec (4X EDR)", 360, True),
        ("800 Gb/sec (4X XDR)", 2879, False),
        ("800 Gb/sec (4X XDR)", 2880, True),
        ("", 60000, False),  # at an unknown speed the error rate is unknown
    ],
)
def test_symbol_errors_are_judged_by_the_link_s_speed(
    sysfs: Sysfs, rate: str, gained: int, found: bool
) -> None:
    """3.6 errors an hour for each Gb/s are a bit error rate of 1e-12."""
    sysfs.set(f"{PORT.format('mlx5_0')}/rate", rate)
    sysfs.set(f"{PORT.format('mlx5_0')}/counters/symbol_error", "0")
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{PORT.format('mlx5_0')}/counters/symbol_error", str(gained))
    assert (("ib-symbol-errors", "mlx5_0:1", Verdict.SUSPECT) in at(probe, 10)) is found


@pytest.mark.parametrize(
    ("counter", "largest", "code"),
    [
        ("local_link_integrity_errors", 15, "ib-integrity-errors"),
        ("link_error_recovery", 255, "ib-retraining"),
        ("link_downed", 255, "ib-flapping"),
        ("symbol_error", 65535, "ib-symbol-errors"),
        ("port_rcv_errors", 65535, "ib-receive-errors"),
    ],
)
def test_a_counter_that_is_full_gives_a_lower_bound_and_never_says_that_it_is_over(
    sysfs: Sysfs, counter: str, largest: int, code: str
) -> None:
    path = f"{PORT.format('mlx5_0')}/counters/{counter}"
    sysfs.set(path, "0")
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(path, str(largest))
    said = [("ib-counters-full", "mlx5_0:1", Verdict.UNKNOWN), (code, "mlx5_0:1", Verdict.SUSPECT), UNUSED]
    assert at(probe, 10) == sorted(said)
    assert at(probe, 20 + 2 * 3600) == sorted(said), "whether more came cannot be known"
    (finding,) = (each for each in probe.look(1e9 + 7300) if each.code == code)
    assert f"at least {largest} " in finding.message
    assert at(looking(sysfs), 7400) == [said[0], UNUSED], "full at the start: nothing is known to be gained"
    sysfs.set(path, "0")
    assert at(probe, 7500) == [UNUSED]


def test_a_counter_that_cannot_be_read_says_nothing_is_over(sysfs: Sysfs) -> None:
    path = f"{PORT.format('mlx5_0')}/counters/link_downed"
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(path, "9")
    flapping = ("ib-flapping", "mlx5_0:1", Verdict.SUSPECT)
    assert at(probe, 10) == [flapping, UNUSED]
    sysfs.remove(path)
    assert at(probe, 20 + 3600) == [flapping, UNUSED]


def second_port(sysfs: Sysfs, device: str) -> None:
    """Port 2 is not cabled: it is down by design."""
    for name, text in (("state", "1: DOWN"), ("phys_state", "3: Disabled"), ("link_layer", "InfiniBand")):
        path = f"class/infiniband/{device}/ports/2/{name}"
        (sysfs.root / path).parent.mkdir(parents=True, exist_ok=True)
        sysfs.set(path, text)


@pytest.mark.parametrize(
    ("hca", "found"),
    [
        ("=mlx5_0,mlx5_1", [("ib-unused", "mlx5_0:2", Verdict.UNKNOWN)]),
        ("=mlx5_0:1", []),
        ("mlx5_0", [("ib-unused", "mlx5_0:2", Verdict.UNKNOWN)]),
        ("=mlx5_0:2", [("ib-link-down", "mlx5_0:2", Verdict.BAD)]),
    ],
)
def test_a_port_that_is_not_cabled_is_not_missed(sysfs: Sysfs, hca: str, found: list[Said]) -> None:
    second_port(sysfs, "mlx5_0")
    assert at(looking(sysfs, NCCL_IB_HCA=hca), 0, 20) == found


@pytest.mark.parametrize("may_open", [True, False])
def test_a_device_that_the_job_may_not_open_is_somebody_else_s(
    sysfs: Sysfs, tmp_path: Path, may_open: bool
) -> None:
    """The kernel itself refuses this file to everybody, root too."""
    (sysfs.root / "class/infiniband/mlx5_1/device/infiniband_verbs/uverbs1").mkdir(parents=True)
    verbs = tmp_path / "dev/infiniband/uverbs1"
    verbs.parent.mkdir(parents=True)
    verbs.symlink_to("/dev/null" if may_open else "/proc/sys/vm/compact_memory")
    probe = InfinibandProbe(Context(), sysfs.root, {}, tmp_path / "dev")
    at(probe, 0)
    down(sysfs, "mlx5_1")
    lost = [("ib-link-down", "mlx5_1:1", Verdict.SUSPECT)]
    assert at(probe, 10, 20) == [*(lost if may_open else []), UNUSED]


def test_the_baseline_outlives_the_process(sysfs: Sysfs) -> None:
    """A rate that fell, a counter that rose, a port that is down, and a device that is gone altogether."""
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{PORT.format('mlx5_0')}/rate", "100 Gb/sec (1X NDR)")
    sysfs.set(f"{PORT.format('mlx5_0')}/counters/link_downed", "9")
    down(sysfs, "mlx5_1")
    sysfs.remove("class/infiniband/mlx5_2")
    expected = [
        ("ib-device-gone", "mlx5_2:1", Verdict.SUSPECT), ("ib-flapping", "mlx5_0:1", Verdict.SUSPECT),
        ("ib-link-down", "mlx5_1:1", Verdict.SUSPECT), ("ib-slow", "mlx5_0:1", Verdict.SUSPECT), UNUSED,
    ]  # fmt: skip
    memory = json.loads(json.dumps(probe.remember()))
    assert at(InfinibandProbe(Context(memory=memory), sysfs.root, {}), 10, 20) == expected
    at(probe, 10, 20)
    memory = json.loads(json.dumps(probe.remember()))
    assert at(InfinibandProbe(Context(memory=memory), sysfs.root, {}), 30) == expected
    assert at(looking(sysfs), 30, 50) == [("ib-unused", "mlx5_1:1", Verdict.UNKNOWN), UNUSED]
