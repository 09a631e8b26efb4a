"""`jurymast doctor --install`: what other users of a site would find."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs import ROOT


def told(place: Path, **variables: str) -> dict[str, tuple[str, str]]:
    """(answer, what was found) by check, of the package that is copied to `place`."""
    environment = {**os.environ, "PYTHONPATH": str(place), "JURYMAST_SITE": "", **variables}
    command = [sys.executable, "-m", "jurymast", "doctor", "--install", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == (1 if any(check["answer"] == "no" for check in checks) else 0)
    assert all(check["todo"] for check in checks if check["answer"] != "yes")
    return {check["check"]: (check["answer"], check["found"]) for check in checks}


@pytest.fixture
def place() -> Iterator[Path]:
    """A copy of the package where everybody can read it."""
    closed = [
        one for one in (*Path(sys.prefix).parents, Path(sys.prefix)) if not one.stat().st_mode & stat.S_IXOTH
    ]
    if closed:
        pytest.skip(f"only some users can enter {closed[-1]}, which has this Python")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(ROOT / "launcher/jurymast", f"{folder}/site/jurymast")).parent


def test_an_installation_that_everybody_can_use(place: Path) -> None:
    found = told(place)
    assert found["package"][0] == "yes"
    assert found["readable by all"] == ("yes", str(place / "jurymast"))
    assert "nvidia" in found["plugins"][1]
    assert found["site policy"][0] == "note"


def test_what_python_has_compiled_for_its_owner_alone_is_nobodys_trouble(place: Path) -> None:
    compiled = place / "jurymast/core/__pycache__"
    compiled.mkdir(exist_ok=True)
    (compiled / "goodput.cpython-399.pyc").touch(0o600)
    compiled.chmod(0o700)
    assert told(place)["readable by all"][0] == "yes"


def test_a_file_that_only_its_owner_can_read(place: Path) -> None:
    (place / "jurymast/errors.py").chmod(0o600)
    (place / "jurymast/core").chmod(0o700)
    answer, what = told(place)["readable by all"]
    assert (answer, what) == ("no", f"only some users can read {place}/jurymast/core and 1 more file")


def test_a_directory_above_that_others_cannot_enter(place: Path) -> None:
    place.chmod(0o700)
    assert told(place)["readable by all"] == ("no", f"only some users can enter {place}")


def test_what_it_needs_and_is_not_there(place: Path) -> None:
    """The metadata of another jurymast, which needs one package more."""
    metadata = place / "jurymast-9.dist-info"
    metadata.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: jurymast", "Version: 9", "Requires-Dist: click>=8"]
    lines += ["Requires-Dist: no-such-package>=1", "Requires-Dist: of-an-extra; extra == 'some'"]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    assert told(place)["package"] == ("no", f"9 in {place}, without no-such-package")


def test_a_plugin_that_is_broken(place: Path) -> None:
    metadata = place / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[jurymast.probes]\nodd = no_such_module:probe\n")
    answer, what = told(place)["plugins"]
    assert (answer, what) == ("note", "cannot be loaded: odd (No module named 'no_such_module')")


def test_a_site_s_policy_with_a_mistake(place: Path) -> None:
    policy = place / "site.yaml"
    policy.write_text("spars: 1\n")
    answer, what = told(place, JURYMAST_SITE=str(policy))["site policy"]
    assert (answer, what.startswith(f"{policy}:1: spars: unknown key")) == ("no", True)
    policy.write_text("spares: 1\n")
    assert told(place, JURYMAST_SITE=str(policy))["site policy"] == ("yes", str(policy))
