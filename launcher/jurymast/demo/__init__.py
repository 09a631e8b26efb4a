"""The demo: starts a run, kills a rank and then a node, and follows the journal and the losses. It says what
happened, when, why, and how long it took. At the end it ends all of its processes, each by its id.

The output is lines with the time since the start, and on a terminal one line that is overwritten.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import click
import psutil

from jurymast.cluster.allocation import local_process
from jurymast.cluster.planning import OwnOptions, make_plan
from jurymast.cluster.sbatch import CommandLine
from jurymast.cluster.slurm import Request, build_request, submit
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.errors import RunFailedError
from jurymast.jobs import await_ended
from jurymast.journal import Entry, FileTail
from jurymast.policy.resolve import pairs_layer, resolve
from jurymast.report.follow import ProgressLine
from jurymast.report.incidents import incident_json
from jurymast.report.sentences import sentence
from jurymast.report.status import StatusWatcher
from jurymast.report.text import clean, count, duration, some
from jurymast.rundir import RunDirectory

SCRIPT = Path(__file__).with_name("train_gpt.py")
MODULES = ("jurymast.cluster.batch", "jurymast.supervisor", "jurymast.agent")
# A batch process that is asked to end sends its agents home first.
GRACE_S = 10.0
KILL_LIMIT_S = 5.0
# A socket's address has room for 108 characters, and names below the directory need 50 of them.
TEMPORARY_CHARACTERS = 55


@dataclass(frozen=True)
class Wanted:
    """What the command line requested."""

    nodes: int
    spares: int
    steps: int

    @property
    def save_every(self) -> int:
        """The number of steps between checkpoints: 15 checkpoints in a run, at most 20 steps apart."""
        return max(1, min(20, self.steps // 15))

    @property
    def arguments(self) -> list[str]:
        every = f"{self.save_every} step{'s' if self.save_every > 1 else ''}"
        return ["--steps", str(self.steps), "--save-every", every, "--print-every", "1"]


def request_for(asked: Wanted, runs: Path, working_directory: Path) -> Request:
    """Return the request that `jurymast submit --cluster local` would make, without a site policy."""
    policy = resolve([pairs_layer("the demo", [("spares", asked.spares)])])
    plan = make_plan(
        OwnOptions(nodes=asked.nodes, nproc_per_node=1, name="demo", cluster="local", runs=runs),
        CommandLine(command=[str(SCRIPT), *asked.arguments]),
        policy,
        environment={},
        working_directory=working_directory,
        python=sys.executable,
    )
    return build_request(plan, policy)


class LocalRun:
    """The processes of one run on this machine. Their temporary files are in `temporary`, where a killed node
    leaves its own."""

    def __init__(self, request: Request, temporary: Path) -> None:
        self._request = request
        self._temporary = temporary
        self.directory = request.run_directory

    def start(self) -> None:
        """Submit the run. Raises RunDirectoryError or SubmissionError."""
        # All nodes share this machine's processors, so ranks with a thread per processor would only slow each
        # other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if len(str(self._temporary)) <= TEMPORARY_CHARACTERS:
            os.environ["TMPDIR"] = str(self._temporary)
        submit(self._request)

    def kill_rank(self, pid: int) -> None:
        """Kill a rank. Raises ProcessLookupError if it has ended or is no process of this run."""
        try:
            ours = psutil.Process(pid).environ().get("JURYMAST_RUN_DIR") == str(self.directory.root)
        except psutil.Error as error:
            raise ProcessLookupError(f"process {pid} has ended") from error
        if not ours:
            raise ProcessLookupError(f"process {pid} is not a rank of this run")
        os.kill(pid, signal.SIGKILL)

    def break_node(self, agent_pid: int) -> int:
        """Kill all processes of a node at once, and return their number.

        `agent_pid` leads the node's process group. Raises ProcessLookupError if it is gone or is not an agent
        of this run.
        """
        try:
            agent = psutil.Process(agent_pid)
            words, members = agent.cmdline(), agent.children(recursive=True)
        except psutil.Error as error:
            raise ProcessLookupError(f"agent {agent_pid} has ended") from error
        if not self._is_ours(words) or os.getpgid(agent_pid) != agent_pid:
            raise ProcessLookupError(f"process {agent_pid} is not an agent of this run")
        os.killpg(agent_pid, signal.SIGKILL)  # ranks lead sessions of their own, and go with their host
        return 1 + len(members)

    def await_end(self) -> None:
        """Return when the batch process has ended by itself, or after `GRACE_S` seconds."""
        batch = local_process(self.directory)
        if batch is not None:
            await_ended([batch.pid], GRACE_S)

    def end(self) -> None:
        """End the batch process, which ends the other processes; then kill those of the run that are left."""
        batch = local_process(self.directory)
        if batch is not None:
            with suppress(psutil.NoSuchProcess):
                batch.terminate()
            await_ended([batch.pid], GRACE_S)
        for _ in range(3):  # a process may have started another while it was being ended
            left = self._processes()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await_ended([process.pid for process in left], KILL_LIMIT_S)

    def _is_ours(self, words: list[str]) -> bool:
        return str(self.directory.root) in words and any(module in words for module in MODULES)

    def _processes(self) -> list[psutil.Process]:
        """The processes that name the run's directory in their command or environment, except those that only
        watch the run."""
        place, found = str(self.directory.root), []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                of_an_agent = process.environ().get("JURYMAST_RUN_DIR") == place
                if of_an_agent or self._is_ours(process.cmdline()):
                    found.append(process)
        return found


# In a pipe or a log, one line of progress in this time is enough.
PROGRESS_EVERY_S = 5.0


class Screen(ProgressLine):
    """Lines with the time since the start. Colors are used only on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, PROGRESS_EVERY_S)
        self._colours = self.terminal and "NO_COLOR" not in os.environ
        self.began = time.time()
        self.unicode = "utf" in (getattr(stream, "encoding", "") or "").lower()

    def say(self, text: str, t: float | None = None, style: str = "") -> None:
        lead, text = f"[{(time.time() if t is None else t) - self.began:5.1f} s]", clean(text)
        if self._colours:
            lead = click.style(lead, dim=True)
            text = click.style(text, fg=style, bold=style == "red") if style else text
        self.write(f"{lead} {text}")


def can_open_a_browser() -> bool:
    """Return whether a browser window can open: there is a display, and a user at a terminal."""
    if os.environ.get("CI") or not sys.stdout.isatty():
        return False
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin")


_LINE = re.compile(rb"step (\d+) loss (\S+)")
_WEIGHTS = re.compile(rb"weights sha256 ([0-9a-f]{64})")
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#%"


class LossCurve:
    """The losses printed so far, by attempt and step; as printed, to compare all their digits. `weights` is
    the hash printed at the end."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._tails: dict[int, FileTail] = {}
        self.losses: dict[int, dict[int, str]] = {}
        self.last: tuple[int, str] | None = None  # the newest step with its loss
        self.weights = ""

    def poll(self, attempt: int) -> None:
        """Read new lines of all attempts up to number `attempt`."""
        for number in range(1, attempt + 1):
            tail = self._tails.setdefault(number, FileTail(self._directory.rank_log(number, 0)))
            for line in tail.lines():
                if found := _LINE.match(line):
                    self.last = int(found[1]), found[2].decode()
                    self.losses.setdefault(number, {}).update([self.last])
                elif found := _WEIGHTS.match(line):
                    self.weights = found[1].decode()

    def final(self) -> dict[int, str]:
        """The loss of each step, as printed last."""
        return {step: loss for _, losses in sorted(self.losses.items()) for step, loss in losses.items()}

    def repeated(self) -> list[tuple[int, str, str]]:
        """(step, its first loss, a later one) for every step that two attempts printed."""
        first: dict[int, str] = {}
        pairs = []
        for _, losses in sorted(self.losses.items()):
            pairs += [(step, first[step], loss) for step, loss in losses.items() if step in first]
            first = losses | first
        return pairs


def blocks(values: Sequence[float], width: int, ramp: str = BLOCKS) -> str:
    """Draw `values` with at most `width` block characters; each shows the mean of its share of the values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [number * len(finite) // width for number in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(ramp) - 1) / (high - low) if high > low else 0.0
    return "".join(ramp[round((mean - low) * scale)] for mean in means)


POLL_S = 0.1
RANK_SHARE, NODE_SHARE = 0.25, 0.55  # of the run's steps, when a rank and a node are killed
FAULTS = 2
CURVE_WIDTH = 60
MARKS = {Role.ACTIVE: "●", Role.SPARE: "○", Role.JOINING: "◌", Role.SUSPECT: "◐", Role.FAILED: "✗"}
ASCII_MARKS = {Role.ACTIVE: "*", Role.SPARE: "o", Role.JOINING: ".", Role.SUSPECT: "?", Role.FAILED: "x"}
# These are shown unchanged: nothing else is expected to happen in a demo.
RESTORES = frozenset({"RestorePlanned", "Restored"})
TOLD = frozenset({"Noted", "WorkerFailed", "RanksHung", "Asked", "Signalled", "Requeue"})


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected: on which node, `at` which time (seconds since the epoch), and at which
    step; whether all of the node was killed, or a rank only."""

    node: str
    at: float
    processes: int
    step: int
    loss: str
    saved_step: int

    @property
    def victim(self) -> str:
        return self.node if self.processes > 1 else f"a rank on {self.node}"


def _repeated(incident: Incident) -> str:
    steps = incident.step_lost_from - (incident.step_restored or 0)
    return f"{count(steps, 'step')} done again" if steps > 0 else "no step done again"


class Show:
    """One run, which `run` starts and narrates until the summary."""

    def __init__(self, local: LocalRun, wanted: Wanted, screen: Screen, *, with_fault: bool) -> None:
        self._local = local
        self._wanted = wanted
        self._screen = screen
        self._with_fault = with_fault
        self._decided = 0  # incidents whose decision was told
        self._recovered = 0  # incidents whose end was told
        self._stepped = False
        self._pids: dict[str, tuple[int, ...]] = {}  # of the ranks of each node
        self.curve = LossCurve(local.directory)
        self.faults: list[InjectedFault] = []  # a rank, then a node

    @property
    def state(self) -> RunState:
        return self.watcher.state

    @property
    def shown(self) -> bool:
        """Whether a rank and a node were lost, the run recovered from both, and every step was done."""
        recovered = [incident for incident in self.state.incidents if incident.recovered_at is not None]
        return len(self.faults) == FAULTS <= len(recovered) and self.complete

    def run(self) -> None:
        """Start the run, follow it to its end, and say how it went. Raises RunFailedError if its processes
        end without an outcome, and what `submit` raises."""
        self._local.start()
        self.watcher = StatusWatcher(self._local.directory)
        self._follow()
        self._screen.close()
        self._tell_end()

    def _follow(self) -> None:
        while not self.state.ended:
            time.sleep(POLL_S)
            self._poll()
            if self._fault_is_due():
                self._strike()
            self._screen.show(self._progress())
            if self.watcher.gone():
                self._poll()
                if not self.state.ended:
                    raise RunFailedError(
                        "the run's processes ended without an outcome",
                        hint=f"their logs are in {self._local.directory.root}",
                    )
        self.curve.poll(self.state.attempt)

    def _poll(self) -> None:
        entries = self.watcher.poll()
        self.curve.poll(self.state.attempt)
        for entry in entries:
            self._tell(entry)
        self._tell_decisions()
        self._tell_recoveries()

    # The story.

    def _tell(self, entry: Entry) -> None:
        kind = entry.get("decision") or entry.get("event")
        if kind in ("Launch", "Requeue"):  # the reason comes before what was done about it
            self._tell_decisions()
        if kind == "AllocationStarted":
            nodes = some(entry["nodes"])
            self._say(entry, f"agents start on {nodes}: each is a process group that stands for a node")
        elif kind == "Launch":
            self._tell_launch(entry)
        elif kind == "Progress" and not self._stepped:
            self._stepped = True
            self._say(entry, "the first step is done", style="green")
        elif kind == "WorkersStarted":
            self._pids[entry["node"]] = tuple(entry["pids"])
        elif kind == "NodeLost":
            after = f", {duration(entry['t'] - self.faults[-1].at)} later" if self.faults else ""
            self._say(entry, f"detected{after}: {sentence(entry)}", style="yellow")
        elif kind in TOLD or (kind in RESTORES and entry["step"]) or (kind == "Saved" and not entry["ok"]):
            self._say(entry, sentence(entry))

    def _tell_launch(self, entry: Entry) -> None:
        placed = list(entry["placement"])
        spares = [node.name for node in self.state.spare_nodes() if node.name not in placed]
        if entry["attempt"] == 1:
            kept = f"; {some(spares)} kept as spare" if spares else ""
            text = f"nodes are ready, with torch loaded: the ranks start on {some(placed)}{kept}"
        else:
            text = f"attempt {entry['attempt']} starts on {some(placed)}"
        self._say(entry, text)

    def _say(self, entry: Entry, text: str, style: str = "") -> None:
        self._screen.say(text, t=entry["t"], style=style)

    def _tell_decisions(self) -> None:
        for incident in self.state.incidents[self._decided :]:
            if incident.decided_at is None:
                return
            self._decided += 1
            self._screen.say(f"decided: {incident.action}. Why: {incident.reason}", t=incident.decided_at)

    def _tell_recoveries(self) -> None:
        for incident in self.state.incidents[self._recovered :]:
            if incident.recovered_at is None:
                return
            self._recovered += 1
            seconds = incident.seconds()
            parts = ", ".join(f"{name} {duration(s)}" for name, s in seconds.items() if s >= 0.001)
            self._screen.say(
                f"training is beyond step {incident.step_lost_from} again, "
                f"{duration(sum(seconds.values()))} after the fault ({parts}); {_repeated(incident)}",
                t=incident.recovered_at, style="green",
            )  # fmt: skip

    def _progress(self) -> str:
        state, last = self.state, self.curve.last
        marks = MARKS if self._screen.unicode else ASCII_MARKS
        nodes = " ".join(f"{marks[node.role]}{name}" for name, node in state.nodes.items())
        if last is None:
            return f"{state.public_state}  {nodes}"
        step, loss = last
        pace = f"  {duration(state.step_s)} a step" if state.step_s else ""
        saved = f"  saved {state.saved_step}" if state.saved_step is not None else ""
        done = f"step {step}/{self._wanted.steps}  loss {loss}"
        return f"{state.public_state}  {done}{pace}{saved}  {nodes}"

    # The faults.

    def _fault_is_due(self) -> bool:
        """Whether to inject the next fault: some steps after a checkpoint, so that steps would have to be
        repeated if the ranks restarted."""
        state, last = self.state, self.curve.last
        if not self._with_fault or len(self.faults) == FAULTS or last is None or state.saved_step is None:
            return False
        if state.phase is not Phase.RUNNING or state.incident is not None:
            return False
        share = NODE_SHARE if self.faults else RANK_SHARE
        due, every = share * self._wanted.steps, self._wanted.save_every
        step, _ = last
        after_save = step - state.saved_step >= max(1, every // 2)
        return step >= due and (after_save or step >= due + every)

    def _strike(self) -> None:
        state, last = self.state, self.curve.last
        assert last is not None
        assert state.saved_step is not None
        step, loss = last
        whole = bool(self.faults)
        node = state.placement[min(1, len(state.placement) - 1) if whole else -1]
        at, processes = time.time(), 1
        try:
            if whole:
                processes = self._local.break_node(state.nodes[node].pid)
            else:
                self._local.kill_rank(self._pids[node][-1])
        except ProcessLookupError as error:
            raise RunFailedError(f"{node} cannot be broken: {error}") from error
        self.faults.append(InjectedFault(node, at, processes, step, loss, state.saved_step))
        text = f"a rank on {node} is killed, with kill -9,"
        if whole:
            text = f"{node} dies, as in a power cut: kill -9 to all {processes} of its processes,"
        self._screen.say(
            f"FAULT: {text} at step {step}, loss {loss}; the newest checkpoint is of step {state.saved_step}",
            t=at, style="red",
        )  # fmt: skip

    # The end.

    def _tell_end(self) -> None:
        """Print the loss curve, and whether anything was lost."""
        state, write = self.state, self._screen.write
        word = state.phase.value
        why = f", {state.end_reason}" if state.end_reason and word != "succeeded" else ""
        self._screen.say(
            f"the run {word}: {len(self.curve.final())} of {self._wanted.steps} steps, "
            f"{count(len(state.incidents), 'incident')}{why}",
            t=state.ended_at, style="green" if word == "succeeded" else "red",
        )  # fmt: skip
        if word != "succeeded":
            for line in "\n".join(incident.traceback for incident in state.incidents[-1:]).splitlines():
                write(f"  {line}")
            return
        write("")
        for line in [*self._drawing(), *self.findings()]:
            write(line)
        if self.curve.weights:
            write(f"sha256 of the weights: {self.curve.weights}")

    def _drawing(self) -> list[str]:
        """The losses by step, with a mark under the step of each fault."""
        final = self.curve.final()
        if len(final) < 2:
            return []
        steps, values = list(final), list(map(float, final.values()))
        drawn = blocks(values, CURVE_WIDTH, BLOCKS if self._screen.unicode else ASCII_BLOCKS)
        lead = f"loss {values[0]:.2f} "
        lines = [f"{lead}{drawn} {values[-1]:.2f}"]
        for fault in self.faults:
            place = sum(1 for step in steps if step <= fault.step) * len(drawn) // (len(steps) + 1)
            lines.append(f"{' ' * (len(lead) + place)}^ {fault.victim} died here, at step {fault.step}")
        return lines

    def findings(self) -> list[str]:
        """Return sentences on what each fault cost, and what the losses show."""
        if not self.faults:
            return []
        lines = []
        for fault, incident in zip(self.faults, self.state.incidents, strict=False):
            step = fault.step + 1
            after = self.curve.final().get(step)
            if incident.step_restored is not None and after is not None:
                lines.append(
                    f"{fault.victim}: {incident.action}, {duration(sum(incident.seconds().values()))}, "
                    f"{_repeated(incident)}; loss {fault.loss} at step {fault.step}, just before; resumed "
                    f"from step {incident.step_restored}; loss {after} at step {step}"
                )
        pairs = self.curve.repeated()
        if pairs:
            equal = sum(before == again for _, before, again in pairs)
            same = "the same loss to the last digit" if equal == len(pairs) else f"{equal} with the same loss"
            again = " to ".join(dict.fromkeys((str(pairs[0][0]), str(pairs[-1][0]))))
            lines.append(f"{count(len(pairs), 'step')} done again ({again}): {same}")
        if self.complete:
            lines.append(f"nothing was lost: all {self._wanted.steps} steps are in the result")
        return lines

    @property
    def complete(self) -> bool:
        """Whether every step from the first to the last was done."""
        return sorted(self.curve.final()) == list(range(1, self._wanted.steps + 1))

    def to_json(self) -> dict[str, Any]:
        state, final, pairs = self.state, self.curve.final(), self.curve.repeated()
        return {
            "run": state.run, "state": state.phase.value, "exit_code": state.exit_code,
            "nodes": self._wanted.nodes, "spares": self._wanted.spares,
            "steps": self._wanted.steps, "steps_done": len(final), "complete": self.complete,
            "seconds": round(time.time() - self._screen.began, 3),
            "fault": asdict(self.faults[1]) if len(self.faults) > 1 else None,
            "rank_fault": asdict(self.faults[0]) if self.faults else None,
            "incidents": [incident_json(incident) for incident in state.incidents],
            "losses": [[step, float(loss)] for step, loss in final.items()],
            "steps_repeated": len(pairs),
            "steps_repeated_equal": sum(before == again for _, before, again in pairs),
            "weights_sha256": self.curve.weights or None,
        }  # fmt: skip
