"""Every error that jurymast raises on purpose, with the exit code that it gives the command.

The application's own exit codes (1..63, 128+signal) pass through, so ours start at 64. Where sysexits.h has a
code for the meaning, we use it.
"""

from __future__ import annotations

from typing import NoReturn

OTHER_VERSION_HINT = "use the jurymast that the run was submitted with"


class JurymastError(Exception):
    """Base class of jurymast's errors. `hint` says what to do next. Message and hint are shown on one line
    each."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(JurymastError):
    """The command line is wrong: an unknown option, a wrong value, or options that contradict each other."""

    exit_code = 64


class PolicyError(JurymastError):
    """A policy file is wrong; the message names every file, line and key at fault."""

    exit_code = 65


class ScriptError(JurymastError):
    """The training script is missing or cannot be read, or the torch that would run it is missing."""

    exit_code = 66


class RunNotFoundError(JurymastError):
    """There is no run with this id, Slurm job id or directory."""

    exit_code = 67


class ClusterUnavailableError(JurymastError):
    """Slurm is missing or does not answer."""

    exit_code = 69


class ControllerAwayError(ClusterUnavailableError):
    """slurmctld does not answer at the moment, as during a restart or a fail-over. A later request may
    succeed."""


class RunDirectoryError(JurymastError):
    """The runs directory cannot be written, or a run's directory is damaged, another user's or readable by
    others."""

    exit_code = 73


class OtherJournalError(RunDirectoryError):
    """A run's journal is of another `version` than this jurymast reads."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message, hint=OTHER_VERSION_HINT)
        self.version = version


class NotNowError(JurymastError):
    """The run cannot do this now: it is starting, it has ended, or no supervisor answers."""

    exit_code = 74


class SubmissionError(JurymastError):
    """Slurm refused the job; the message is Slurm's own."""

    exit_code = 75


class ProtocolError(JurymastError):
    """A peer spoke another protocol version or sent a malformed frame."""

    exit_code = 76


class OtherProtocolError(ProtocolError):
    """A peer speaks another version of our protocol."""


class AuthenticationError(JurymastError):
    """A connection did not prove that it knows the run's secret."""

    exit_code = 77


class CheckpointError(JurymastError):
    """The checkpoint does not exist or cannot be read, none of several can be read, or a save failed."""

    exit_code = 78


class RunFailedError(JurymastError):
    """The run ended in failure without an application exit code of its own (lost nodes, budget spent)."""

    exit_code = 79


class RunCancelledError(JurymastError):
    """Somebody cancelled the run."""

    exit_code = 80


def never(value: NoReturn) -> NoReturn:
    """Ends a `match` over a union, so that mypy finds a kind that was forgotten."""
    raise AssertionError(f"nobody handles {value!r}")
