"""What the signal does that a job asks Slurm for before its time limit (sbatch's `--signal`). It ends what
does not catch it, and then the newest checkpoint has to be on storage before."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# Our own warning of the time limit, unless the job asks for another signal.
SLURMS_WARNING = signal.SIGUSR2
# Sent without a time, it comes this long before the limit.
DEFAULT_S = 60.0
# What the batch process, the supervisor and the agents take for no more than a warning. SIGTERM and SIGINT
# mean an end only if Slurm says that it ends the job.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
CAUGHT = frozenset({*WARNINGS, signal.SIGTERM, signal.SIGINT})
_STOPPING = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})


@dataclass(frozen=True)
class JobSignal:
    """`seconds` before the time limit, or up to a minute earlier, Slurm sends this signal: to the batch
    script alone (`to_batch`), or to all processes of the job's steps."""

    number: int
    seconds: float
    to_batch: bool

    @classmethod
    def read(cls, text: str | None) -> JobSignal | None:
        """Read sbatch's `[{R|B}:]signal[@seconds]`; None for what sbatch itself refuses."""
        found = re.fullmatch(r"(?:([RB]+):)?(\w+)(?:@(\d+))?", text or "", re.IGNORECASE)
        number = _number(found[2]) if found is not None else None
        if found is None or number is None:
            return None
        return cls(number, float(found[3] or DEFAULT_S), "B" in (found[1] or "").upper())

    @property
    def name(self) -> str:
        try:
            return signal.Signals(self.number).name.removeprefix("SIG")
        except ValueError:
            return str(self.number)

    def ends_in(self, script: str | None) -> bool:
        """Whether it may end something of the run: of a plain one, or of the batch script with this text."""
        if self.number in _HARMLESS:
            return False
        return script is not None or not self.to_batch or self.number not in CAUGHT

    def told(self, script: str | None) -> str:
        """Say what will happen, as for `ends_in`; "" if nothing will that the job did not ask for."""
        when, kind = f"{self.seconds:.0f} s before the time limit", "stops" if self._stops else "ends"
        if self.number in _HARMLESS or (self.to_batch and script is None and self.number in WARNINGS):
            return ""
        if not self.to_batch:
            who = "all processes of the ranks" + (
                "" if self.number in CAUGHT else " and of jurymast's agents"
            )
            catch = (
                "" if self.number in (signal.SIGKILL, signal.SIGSTOP) else f" that do not catch {self.name}"
            )
            again = ", and the ranks are started again" if self.number in CAUGHT else ""
            return f"{when} it {kind} {who}{catch}; the run saves before{again}; B:{self.name} spares them"
        if script is not None:
            if _traps(script, self.name, self.number):
                return ""
            untrapped = f"the script, in which there is no trap for {self.name}"
            return f"{when} it {kind} {untrapped}; its trainings save before"
        if self.number in CAUGHT:
            return "it does not end the run, which saves before, and goes on to the time limit"
        return f"{when} it {kind} the batch process, and with it the job; the run saves before"

    @property
    def _stops(self) -> bool:
        return self.number in _STOPPING


def _number(text: str) -> int | None:
    if text.isdigit():
        return int(text) if 0 < int(text) < signal.NSIG else None
    named = getattr(signal, "SIG" + text.upper().removeprefix("SIG"), None)
    return int(named) if isinstance(named, signal.Signals) else None


def _traps(script: str, name: str, number: int) -> bool:
    """Whether a line of the script sets a trap for this signal, as far as its text shows."""
    return re.search(rf"^[^#\n]*\btrap\b.*\b(SIG)?({name}|{number})\b", script, re.MULTILINE) is not None
