"""What a probe found on a node, in the form that decisions read. A finding states facts; the state machine
decides."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """`bad`: leaves the run at once. `suspect`: becomes a spare, and is tested before it is used again. `ok`
    after one of these: the finding is gone. `unknown`: could not be determined, and has no consequence."""

    OK = "ok"
    UNKNOWN = "unknown"
    SUSPECT = "suspect"
    BAD = "bad"


# Whose fault a finding shows. Only HARDWARE, NETWORK and HOST can make a node leave; the others help to name
# the cause of a failure that exists anyway.
HARDWARE = "hardware"  # GPU, its memory, its links, PCIe, heat and power
NETWORK = "network"  # a network device of this node
HOST = "host"  # the rest of the machine: driver, memory, disk, clock
STORAGE = "storage"  # paths that several nodes share: never one node's fault
APPLICATION = "application"  # the user's code: an illegal address, out of memory
SYMPATHETIC = "sympathetic"  # a GPU's report after another GPU or node failed
# The code for what a probe lacks the rights or the means to look at, so that it is never reported as "none
# seen".
NOT_OBSERVABLE = "not-observable"
KINDS = (HARDWARE, NETWORK, HOST, STORAGE, APPLICATION, SYMPATHETIC)


# A time beyond this, in seconds since the epoch, is no time.
AT_MAX = 1e12
MESSAGE_MAX, NAME_MAX = 500, 100  # characters
CUT = " [cut]"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of a probe. `code` names it in tables and for counting ("xid-79", "ecc-uncorrectable",
    "ib-link-down", "oom-kill"); `device` is "" or the affected part ("gpu3", "mlx5_0", "/scratch"), `unit` a
    unit of that part, if known ("GPC 1, TPC 3").

    Equal (probe, code, device) is the same finding. `at`: when it happened, seconds since the epoch. `once`:
    an event (a Xid), which has happened and is not over when the next look does not report it again.
    """

    probe: str
    code: str
    verdict: Verdict
    kind: str
    message: str
    device: str = ""
    at: float = 0.0
    once: bool = False
    unit: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}

    def bounded(self) -> Finding:
        """The finding with texts of at most MESSAGE_MAX and NAME_MAX characters, which say if they were
        cut."""
        return replace(
            self, message=_cut(self.message, MESSAGE_MAX), probe=_cut(self.probe, NAME_MAX),
            code=_cut(self.code, NAME_MAX), device=_cut(self.device, NAME_MAX),
            unit=_cut(self.unit, NAME_MAX),
        )  # fmt: skip

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            found = cls(**{**values, "verdict": Verdict(values["verdict"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no finding: {error}") from error
        texts = (found.probe, found.code, found.message, found.device, found.unit)
        if not (
            all(isinstance(text, str) for text in texts)
            and type(found.at) in (int, float)
            and 0 <= found.at <= AT_MAX  # false for NaN
            and type(found.once) is bool
        ):
            raise ValueError(f"no finding: a value of the wrong type in {values}")
        return found


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - len(CUT)] + CUT
