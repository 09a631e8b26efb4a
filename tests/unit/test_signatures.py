"""When is an error the same as an earlier one? Its text comes from outside."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from jurymast.core.checkpoints.copies import Retries
from jurymast.core.judges.attribution import attribute
from jurymast.core.judges.loops import repeats
from jurymast.core.state.events import WorkerFailed
from jurymast.core.state.incident import Incident
from jurymast.core.state.signatures import ErrorSignature, Signature, error_signature
from support.attribution import found

CALL = '  File "/tmp/run-4711/train.py", line 12, in <module>\n    main()\n'
RAISED = '  File "/tmp/run-4711/data.py", line 30, in load\n    raise ValueError(path)\n'


def test_an_error_is_its_class_its_message_and_the_frame_that_raised_it() -> None:
    told = f"Traceback (most recent call last):\n{CALL}{RAISED}ValueError: shard 17 of 0x7f3a\n"
    found = error_signature("ValueError", "shard 17 of 0x7f3a", told)
    assert found == ErrorSignature("ValueError", "shard # of #", "/tmp/run-#/data.py", 30)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("connect to [10.0.0.7]:4711 failed", "connect to [10.0.0.9]:47 failed"),
        ("/scratch/tmp3k9x_a/step-12 is full", "/scratch/tmp71bb/step-900 is full"),
        ("not written after 31 s", "not written after 302 s"),
    ],
)
def test_what_differs_each_time_makes_no_other_error(one: str, other: str) -> None:
    assert error_signature("OSError", one) == error_signature("OSError", other)


@pytest.mark.parametrize(
    "other",
    [
        error_signature("KeyError", "no shard", RAISED),
        error_signature("ValueError", "no such shard", RAISED),
        error_signature("ValueError", "no shard", RAISED.replace("line 30", "line 31")),
        error_signature("ValueError", "no shard", RAISED.replace("data.py", "model.py")),
        error_signature("ValueError", "no shard"),
    ],
)
def test_class_message_file_and_line_each_make_another_error(other: ErrorSignature) -> None:
    assert error_signature("ValueError", "no shard", RAISED) != other


def test_the_frame_of_a_real_traceback_is_the_one_that_raised_last() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error
    except RuntimeError as error:
        raised_at = error.__traceback__.tb_lineno if error.__traceback__ else 0
        found = error_signature("RuntimeError", "second", traceback.format_exc())
    assert (Path(found.file).name, found.line) == (Path(__file__).name, raised_at)


@pytest.mark.parametrize(
    "told", ["", "no frames", 'File "x", line ' + "9" * 5000, 'File "x", line -1', "File\0"]
)
def test_any_text_is_taken(told: str) -> None:
    """A script may write into its error file whatever it likes."""
    assert error_signature("E", "m", told) == ErrorSignature("E", "m")


def test_a_long_word_takes_no_longer_than_a_long_text() -> None:
    """Trying a match at each character of a word would take hours."""
    told = f'  File "/tmp/{"x" * 1_000_000}", line 3, in load\n'
    assert error_signature("E", "y" * 1_000_000, told).line == 3


def failure(traceback: str, error: str = "AssertionError", message: str = "") -> WorkerFailed:
    return WorkerFailed(
        t=1.0, node="n1", attempt=1, rank=0, exit_code=1, error=error, message=message, traceback=traceback
    )


def test_assertions_in_two_places_are_no_crash_loop() -> None:
    first = attribute(found(failure(RAISED)))
    again = attribute(found(failure(RAISED)))
    other = attribute(found(failure(RAISED.replace("line 30", "line 99"))))
    past = [Incident(1, 0.0, 0.0, 1, 0, signature=cause.signature) for cause in (first, again)]
    assert repeats(past, again) == 2
    assert repeats(past, other) == 0


def test_a_lost_connection_is_the_same_wherever_the_script_was() -> None:
    def lost(place: str) -> Signature:
        error = failure(place, "RuntimeError", "Connection closed by peer [10.0.0.7]:4711")
        return attribute(found(error)).signature

    assert lost(RAISED) == lost(CALL)


def test_a_failed_write_is_news_once_for_each_reason() -> None:
    retries = Retries()
    assert retries.failed("shared", "rank 3 on n1: step 40: No space left on device", 0.0)
    assert not retries.failed("shared", "rank 1 on n2: step 60: No space left on device", 10.0)
    assert retries.failed("shared", "rank 1 on n2: step 60: Permission denied", 20.0)
    retries.succeeded("shared")
    assert retries.failed("shared", "rank 1 on n2: step 80: Permission denied", 30.0)
