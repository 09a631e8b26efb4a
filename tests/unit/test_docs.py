"""What the documents point to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import jurymast
from jurymast.core.state import messages, within
from jurymast.core.state.host_messages import FromHosts, HostOrder
from jurymast.core.state.incident import CAUSES
from jurymast.keeper import transfer
from jurymast.storage import orders

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "launcher" / "jurymast"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MAPS = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", BLOCK.sub("", document.read_text()))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", MAPS, ids=lambda path: path.name)
def test_files_that_decide_something_are_where_the_map_says(document: Path) -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", BLOCK.sub("", document.read_text()))
    assert len(named) > 10
    assert [path for path in named if not (PACKAGE / path).exists() and not (ROOT / path).exists()] == []


@pytest.mark.torch
def test_what_scripts_are_told_to_use_is_there() -> None:
    named = {name for page in DOCUMENTS for name in re.findall(r"\bjurymast\.([A-Z]\w*)", page.read_text())}
    assert {"Checkpointer", "RandomState"} <= named
    assert [name for name in named if not hasattr(jurymast, name)] == []


def test_every_attack_that_is_listed_has_its_test() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 25
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


def test_who_is_on_call_finds_every_cause() -> None:
    page = (ROOT / "docs" / "on-call.md").read_text()
    rows = [
        f"| `{one.name}` | {one.meaning} | {one.charged} | {one.todo or 'nothing'} |"
        for one in CAUSES.values()
    ]
    assert [row for row in rows if row not in page] == []


def test_the_table_of_messages_has_all_and_no_others() -> None:
    page = (ROOT / "docs" / "messages.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    readers = (messages.Said, messages.Order, messages.Answer, FromHosts, HostOrder, within.FromRanks)
    apart = (orders.Told, orders.Answer | orders.Reached | orders.Progress, transfer.Request, transfer.Served)
    kinds = {kind.__name__ for union in (*readers, *apart) for kind in get_args(union)} - {"Unreadable"}
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == kinds


def test_the_documents_make_a_site(tmp_path: Path) -> None:
    """Strictly: every page is in its contents, every link and anchor leads somewhere."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages == {path.parent.name for path in tmp_path.glob("*/index.html")}
