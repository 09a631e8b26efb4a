"""What is a rank's own, on its way to a rank of another node and back."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from jurymast.checkpoint import RandomState, ward
from jurymast.errors import CheckpointError

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "pass_records.py"


def test_plain_records_come_back_as_they_were() -> None:
    value = {
        "random": RandomState().state_dict(), "weights": torch.arange(6.0).view(2, 3), "none": None,
        "half": torch.ones(2, dtype=torch.bfloat16), "nothing": torch.empty(0, 3), "kind": torch.float16,
        "ordered": OrderedDict(a=1, b=(2.5, "x")), "milestones": Counter([10, 30]), "last": deque([1], 4),
        "counts": numpy.arange(3, dtype=numpy.int16),
    }  # fmt: skip
    back = ward.plain_loads(ward.dumps(value))
    assert back["random"]["python"] == value["random"]["python"]
    assert torch.equal(back["random"]["torch"], value["random"]["torch"])
    assert back["random"]["numpy"][0] == value["random"]["numpy"][0]
    assert (back["random"]["numpy"][1] == value["random"]["numpy"][1]).all()
    assert torch.equal(back["weights"], value["weights"])
    assert (back["milestones"], back["last"]) == (value["milestones"], value["last"])
    assert back["half"].dtype == torch.bfloat16
    assert back["nothing"].shape == (0, 3)
    assert (back["kind"], back["ordered"], back["counts"].tolist()) == (
        torch.float16, value["ordered"], [0, 1, 2],
    )  # fmt: skip
    back["counts"][0] = 7  # it can be written
    assert ward.why_not_passed(ward.dumps(value)) == ""


class Calls:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_nothing_is_called_that_comes_from_another_rank(tmp_path: Path) -> None:
    evil = pickle.dumps({"a": Calls(str(tmp_path / "made"))})
    for data in (evil, b"", evil[:-3], pickle.dumps(torch.load), pickle.dumps(getattr)):
        with pytest.raises(CheckpointError, match="cannot be taken from another rank"):
            ward.plain_loads(data)
    assert not (tmp_path / "made").exists()


def test_records_that_are_no_plain_values_or_too_long_are_not_passed_on() -> None:
    assert "pathlib" in ward.why_not_passed(ward.dumps({"path": Path("x")}))
    assert "bytes" in ward.why_not_passed(ward.dumps(b"x" * (ward.PASSED_BYTES_MAX + 1)))
    assert ward.why_not_passed(b"") == ""


@pytest.mark.parametrize(
    ("passing", "taking", "told"),
    [
        ("key", "key", ["[5, 6]", "1 after 6"]),
        ("key", "another", ["[5, 6]", "rank 0 sent no record of rank 1 after step 6"]),
        ("another", "another", ["[]"]),
    ],
    ids=["all-know-the-key", "what-comes-back-is-not-vouched-for", "what-is-passed-on-is-not-vouched-for"],
)
def test_only_who_knows_the_key_can_make_a_record(
    tmp_path: Path, passing: str, taking: str, told: list[str]
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(tmp_path / "store"), *keys],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, keys in enumerate([("key", "key"), (passing, taking)])
    ]  # fmt: skip
    (first, first_said), (second, second_said) = (one.communicate(timeout=120) for one in ranks)
    assert (first.splitlines(), second.splitlines()) == (told[:1], told), first_said + second_said


def arrived(one: ward.Ward, sender: ward.Ward, cut_after: int | None = None) -> None:
    """What `sender` has sent comes to `one`, or only its first bytes."""
    one._in[:cut_after] = sender._out[:cut_after]
    one._keep()


def test_the_last_two_whole_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("isend", "irecv"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    one, other = ward.Ward(b"key"), ward.Ward(b"key")
    one.begin(0, 1, [100, 100])
    other.begin(1, 1, [100, 100])
    assert one.rank == 1
    for step in (4, 5, 6):
        other._works = []
        other.pass_on(step, f"of {step}".encode() * 10)
        arrived(one, other)
    assert sorted(one.steps) == [5, 6]
    other._works = []
    other.pass_on(7, b"of 7, and of nothing else!" * 2)
    arrived(one, other, cut_after=50)
    assert sorted(one.steps) == [5, 6], "half of a record is none"
    other._works = []
    other.pass_on(8, b"")
    arrived(one, other)
    other._works = []
    other.pass_on(9, b"x" * 100_000)
    arrived(one, other)
    assert sorted(one.steps) == [5, 6], "those are none"
    one.keep_only(5)
    assert one.steps == (5,)
    one.begin(0, 1, [100, 100])
    assert one.steps == (5,), "still of the same rank"
    one.begin(1, 1, [100, 100])
    assert not one.steps
