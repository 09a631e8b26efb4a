"""The files that pin packages by hash cover what is needed, for every Python that is supported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TESTS, SITE = ROOT / "tests/requirements.txt", ROOT / "slurm/site/requirements.txt"
BUILD = ("hatchling>=1.24",)
ROOTS_OWN = (*BUILD, "nvidia-ml-py>=12.560")


def pinned(file: Path, python: str) -> dict[str, str]:
    """{package: version} for this Python; each has hashes."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    found: dict[str, str] = {}
    for entry in text.replace("\\\n", " ").splitlines():
        named, *hashes = re.split(r"\s+--hash=", entry.strip())
        assert hashes, entry
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), entry
        requirement = Requirement(named)
        marker = requirement.marker
        if marker is None or marker.evaluate({"python_version": python, "python_full_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


def needed(extra: str) -> Iterator[Requirement]:
    """What pyproject.toml asks for, with this extra and those that it names."""
    for requirement in map(Requirement, metadata.requires("jurymast") or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            if requirement.name == "jurymast":
                for other in requirement.extras:
                    yield from needed(other)
            else:
                yield requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_all_that_the_tests_need_is_pinned(python: str) -> None:
    found = pinned(TESTS, python)
    wanted = [*needed("dev"), *map(Requirement, BUILD)]
    assert len(wanted) > 20
    for requirement in wanted:
        if requirement.name != "torch":  # from the index that the machine needs
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_root_gets_what_its_probes_need_and_no_more(python: str) -> None:
    found, elsewhere = pinned(SITE, python), pinned(TESTS, python)
    for requirement in map(Requirement, ROOTS_OWN):
        assert requirement.specifier.contains(found[requirement.name]), requirement
    built = {"packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers"}
    assert found.keys() - {"hatchling", "nvidia-ml-py", "tomli"} == built
    assert ("tomli" in found) == (python == "3.10")
    assert all(elsewhere[name] == version for name, version in found.items()), "the two files differ"
