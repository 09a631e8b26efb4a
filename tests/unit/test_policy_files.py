"""The policies that come with jurymast, the starter, and the JSON Schema made from the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jurymast.cli.main import main
from jurymast.core.state.effects import Launch
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.policy.model import schema
from jurymast.policy.resolve import Resolved, file_layers, resolve
from jurymast.policy.site import site_schema
from support.stories import Story

CONFIGS = Path(__file__).parents[2] / "configs"
READY = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JURYMAST_SITE", "")


def load(path: Path) -> Resolved:
    return resolve(file_layers(path, path.name))


def test_there_is_a_policy_for_each_use() -> None:
    uses = {"default", "research", "frontier", "preemptible", "small", "site"}
    assert {path.stem for path in READY} == uses


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_policies_are_good(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: valid\n"
    assert main(["plan", "--nodes", "16", "--policy", str(path)]) == 0


def test_what_the_ready_policies_are_for() -> None:
    policies = {path.stem: load(path) for path in READY}
    assert policies["small"].policy.spares == 0
    assert policies["preemptible"].policy.spares == 0
    assert policies["site"].policy.nodes_policy.bad == "drain"
    assert policies["frontier"].policy.spares is None
    assert policies["frontier"].settings().rate == 6.5
    assert policies["research"].settings().rate is None


def test_a_site_file_lies_below_a_team_s(tmp_path: Path) -> None:
    team = tmp_path / "team.yaml"
    team.write_text(f"extends: {CONFIGS / 'site.yaml'}\nspares: 2\n")
    resolved = load(team)
    assert resolved.policy.spares == 2
    assert resolved.policy.nodes_policy.bad == "drain"


def test_init_writes_a_policy_that_is_good_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    assert main(["policy", "init", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert load(path).values == resolve([]).values
    # Also what is commented out would be good, but for a file that it extends.
    full = re.sub(
        r"^( *)# (extends|local|object|rate)(:.*)$", r"\1\2\3", path.read_text(), flags=re.MULTILINE
    )
    assert full != path.read_text()
    path.write_text(full.replace("/etc/jurymast/team.yaml", str(CONFIGS / "site.yaml")))
    assert load(path).settings().local_path == "/scratch"
    before = path.read_text()
    assert main(["policy", "init", str(path)]) == 64
    assert path.read_text() == before
    assert "already exists" in capsys.readouterr().err


def test_init_where_nothing_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "init", "/nowhere/p.yaml"]) == 65
    assert "/nowhere/p.yaml: cannot be written: No such file" in capsys.readouterr().err


def test_the_schema_checked_in_is_the_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: jurymast schema policy > configs/policy.schema.json, and the same with site-policy."""
    for name, made in (("policy", schema()), ("site-policy", site_schema())):
        assert json.loads((CONFIGS / f"{name}.schema.json").read_text()) == made
        assert main(["schema", name]) == 0
        assert json.loads(capsys.readouterr().out) == made


def test_the_page_of_keys_is_the_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: jurymast policy keys > docs/policy-keys.md"""
    assert main(["policy", "keys"]) == 0
    told = capsys.readouterr().out
    assert (CONFIGS.parent / "docs" / "policy-keys.md").read_text() == told
    listed = {line.split("`")[1] for line in told.splitlines() if line.startswith("| `")}
    written = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert set(leaves(written)) - listed == set()


def leaves(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def broken(value: Any, rules: dict[str, Any]) -> list[str]:
    """Places at which `value` breaks the rules of a schema."""
    found = jsonschema.Draft202012Validator(rules).iter_errors(value)
    return [str(error.json_path).removeprefix("$") for error in found]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_policies_fit_the_schema(path: Path) -> None:
    assert broken(yaml.safe_load(path.read_text()), schema()) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("spars: 1", ""),
        ("spares: -1", ".spares"),
        ("spares: many", ".spares"),
        ("detect: {heartbeat: 10}", ".detect.heartbeat"),
        ("detect: {hang: 10x}", ".detect.hang"),
        ("checkpoint: {cadence: ten steps}", ".checkpoint.cadence"),
        ("checkpoint: {tiers: {local: {}}}", ".checkpoint.tiers.local"),
        ("checkpoint: {tiers: {peer: {copies: 0}}}", ".checkpoint.tiers.peer"),
        ("failures: {rate: 0}", ".failures.rate"),
        ("price: 2.10", ".price"),
        ("failures: {restarts: {application: 3 an hour}}", ".failures.restarts.application"),
        ("nodes_policy: {max_fraction: 120}", ".nodes_policy.max_fraction"),
        ("extends: 3", ".extends"),
    ],
)
def test_the_schema_finds_mistakes(text: str, where: str) -> None:
    assert broken(yaml.safe_load(text), schema()) == [where]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{teams: [{account: [a, b], policy: a.yaml}], locked: spares}", []),
        ("locked: [checkpoint, {keys: [spares, start], unless: {account: ops}}]", []),
        ("locked: {keys: spares, unless: [{user: ada}, {qos: high, partition: 'l*'}]}", []),
        ("teams: [{account: a}]", [".teams[0]"]),
        ("teams: [{account: 3, policy: a.yaml}]", [".teams[0].account"]),
        ("teams: [{group: a, policy: a.yaml}]", [".teams[0]"]),
        ("locked: 3", [".locked"]),
        ("lock: spares", [""]),
        ("spares: -1", [".spares"]),
    ],
)
def test_the_schema_of_a_site_s_file_has_its_own_keys(text: str, where: list[str]) -> None:
    assert broken(yaml.safe_load(text), site_schema()) == where


def test_every_key_of_the_schema_says_what_it_is() -> None:
    sections = [site_schema(), *site_schema()["$defs"].values()]
    for section in sections:
        assert section["additionalProperties"] is False
        assert all(key.get("description") for key in section.get("properties", {}).values())


def test_a_rate_reaches_the_settings_and_is_acted_on(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("failures: {rate: 6.5}\n")
    resolved = load(path)
    assert resolved.settings() == Settings(rate=6.5)
    plan = RunPlan(
        run="r", name="r", directory="/r", cluster="local", active=1, spares=0, ranks_per_node=1,
        script="s", settings=resolved.settings(),
    )  # fmt: skip
    assert RunPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    story = Story(active=1, settings=resolved.settings()).running()
    assert story.last(Launch).mtbf_s == pytest.approx(86_400 * 1000 / 6.5, rel=1e-3)
    path.write_text("failures: {rate: 0}\n")
    assert main(["policy", "check", str(path)]) == 65
