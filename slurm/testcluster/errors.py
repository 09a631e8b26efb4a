"""What this package raises."""

from __future__ import annotations


class ClusterError(Exception):
    """The test cluster cannot do what was asked; the message is one line for the user."""


class DeadlineError(ClusterError):
    """What was waited for did not happen in time."""
