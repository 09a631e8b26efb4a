"""What ranks tell each other about checkpoints comes as it was told, and nothing of it is unpickled."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.checkpoint.directory import BadCheckpoint, CheckpointManifest, FileRecord
from jurymast.checkpoint.group import Candidate, SaveResult, from_bytes, to_bytes
from jurymast.errors import CheckpointError

RECORD = FileRecord("__0_0.distcp", 7, "0" * 16, 3)
TOLD: list[Any] = [
    None, True, 3, -1.5, "text \udc80", [], (), {}, (1, [2, (3,)], {"a": {"b": None}}), {5: "damaged"},
    RECORD, CheckpointManifest(1, 2, 3, "2.13.0", (RECORD,), {"net": {"per_rank": False}}),
    [Candidate(1, 2, 3, {"x": {"kind": "y"}})], SaveResult(ok=False, error="why"), ([RECORD], {"x": {}}),
]  # fmt: skip


@pytest.mark.parametrize("value", TOLD, ids=lambda value: type(value).__name__)
def test_values_come_as_they_were_told(value: Any) -> None:
    assert from_bytes(to_bytes(value)) == value


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left", "/a"), PermissionError(13, "Permission denied"), OSError("odd"),
        CheckpointError("what", hint="todo"), BadCheckpoint("what"), RuntimeError("what"), KeyError("x"),
    ],
    ids=repr,
)  # fmt: skip
def test_whoever_catches_an_error_here_catches_it_there(error: Exception) -> None:
    told: Any = from_bytes(to_bytes((None, error)))[1]
    if isinstance(error, OSError):
        assert isinstance(told, OSError)
        assert (told.errno, told.filename) == (error.errno, error.filename)
        return
    assert isinstance(told, CheckpointError)
    if isinstance(error, CheckpointError):
        assert (str(told), told.hint) == (str(error), error.hint)
    else:
        assert type(error).__name__ in str(told)


def test_what_is_no_value_of_ours_is_neither_told_nor_taken() -> None:
    with pytest.raises(TypeError):
        to_bytes(object())
    for data in (
        pickle.dumps(print),
        b'["os.system", "true"]',
        b'["CheckpointManifest"]',
        b"[" * 100_000,
        b'["dict", 1]',
    ):
        with pytest.raises(CheckpointError):
            from_bytes(data)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=100))
def test_noise_is_refused_in_words(data: bytes) -> None:
    try:
        from_bytes(data)
    except CheckpointError as error:
        told = str(error)
        assert told
