"""What a site lays below its users' policies: its own file, those of teams, and keys that it locks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from jurymast.cli.main import main
from jurymast.errors import PolicyError
from jurymast.policy import site
from jurymast.policy.resolve import Resolved, file_layers, pairs_layer, resolve

SITE = """\
failures:
  restarts: {infrastructure: 50 per 1d, application: 3 per 1h}
nodes_policy: {bad: drain}
teams:
  - {account: "vision*", policy: teams/vision.yaml}
  - {account: [speech, text], partition: long, policy: teams/long.yaml}
locked:
  - nodes_policy.bad
  - {keys: [failures.restarts], unless: [{account: ops}, {user: root}]}
"""
VISION = "spares: 3\nlocked: [spares]\n"
LONG = "checkpoint: {cadence: 10m}\n"


OTHER_UID = 65533


class Job:
    def __init__(self, **names: str) -> None:
        self._names = names
        self.asked: set[str] = set()

    def names(self, what: str) -> tuple[str, ...]:
        self.asked.add(what)
        return tuple(filter(None, self._names.get(what, "").split(",")))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site with two teams, and a user without a policy."""
    (tmp_path / "teams").mkdir()
    for name, text in (("site.yaml", SITE), ("teams/vision.yaml", VISION), ("teams/long.yaml", LONG)):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("JURYMAST_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("JURYMAST_POLICY", raising=False)
    return tmp_path


def environment(place: Path, **more: str) -> Mapping[str, str]:
    return {"JURYMAST_SITE": str(place / "site.yaml"), **more}


def policy(place: Path, job: Job, text: str = "", **pairs: object) -> Resolved:
    """What is in force for a job with this policy file and these values of the command line."""
    layers = site.layers_below(environment(place), job)
    if text:
        (place / "job.yaml").write_text(text)
        layers = site.over(layers, file_layers(place / "job.yaml", "job.yaml"))
    return resolve([*layers, pairs_layer("command line", [*pairs.items()])])


def refused(place: Path, job: Job, text: str = "", **pairs: object) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        policy(place, job, text, **pairs)
    return str(caught.value).splitlines()


def test_a_job_gets_the_policies_of_its_teams(place: Path) -> None:
    assert policy(place, Job(account="vision-2")).policy.spares == 3
    assert policy(place, Job(account="text", partition="long")).policy.checkpoint.cadence.seconds == 600.0
    for other in (Job(), Job(account="text"), Job(account="text", partition="short"), Job(partition="long")):
        found = policy(place, other).policy
        assert (found.spares, found.checkpoint.cadence.seconds) == (None, None)


def test_a_job_that_may_run_in_several_partitions_must_fit_in_each(place: Path) -> None:
    assert (
        policy(place, Job(account="text", partition="long,short")).policy.checkpoint.cadence.seconds is None
    )
    assert (
        policy(place, Job(account="text", partition="long,long")).policy.checkpoint.cadence.seconds == 600.0
    )


def test_all_teams_that_fit_are_used_and_the_last_one_wins(place: Path) -> None:
    text = SITE.replace("locked:", '  - {user: "*", policy: teams/all.yaml}\nlocked:')
    (place / "site.yaml").write_text(text)
    (place / "teams/all.yaml").write_text("checkpoint: {cadence: 20m}\n")
    found = policy(place, Job(account="text", partition="long", user="ann")).policy
    assert found.checkpoint.cadence.seconds == 1200.0


def test_what_no_team_asks_for_is_not_asked_of_slurm(place: Path) -> None:
    (place / "site.yaml").write_text("teams: [{user: ann, policy: teams/long.yaml}]\n")
    job = Job(user="ann")
    policy(place, job)
    assert job.asked == {"user"}


def test_a_locked_key_is_not_changed(place: Path) -> None:
    assert refused(place, Job(), "spares: 1\nnodes_policy:\n  bad: report\n") == [
        f"job.yaml:3: nodes_policy.bad: is locked by {place}/site.yaml:8; leave it out"
    ]
    assert refused(place, Job(account="vision"), spares=1) == [
        f"command line: spares: is locked by {place}/teams/vision.yaml:2; leave it out"
    ]
    assert refused(place, Job(), "failures: {restarts: {application: 9 per 1h}}\n") == [
        f"job.yaml:1: failures.restarts.application: is locked by {place}/site.yaml:9; leave it out"
    ]


def test_the_same_value_or_another_key_is_no_change(place: Path) -> None:
    text = "nodes_policy: {bad: drain, expire: 2h}\nfailures: {restarts: {application: 3 per 60m}}\n"
    assert policy(place, Job(), text).policy.nodes_policy.expire == 7200.0


def test_a_default_can_be_locked(place: Path) -> None:
    (place / "site.yaml").write_text("locked: [checkpoint.max_loss, checkpoint.tiers.peer]\n")
    assert policy(place, Job(), "checkpoint: {max_loss: 15m}\n").policy.checkpoint.max_loss == 900.0
    assert [line.split(": ")[:2] for line in refused(place, Job(), "checkpoint: {max_loss: 16m}\n")] == [
        ["job.yaml:1", "checkpoint.max_loss"]
    ]
    assert [line.split(": ")[1] for line in refused(place, Job(), "checkpoint: {tiers: {peer: off}}\n")] == [
        "checkpoint.tiers.peer"
    ]


def test_a_lock_does_not_hold_those_whom_it_names(place: Path) -> None:
    text = "failures: {restarts: {application: 9 per 1h}}\n"
    assert policy(place, Job(account="ops"), text).policy.failures.restarts.application.count == 9
    assert policy(place, Job(user="root"), text).policy.failures.restarts.application.count == 9
    assert refused(place, Job(account="ops"), "nodes_policy: {bad: report}\n")


def test_a_team_may_not_change_what_its_site_locks(place: Path) -> None:
    (place / "teams/vision.yaml").write_text("nodes_policy: {bad: report}\n")
    assert refused(place, Job(account="vision")) == [
        f"{place}/teams/vision.yaml:1: nodes_policy.bad: is locked by {place}/site.yaml:8; leave it out"
    ]


def test_a_file_that_extends_the_site_s_takes_nothing_back(place: Path) -> None:
    found = policy(place, Job(account="vision"), f"extends: {place}/site.yaml\nstart: cold\n")
    assert (found.policy.spares, found.policy.start) == (3, "cold")


def test_a_user_s_own_policy_lies_above_the_team_s_and_below_the_file(place: Path) -> None:
    (place / "own/jurymast").mkdir(parents=True)
    (place / "own/jurymast/policy.yaml").write_text("start: cold\ncheckpoint: {cadence: 30m}\n")
    job = Job(account="text", partition="long")
    layers = site.layers_below(environment(place, XDG_CONFIG_HOME=f"{place}/own"), job)
    found = resolve(layers)
    assert (found.policy.start, found.policy.checkpoint.cadence.seconds) == ("cold", 1800.0)
    assert found.whose(("start",)) == f"{place}/own/jurymast/policy.yaml:1 (user)"


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/jurymast/policy.yaml"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}, "/h/.config/jurymast/policy.yaml"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/h"}, "/h/.config/jurymast/policy.yaml"),
        ({"HOME": ""}, None),
    ],
)
def test_where_a_user_s_own_policy_is(variables: dict[str, str], file: str | None) -> None:
    assert site.user_file(variables) == (None if file is None else Path(file))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("teams: [{policy: a.yaml}]", "1: teams[0]: needs one of user, account, qos, partition"),
        ("teams: [{account: a}]", "1: teams[0].policy: Field required"),
        ("teams: [{acount: a, policy: a.yaml}]",
         "1: teams[0].acount: unknown key (did you mean account?)"),
        ("spares: 1\nlocked: [spars]", "2: locked[0]: unknown key spars (did you mean spares?)"),
        ("locked: [checkpoint.tires]", "1: locked[0]: unknown key checkpoint.tires (did you mean tiers?)"),
        ("locked: [extends]", "1: locked[0]: unknown key extends"),
        ("teams: [{account: a, policy: none.yaml}]", ""),
    ],
)  # fmt: skip
def test_mistakes_in_a_site_s_file_are_named(
    place: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "site.yaml").write_text(text + "\n")
    assert main(["policy", "check", str(place / "site.yaml")]) == PolicyError.exit_code
    expected = f"{place}/site.yaml:{told}" if told else f"{place}/none.yaml: cannot be read: No such file"
    assert capsys.readouterr().err.startswith(f"jurymast: error: {expected}")


def test_only_a_site_has_teams_and_locks(place: Path) -> None:
    assert refused(place, Job(), "teams: []\nlocked: [spares]\n") == [
        "job.yaml:1: teams: only the site's own file has this",
        "job.yaml:2: locked: only the files of a site have this",
    ]
    (place / "teams/vision.yaml").write_text("teams: []\n")
    assert refused(place, Job(account="vision")) == [
        f"{place}/teams/vision.yaml:1: teams: only the site's own file has this"
    ]


def test_another_file_does_not_take_the_place_of_one_that_locks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "SITE_FILE", place / "site.yaml")
    others = ("", str(place / "other.yaml"))
    (place / "other.yaml").write_text("spares: 1\n")
    assert [len(site.site_layers({"JURYMAST_SITE": other}, Job())) for other in others] == [0, 1], (
        "its owner's"
    )
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(place / "site.yaml", OTHER_UID, -1)
    for other in others:
        with pytest.raises(PolicyError, match=r"^JURYMAST_SITE: .*site.yaml locks keys"):
            site.site_layers({"JURYMAST_SITE": other}, Job())
    (place / "site.yaml").write_text("spares: 1\n")
    assert site.site_layers({"JURYMAST_SITE": ""}, Job()) == []


# ---- the commands


def test_show_names_the_layer_and_the_lock_of_each_value(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "show", "--origin", "--account", "vision"]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert f"spares: 3 # {place}/teams/vision.yaml:1 (team, locked)" in lines
    assert f"bad: drain # {place}/site.yaml:3 (site, locked)" in lines
    assert "start: warm # default" in lines
    assert main(["policy", "show", "--origin", "--account", "vision", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["locked"]["spares"] == f"{place}/teams/vision.yaml:2"


def test_the_variable_names_a_policy_unless_a_file_is_given(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine.yaml").write_text("start: cold\n")
    (place / "other.yaml").write_text("spares: 1\n")
    monkeypatch.setenv("JURYMAST_POLICY", str(place / "mine.yaml"))
    for words, start in (([], "cold"), ([str(place / "other.yaml")], "warm")):
        assert main(["policy", "show", *words]) == 0
        assert f"start: {start}\n" in capsys.readouterr().out
    monkeypatch.setenv("JURYMAST_POLICY", str(place / "none.yaml"))
    assert main(["policy", "show"]) == PolicyError.exit_code
    assert f"JURYMAST_POLICY: there is no file {place}/none.yaml" in capsys.readouterr().err


def test_several_files_are_checked_in_one_go(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "good.yaml": "spares: 1\n",
        "bad.yaml": "spars: 1\nstart: hot\n",
        "locked.yaml": "nodes_policy: {bad: report}\n",
    }
    for name, text in files.items():
        (place / name).write_text(text)
    words = ["policy", "check", *(str(place / name) for name in (*files, "site.yaml"))]
    assert main(words) == PolicyError.exit_code
    told = capsys.readouterr()
    assert told.out == f"{place}/good.yaml: valid\n{place}/site.yaml: valid\n"
    lines = told.err.removeprefix("jurymast: error: ").splitlines()
    assert [line.removeprefix(f"{place}/")[:14] for line in lines] == [
        "bad.yaml:1: sp", "bad.yaml:2: st", "locked.yaml:1:",
    ]  # fmt: skip
    assert main([*words, "--json"]) == PolicyError.exit_code
    found = json.loads(capsys.readouterr().out)
    assert [one["valid"] for one in found] == [True, False, False, True]
    assert len(found[1]["problems"]) == 2


def test_a_site_s_file_is_checked_with_each_of_its_teams(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "teams/vision.yaml").write_text("nodes_policy: {bad: report}\n")
    (place / "teams/long.yaml").write_text("spars: 1\n")
    assert main(["policy", "check", str(place / "site.yaml")]) == PolicyError.exit_code
    told = capsys.readouterr().err.removeprefix("jurymast: error: ").splitlines()
    assert [Path(line.split(": ")[0]).name for line in told] == ["vision.yaml:1", "long.yaml:1"]


def test_all_mistakes_of_a_site_s_file_are_named_in_one_go(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "team.yaml").write_text("checkpoint: {cadense: 1h}\n")
    teams = "teams: [{account: a, policy: gone.yaml}, {account: b, policy: team.yaml}]"
    (place / "site.yaml").write_text(f"locked: [failures.requeuez]\nspares: many\n{teams}\n")
    assert main(["policy", "check", str(place / "site.yaml")]) == PolicyError.exit_code
    told = capsys.readouterr().err.removeprefix("jurymast: error: ").splitlines()
    expected = ("site.yaml:1: locked[0]: unknown key", "site.yaml:2: spares: many", "gone.yaml: ",
                "team.yaml:1: checkpoint.cadense")  # fmt: skip
    for line, start in zip(told, expected, strict=True):
        assert line.startswith(f"{place}/{start}")


def test_without_a_file_what_is_in_force_is_checked(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "own/jurymast").mkdir(parents=True)
    (place / "own/jurymast/policy.yaml").write_text("nodes_policy: {bad: report}\n")
    assert main(["policy", "check"]) == PolicyError.exit_code
    told = capsys.readouterr()
    assert told.out == f"{place}/site.yaml: valid\n"
    assert told.err.startswith(
        f"jurymast: error: {place}/own/jurymast/policy.yaml:1: nodes_policy.bad: is locked by"
    )
    monkeypatch.setenv("JURYMAST_SITE", "")
    (place / "own/jurymast/policy.yaml").unlink()
    assert main(["policy", "check"]) == 0
    assert "no policy is in force" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("health: {skip: [nvidai]}", "health.skip[0]: there is no probe nvidai (did you mean nvidia?)"),
        (
            "health: {skip: [host, Storage]}",
            "health.skip[1]: there is no probe Storage (did you mean storage?)",
        ),
        ("health: {skip: [gpu]}", "health.skip[0]: there is no probe gpu"),
        ("health: {thresholds: {clock-offset: 1}}", "health.thresholds.clock-offset: there is no threshold"),
        ("health: {xid: {79: broken}}", "health.xid.79: should be"),
        ("metrics: {trackers: [tensorbord]}", "metrics.trackers[0]: tensorbord cannot be used"),
        ("notify: [{when: [failed], command: [mail]}]", "notify[0].when[0]: should be"),
        ("notify: [{when: [], command: [mail]}]", "notify[0]: when names nothing, so nobody is told"),
    ],
)  # fmt: skip
def test_names_that_nothing_has_are_refused(
    place: Path, text: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JURYMAST_SITE", "")
    (place / "team.yaml").write_text(f"{text}\n")
    assert main(["policy", "check", str(place / "team.yaml")]) == PolicyError.exit_code
    assert f"team.yaml:1: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("checkpoint: {cadence: 1h, max_loss: 5m}",
         "checkpoint.cadence: is longer than checkpoint.max_loss allows; write a shorter time, or auto"),
        ("checkpoint: {tiers: {memory: off, peer: on}}",
         "checkpoint.tiers.peer: has no effect while checkpoint.tiers.memory is off"),
        ('checkpoint: {tiers: {object: {url: "s3://b/p", every: 1h}, shared: {every: 2h}}}',
         "checkpoint.tiers.object.every: is shorter than checkpoint.tiers.shared.every"),
        ("detect: {heartbeat: 2s, node_lost_after: 2s}",
         "detect.node_lost_after: must be longer than detect.heartbeat"),
        ("nodes_policy: {expire: 1m}", "nodes_policy.expire: is shorter than nodes_policy.together"),
        ("checkpoint: {tiers: {peer: off}}\nnetwork: {encrypt: on}", "network.encrypt: has no effect"),
        ("health: {skip: [storage], data: [/data]}", "health.data: is looked at by the probe storage"),
        ("checkpoint: {tiers: {memory: off, local: {path: /scratch}}}",
         "checkpoint.tiers.local: has no effect"),
        ("health: {skip: [infiniband], thresholds: {ib-down-s: 1}}",
         "health.thresholds.ib-down-s: is for the probe infiniband"),
        ("health: {skip: [nvidia, amd], thresholds: {gpu-pcie-replays: 1}}",
         "health.thresholds.gpu-pcie-replays: is for the probe nvidia and amd"),
        ("health: {skip: [infiniband], workaround: on}", "health.workaround: has no effect while"),
        ("health: {skip: [nvidia], xid: {79: bad}}", "health.xid: is for the probe nvidia"),
        ("detect: {heartbeat: 2s, hang: 1s}", "detect.hang: must be longer than detect.heartbeat"),
        ("checkpoint: {max_loss: 5m, tiers: {memory: off, shared: {every: 1h}}}",
         "checkpoint.tiers.shared.every: is longer than checkpoint.max_loss"),
        ("nodes_policy: {refill: off, hold: 5m}", "nodes_policy.hold: has no effect while"),
        ("nodes_policy: {bad: report, spool: /spool}", "nodes_policy.spool: has no effect while"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_named(
    place: Path, text: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JURYMAST_SITE", "")
    (place / "p.yaml").write_text(text + "\n")
    assert main(["policy", "check", str(place / "p.yaml")]) == PolicyError.exit_code
    line = capsys.readouterr().err.removeprefix("jurymast: error: ")
    assert line.startswith(f"{place}/p.yaml:{text.count(chr(10)) + 1}: {told}")
    assert main(["policy", "show", str(place / "p.yaml")]) == 0
    assert f"note: {line}" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["checkpoint: {tiers: {memory: off}}", "checkpoint: {cadence: 1h}"])
def test_a_file_with_all_keys_contradicts_nothing(place: Path, change: str) -> None:
    """As that of a run, which is submitted again, and one that extends the defaults that we ship."""
    (place / "p.yaml").write_text(change + "\n")
    (place / "of-run.yaml").write_text(resolve(file_layers(place / "p.yaml", "p.yaml")).yaml(origins=True))
    default = Path(__file__).parents[2] / "configs/default.yaml"
    (place / "over.yaml").write_text(f"extends: {default}\n{change}\n")
    for name in ("of-run.yaml", "over.yaml"):
        assert resolve(file_layers(place / name, name)).contradictions == ()


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint: {cadence: 1h}",  # max_loss limits automatic intervals
        "checkpoint: {cadence: 200 steps, max_loss: 5m}",
        "checkpoint: {tiers: {memory: off}}",  # what is not written is not meant either
        'checkpoint: {tiers: {object: {url: "s3://b/p", every: 1h}}}',
        "detect: {heartbeat: 2s}",
        "detect: {heartbeat: 2s, hang: off}",
        "nodes_policy: {hold: 5m, spool: /spool}",  # a site prepares what others switch on
        "checkpoint: {max_loss: 5m, tiers: {shared: {every: 1h}}}",
    ],
)
def test_a_default_contradicts_nothing(place: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JURYMAST_SITE", "")
    (place / "p.yaml").write_text(text + "\n")
    assert main(["policy", "check", str(place / "p.yaml")]) == 0
