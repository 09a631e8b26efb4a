"""The recipes of slurm/site name what jurymast is: its version, what it needs, and files that are there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "slurm" / "site"
_TOML: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
WHOLE: dict[str, Any] = _TOML.loads((ROOT / "pyproject.toml").read_text())
PROJECT = WHOLE["project"]
SPACK = SITE / "spack_repo" / "jurymast"
# As conda-forge calls what PyPI calls otherwise.
IN_CONDA = {"xxhash": "python-xxhash"}


def floors(requirements: list[str]) -> dict[str, str]:
    """The least version of each package."""
    found = {}
    for requirement in map(Requirement, requirements):
        (least,) = [one.version for one in requirement.specifier if one.operator == ">="]
        found[requirement.name] = least
    return found


NEEDED = floors(PROJECT["dependencies"])
EXTRAS = PROJECT["optional-dependencies"]
PYTHON = PROJECT["requires-python"].removeprefix(">=")
TORCH = floors(EXTRAS["torch"])["torch"]
BUILD = floors(WHOLE["build-system"]["requires"])["hatchling"]


def release() -> str:
    """The newest one of the changelog."""
    found = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found
    return found[1]


class SpackPackage:
    """Spack's package, read without Spack."""

    def __init__(self, name: str = "py_jurymast") -> None:
        tree = ast.parse((SPACK / "packages" / name / "package.py").read_text())
        (self.made,) = (node for node in tree.body if isinstance(node, ast.ClassDef))

    def said(self, directive: str) -> list[tuple[list[Any], dict[str, Any]]]:
        """The arguments of each directive of this name."""
        calls = [node.value for node in self.made.body if isinstance(node, ast.Expr)]
        return [
            (
                [ast.literal_eval(one) for one in call.args],
                {one.arg or "": ast.literal_eval(one.value) for one in call.keywords},
            )
            for call in calls
            if isinstance(call, ast.Call) and ast.unparse(call.func) == directive
        ]

    def value(self, name: str) -> Any:
        (found,) = (
            node.value
            for node in self.made.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
        return ast.literal_eval(found)


def test_spack_s_package_needs_what_we_need() -> None:
    package = SpackPackage()
    needed = {}
    for (spec,), options in package.said("depends_on"):
        name, _, versions = spec.partition("@")
        needed[name] = (versions.removesuffix(":"), options)
        assert versions.endswith(":"), "a least version"
    python, _ = needed.pop("python")
    hatchling, when = needed.pop("py-hatchling")
    torch, _ = needed.pop("py-torch")
    nvml, only = needed.pop("py-nvidia-ml-py")
    assert (python, hatchling, when["type"], torch) == (PYTHON, BUILD, "build", TORCH)
    assert (nvml, only["when"]) == (floors(EXTRAS["nvidia"])["nvidia-ml-py"], "+nvidia")
    assert {name.removeprefix("py-"): least for name, (least, _) in needed.items()} == NEEDED
    assert all("run" in options["type"] for _, options in needed.values())
    assert [words for words, _ in package.said("version")] == [[release()]]
    assert package.value("pypi") == f"jurymast/jurymast-{release()}.tar.gz"
    assert [words for words, _ in package.said("license")] == [[PROJECT["license"]]]
    modules = package.value("import_modules")
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    assert subprocess.run(command, cwd="/", check=False, timeout=60).returncode == 0
    assert yaml.safe_load((SPACK / "repo.yaml").read_text())["repo"]["namespace"] == SPACK.name


@pytest.mark.parametrize("name", ["msgspec", "submitit"])
def test_what_spack_lacks_is_new_enough(name: str) -> None:
    package = SpackPackage(f"py_{name}")
    (((version,), options),) = package.said("version")
    assert Version(version) >= Version(NEEDED[name])
    assert re.fullmatch(r"[0-9a-f]{64}", options["sha256"])
    assert package.value("pypi") == f"{name}/{name}-{version}.tar.gz"


def test_conda_s_recipe_needs_what_we_need() -> None:
    recipe = yaml.safe_load((SITE / "recipe.yaml").read_text())
    assert recipe["context"] == {"version": release(), "python_min": PYTHON}
    host, run = recipe["requirements"]["host"], recipe["requirements"]["run"]
    assert run[0] == "python >=${{ python_min }}"
    assert sorted(run[1:]) == sorted(
        f"{IN_CONDA.get(name, name)} >={least}" for name, least in NEEDED.items()
    )
    assert host == ["python ${{ python_min }}.*", "pip"]
    assert recipe["requirements"]["run_constraints"] == [f"pytorch >={TORCH}"]
    scripts = [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    # What `make package` makes: a source of git's own files would lack its manual pages and completions.
    wheel, license_file = ((SITE / source["path"]).resolve() for source in recipe["source"])
    assert (wheel, license_file) == (ROOT / "dist", ROOT / recipe["about"]["license_file"])
    assert recipe["source"][0]["use_gitignore"] is False
    assert recipe["about"]["license"] == PROJECT["license"]
    assert (ROOT / recipe["about"]["license_file"]).is_file()
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_the_easyconfig_names_what_we_need() -> None:
    text = (SITE / "jurymast.eb").read_text()
    assert re.search(rf"^version = '{re.escape(release())}'$", text, re.MULTILINE)
    told = re.search(r"would get: ([\w, #\n]+)\.", text)
    assert told
    assert set(re.findall(r"\w+", told[1])) == set(NEEDED)
    torch = re.search(r"\('PyTorch', '([\d.]+)'", text)
    hatchling = re.search(r"\('hatchling', '([\d.]+)'", text)
    assert torch
    assert hatchling
    assert Version(torch[1]) >= Version(TORCH)
    assert Version(hatchling[1]) >= Version(BUILD)


def images() -> dict[str, tuple[str, str, str]]:
    """By recipe: the image below, the extras, and the wheel."""
    docker, apptainer = (SITE / "Dockerfile").read_text(), (SITE / "jurymast.def").read_text()
    found = {}
    for name, text, patterns in (
        ("Dockerfile", docker, (r"^ARG BASE=(\S+)$", r"^ARG EXTRAS=(\S+)$", r"^COPY (\S+) ")),
        ("jurymast.def", apptainer, (r"^    base=(\S+)$", r"^    extras=(\S+)$", r"^%files\n    (\S+) ")),
    ):
        told = [re.findall(pattern, text, re.MULTILINE) for pattern in patterns]
        assert [len(one) for one in told] == [1, 1, 1], name
        found[name] = (told[0][0], told[1][0], told[2][0])
    return found


def test_the_images_are_the_same() -> None:
    docker, apptainer = images().values()
    assert docker == apptainer


@pytest.mark.parametrize("name", ["Dockerfile", "jurymast.def"])
def test_an_image_has_what_we_need(name: str) -> None:
    base, extras, wheel = images()[name]
    torch = re.search(r"pytorch:(\d+\.\d+)", base)
    assert torch
    assert Version(torch[1]) >= Version(TORCH)
    assert set(extras.split(",")) <= set(EXTRAS)
    # What `make package` makes.
    assert re.fullmatch(r"dist/jurymast-\*\.whl", wheel)
    text = (SITE / name).read_text()
    assert f"/jurymast/{Path(wheel).name})[" in text, "what was copied is installed"
    named = re.findall(r"slurm/site/[\w./]+\w", text)
    assert named
    assert [file for file in named if not (ROOT / file).is_file()] == []


def test_the_page_for_sites_names_each_recipe() -> None:
    page = (ROOT / "docs" / "site.md").read_text()
    for name in ("Dockerfile", "jurymast.def", "recipe.yaml", "jurymast.eb", "jurymast.lua", "spack_repo/"):
        assert f"`{name}`" in page
        assert (SITE / name).exists()
