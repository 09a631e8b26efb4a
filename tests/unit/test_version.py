"""The version comes from git's tags, or from the source distribution."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import jurymast
import version as versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("described", "commit", "found"),
    [
        ("v0.2.0-0-gabc1234", "abc1234", "0.2.0"),
        ("v0.2.0-5-gabc1234", "abc1234", "0.2.1.dev5+gabc1234"),
        ("v1.0-12-gabc1234", "abc1234", "1.1.dev12+gabc1234"),
        ("", "abc1234", "0.1.dev0+gabc1234"),
        ("", "", "0.1.dev0"),
    ],
)
def test_a_version_of_gits_tags(described: str, commit: str, found: str) -> None:
    assert versions.of_git(described, commit) == found


def test_a_shallow_clone_without_tags_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=x", "-c", "user.email=x")
        subprocess.run(["git", *names, *words], check=True, capture_output=True, cwd=tmp_path)

    git("init", "origin")
    git("-C", "origin", "commit", "--allow-empty", "-m", "one")
    git("-C", "origin", "tag", "v0.3.0")
    git("-C", "origin", "commit", "--allow-empty", "-m", "two")
    git("clone", "--depth=1", "--no-tags", f"file://{tmp_path}/origin", "shallow")
    monkeypatch.setattr(versions, "HERE", tmp_path / "shallow")
    assert versions.version().startswith("0.1.dev0+g")
    monkeypatch.setattr(versions, "HERE", tmp_path / "origin")
    assert versions.version().startswith("0.3.1.dev1+g")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: jurymast\nVersion: 7.1\n")
    monkeypatch.setattr(versions, "HERE", tmp_path)
    assert versions.version() == "7.1"


def test_what_is_installed_knows_its_version() -> None:
    assert jurymast.__version__[0].isdigit()
