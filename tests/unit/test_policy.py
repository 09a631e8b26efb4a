"""Policy files: values, layers, origins, and errors that name their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jurymast.core.judges.forecast import auto_spares
from jurymast.core.state.settings import Budget, Price, Settings
from jurymast.errors import PolicyError
from jurymast.policy import model
from jurymast.policy.resolve import Resolved, file_layers, pairs_layer, resolve
from jurymast.policy.site import Nobody, site_layers

CONFIGS = Path(__file__).parents[2] / "configs"


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def load(path: Path) -> Resolved:
    return resolve(file_layers(path, path.name))


def complaints(path: Path) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load(path)
    return str(caught.value).splitlines()


def test_no_policy_is_the_core_s_defaults() -> None:
    assert resolve([]).settings() == Settings()


def test_the_example_spells_the_defaults_out() -> None:
    assert load(CONFIGS / "default.yaml").values == resolve([]).values


def test_every_value_reaches_the_settings(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "p.yaml",
        """
spares: 3
detect: {heartbeat: 250ms, node_lost_after: 2s, hang: 1h30m, start_within: 20m, join_within: 90s}
checkpoint:
  cadence: 200 steps
  tiers:
    memory: {}
    peer: {copies: 2, prefer: any}
    local: {path: /scratch}
    shared: {keep: 5, every: 1m}
    object: {url: "s3://bucket/prefix", every: 2h}
failures: {requeues: 4, stop_grace: 20s, restarts: {infrastructure: 20 per 1d, application: 0 per 1h}}
""",
    )
    resolved = load(path)
    assert resolved.policy.spares == 3
    assert resolved.settings() == Settings(
        heartbeat_s=0.25,
        node_lost_after_s=2.0,
        hang_s=5400.0,
        start_limit_s=1200.0,
        join_limit_s=90.0,
        stop_grace_s=20.0,
        infrastructure=Budget(count=20, window_s=86400.0),
        application=Budget(count=0, window_s=3600.0),
        requeues=4,
        cadence_steps=200,
        memory=True,
        replicas=2,
        prefer_spares=False,
        local_path="/scratch",
        shared_every_s=60.0,
        keep=5,
        object_url="s3://bucket/prefix",
        object_every_s=7200.0,
    )


def test_without_memory_there_is_nothing_to_replicate(tmp_path: Path) -> None:
    settings = load(write(tmp_path, "p.yaml", "checkpoint: {tiers: {memory: off}}\n")).settings()
    assert (settings.memory, settings.replicas) == (False, 0)


def test_off_is_what_yaml_makes_of_it(tmp_path: Path) -> None:
    resolved = load(write(tmp_path, "p.yaml", "detect: {hang: off}\ncheckpoint: {cadence: 10m}\n"))
    assert resolved.settings().hang_s == 0.0
    assert resolved.settings().cadence_s == 600.0
    assert "hang: off" in resolved.yaml()


def test_all_mistakes_at_once_each_with_file_line_key_and_the_nearest_name(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "p.yaml",
        """spares: -1
detect:
  heartbat: 1s
  hang: 10
checkpoint:
  tiers:
    shard: {keep: 3}
    peer: 3
failures: {restarts: {application: 3 an hour}}
notify: [page]
extend: other.yaml
""",
    )
    lines = complaints(path)
    assert [line.split(": ", 2)[:2] for line in lines] == [
        ["p.yaml:1", "spares"],
        ["p.yaml:3", "detect.heartbat"],
        ["p.yaml:4", "detect.hang"],
        ["p.yaml:7", "checkpoint.tiers.shard"],
        ["p.yaml:8", "checkpoint.tiers.peer"],
        ["p.yaml:9", "failures.restarts.application"],
        ["p.yaml:10", "notify[0]"],
        ["p.yaml:11", "extend"],
    ]
    assert lines[1].endswith("unknown key (did you mean heartbeat?)")
    assert "write a number with a unit" in lines[2]
    assert lines[3].endswith("(did you mean shared?)")
    assert lines[4].endswith("needs keys below it: copies, prefer")
    assert lines[7].endswith("(did you mean extends?)")


def test_a_key_of_an_earlier_version_is_told_what_became_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, "p.yaml", "checkpoint: {tiers: {peer: {copies: 1, parity: 8}}}\n")
    assert complaints(path) == [
        f"{path.name}:1: checkpoint.tiers.peer.parity: is gone: other nodes hold whole replicas; leave it out"
    ]


def test_mistakes_come_by_file_and_line_whatever_the_file_is_called(tmp_path: Path) -> None:
    text = "".join(f"x{number}: 1\n" for number in range(1, 11))
    assert [line.split(": ")[:2] for line in complaints(write(tmp_path, "team: 7:3.yaml", text))] == [
        ["team", f"7:3.yaml:{number}"] for number in range(1, 11)
    ]


def test_layers_merge_key_by_key_and_remember_where_each_value_came_from(tmp_path: Path) -> None:
    write(
        tmp_path,
        "site.yaml",
        "spares: 1\ndetect: {heartbeat: 2s, hang: 20m}\nhealth: {data: [/a]}\n",
    )
    write(tmp_path, "team.yaml", "detect:\n  hang: off\n")
    path = write(tmp_path, "job.yaml", "extends: team.yaml\nspares: 2\nhealth: {data: []}\n")
    site = site_layers({"JURYMAST_SITE": str(tmp_path / "site.yaml")}, Nobody())
    command = pairs_layer("command line", [("spares", 4)])
    resolved = resolve([*site, *file_layers(path, "job.yaml"), command])
    assert resolved.policy.spares == 4
    assert resolved.settings().heartbeat_s == 2.0
    assert resolved.settings().hang_s == 0.0
    assert resolved.values["health"]["data"] == []
    assert str(resolved.origins[("spares",)]) == "command line"
    assert str(resolved.origins[("detect", "heartbeat")]) == f"{tmp_path}/site.yaml:2"
    assert str(resolved.origins[("detect", "hang")]) == f"{tmp_path}/team.yaml:2"
    assert str(resolved.origins[("health", "data")]) == "job.yaml:3"
    assert str(resolved.origins[("detect", "join_within")]) == "default"


def test_a_mistake_hidden_by_a_higher_layer_still_shows(tmp_path: Path) -> None:
    write(tmp_path, "team.yaml", "spares: many\n")
    path = write(tmp_path, "job.yaml", "extends: team.yaml\nspares: 2\n")
    (line,) = complaints(path)
    assert line.startswith(f"{tmp_path}/team.yaml:1: spares: ")


def test_a_tier_is_switched_off_by_a_higher_layer(tmp_path: Path) -> None:
    write(tmp_path, "team.yaml", "checkpoint: {tiers: {memory: {}, peer: {copies: 2}}}\n")
    tiers = load(
        write(tmp_path, "job.yaml", "extends: team.yaml\ncheckpoint: {tiers: {peer: off}}\n")
    ).policy.checkpoint
    assert tiers.tiers.memory is not None
    assert tiers.tiers.peer is None


def test_what_is_written_to_the_run_directory_reads_back_equal(tmp_path: Path) -> None:
    text = """
checkpoint: {cadence: 200 steps, tiers: {local: {path: "/scratch: #1"}, object: {url: "s3://b/p"}}}
health: {data: [/bin/page, "on", "a: b", "1"]}
"""
    resolved = load(write(tmp_path, "p.yaml", text))
    again = load(write(tmp_path, "q.yaml", resolved.yaml(origins=True)))
    assert again.values == resolved.values
    assert again.digest == resolved.digest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spares: 1\nspares: 2\n", "p.yaml:2: spares: is given twice"),
        ("- 1\n", "p.yaml:1: a policy must be a mapping"),
        ("spares: [1\n", "p.yaml:2: "),
        ("spares: !!python/object/apply:os.system [true]\n", "p.yaml:1: spares: "),
        ("spares: !!python/name:os.system x\n", "could not determine a constructor"),
        ("extends: 3\n", "p.yaml:1: extends: must be a file name"),
        ("extends: p.yaml\n", "extends itself"),
        ("extends: nowhere.yaml\n", "nowhere.yaml: cannot be read"),
        ("detect: 3\n", "detect: needs keys below it: heartbeat"),
        ("nodes_policy: {max_fraction: 120%}\n", "must be between 0% and 100%"),
        ("checkpoint: {tiers: {local: {}}}\n", "checkpoint.tiers.local.path: "),
        ("checkpoint: {tiers: {shared: off}}\n", "checkpoint.tiers.shared: "),
        ("nodes:\n  min: -1\n", "p.yaml:2: nodes.min: must be at least 1"),
        ("notify: [{when: stop, command: [a]}]\n", "p.yaml:1: notify[0].when[0]: should be 'incident', "),
        ("checkpoint: &all\n  tiers: *all\n", "p.yaml: is nested too deeply"),
        ("checkpoint:\n  ? {max_loss: 1}\n  : 3\n", "p.yaml:2: checkpoint: a key must be a word"),
        ("[1, 2]: 3\n", "p.yaml:1: the policy: a key must be a word"),
        ("checkpoint: {tiers: {local: {path: ''}}}\n", "checkpoint.tiers.local.path: must not be empty"),
        ("checkpoint: {max_loss: 1:30:00}\n", "1:30:00 is not a duration"),
        ("checkpoint: {max_loss: ''}\n", '"" is not a duration'),
        ("checkpoint: {max_loss: 99999999h}\n", "99999999h is longer than a hundred years"),
        ("spares: 1:30\n", "1:30 is not a whole number"),
        ("spares: 010\n", "010 is not a whole number"),
        ("spares: '2'\n", '"2" is not a whole number'),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    assert says in "\n".join(complaints(write(tmp_path, "p.yaml", text)))


def bomb(levels: int) -> str:
    """A list of nine lists of nine lists and so on, in a few lines."""
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_aliases_count_as_what_they_repeat(tmp_path: Path) -> None:
    assert "unknown key" in complaints(write(tmp_path, "p.yaml", bomb(2)))[0]
    for levels in (4, 30):
        (line,) = complaints(write(tmp_path, "p.yaml", bomb(levels)))
        assert line.startswith("p.yaml:4: x3: more than 1000 values")


def test_files_that_extend_each_other_without_end(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path, f"{number}.yaml", f"extends: [{number + 1}.yaml, {number + 1}.yaml]\n")
    write(tmp_path, "30.yaml", "spares: 1\n")
    (line,) = complaints(tmp_path / "0.yaml")
    assert line.endswith("20.yaml: more than 20 files extend each other")
    (line,) = complaints(tmp_path / "20.yaml")
    assert line.endswith("30.yaml: more than 20 files extend each other")
    assert load(tmp_path / "29.yaml").policy.spares == 1


def test_links_that_lead_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").symlink_to("p.yaml")
    (line,) = complaints(tmp_path / "p.yaml")
    assert line.startswith("p.yaml: cannot be read: ")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert complaints(path) == ["p.yaml: is not UTF-8 text"]


def test_a_file_that_is_no_file_or_has_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert complaints(tmp_path / "pipe") == ["pipe: cannot be read: it is not an ordinary file"]
    assert complaints(Path("/dev/zero")) == ["zero: cannot be read: it is not an ordinary file"]
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    (line,) = complaints(tmp_path / "large")
    assert line == "large: cannot be read: it has 1073741824 bytes, at most 65536 are allowed"
    path = write(tmp_path, "p.yaml", "spares: 1\nextends: pipe\n")
    assert complaints(path) == [f"{tmp_path}/pipe: cannot be read: it is not an ordinary file"]


def test_an_empty_file_is_no_change(tmp_path: Path) -> None:
    assert load(write(tmp_path, "p.yaml", "# nothing yet\n")).values == resolve([]).values


def test_a_named_site_file_must_exist(tmp_path: Path) -> None:
    assert site_layers({"JURYMAST_SITE": ""}, Nobody()) == []
    with pytest.raises(PolicyError, match="cannot be read"):
        site_layers({"JURYMAST_SITE": str(tmp_path / "none.yaml")}, Nobody())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.5s", 0.5),
        ("10m", 600),
        ("24h", 86400),
        ("1h30m", 5400),
        ("2d", 172800),
        ("5ms", 0.005),
        ("1h 30 min", 5400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert model.read_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["10", 10, "m", "-1s", "1 hour", "", True, None, "1e3s", "10m 5"])
def test_bad_durations(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        model.read_duration(text)


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), (0.5, 0.5), ("100%", 1.0), (0, 0.0)])
def test_fractions(text: object, share: float) -> None:
    assert model.read_fraction(text) == pytest.approx(share)


def test_a_price_has_a_currency(tmp_path: Path) -> None:
    settings = load(write(tmp_path, "p.yaml", "price: 2.10 USD\n")).settings()
    assert settings.price == Price(gpu_hour=2.1, currency="USD")
    assert load(write(tmp_path, "q.yaml", "extends: p.yaml\nprice: off\n")).settings().price is None


@pytest.mark.parametrize(
    "value", [2.1, "2.10", "2.10 usd", "USD 2.10", "0 USD", "-1 USD", "1e3 USD", True, None]
)
def test_what_is_no_price(value: object) -> None:
    with pytest.raises(ValueError, match="is not a price"):
        model.read_price(value)


@pytest.mark.parametrize("value", [True, 1.5, "3", None])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        model.read_whole_number(value)


@pytest.mark.parametrize(("active", "spares"), [(1, 0), (32, 1), (128, 2), (12_500, 54)])
def test_auto_spares(active: int, spares: int) -> None:
    assert auto_spares(active) == spares
