"""What a rank finds when it begins is what it finds under torchrun, but for what is listed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.harness import RANKS, Case, run_both
from jurymast.worker.stack_signal import NUMBER

pytestmark = pytest.mark.torch

LAUNCHERS = ("torchrun", "jurymast")
Found = dict[str, list[dict[str, Any]]]  # what each rank has found, by launcher

# What differs, as patterns for the whole of a place, and why.
KNOWN = {
    # How a rank and its agent find each other. A script may ask for them, none that knows torchrun does.
    r"(.*\.)?environ[.\[]JURYMAST_[A-Z_]+\]?": "the line to the agent",
    # Where a run on several interfaces, or on none but this machine's own, finds its other ranks.
    r"(.*\.)?environ[.\[]GLOO_SOCKET_IFNAME\]?": "the local cluster's only interface",
    r"(.*\.)?environ[.\[]TORCH_(FR_[A-Z_]+|NCCL_DUMP_ON_TIMEOUT|NCCL_DEBUG_INFO_(PIPE|TEMP)_FILE)\]?":
        "torch's record of collectives, for evidence of a hang",
    # Values that no two runs of torchrun share either, or that tell of who restarts ranks.
    r"environ\.(MASTER_ADDR|MASTER_PORT|TORCHELASTIC_RUN_ID|TORCHELASTIC_ERROR_FILE|_)": "another run",
    r"environ\.TORCHELASTIC_MAX_RESTARTS": "the supervisor counts restarts, torch's agent does not",
    r"process\.oom": "where memory runs out, ranks are ended before their agent",
    r"process\.descriptors\.\d{3,}": "the file that stacks are written to; high, so that no script's moves",
    r"process\.status\.SigCgt": "the signal that stacks are asked for with: see test_one_signal_more",
    r"process\.descriptors\.[12]\.0": "one log for both streams, not a file for each",
    r"python\.streams\.[12]\.(8|11)": "a subclass of FileIO that survives a full disk",
    r"(python|identity|children\.fork)\.meta_path\[Hidden\]": "what makes torch appear when it is imported",
    r"children\.fork\.jurymast\[jurymast.*\]": "a fork has its parent's modules, jurymast's hooks among them",
    r"(torch|python)\.loggers\[.*\]": "loggers of what is hidden; switched on again by its import",
    r"python\.exits": "exit handlers of what is hidden",
    # Names without a file, which cannot be imported: multiprocessing and compiled extensions set them.
    r"modules\[(__mp_main__|cython_runtime|_cython_\w+)\]": "set by modules that are hidden",
    r"torch\.modules\[torchgen.*\]": "hidden until it is imported by that name; torch has it already",
}  # fmt: skip
# Each process draws its own.
OWN = ("seed", "draws", "authkey", "name")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, session_folder: Path) -> Found:
    """What each rank has found, by launcher."""
    case = Case("probe", ("probe.py",), ("probe.py", "an argument"))
    told: Found = {}
    outcomes = run_both(case, tmp_path_factory.mktemp("probe"), session_folder)
    for launcher, outcome in zip(LAUNCHERS, outcomes, strict=True):
        texts = [(outcome.work / f"found-{rank}.json").read_text() for rank in range(RANKS)]
        told[launcher] = [json.loads(text.replace(str(outcome.work), "WORK")) for text in texts]
    return told


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_finds_what_it_finds_under_torchrun(found: Found, rank: int) -> None:
    both = [{k: v for k, v in found[launcher][rank].items() if k != "own"} for launcher in LAUNCHERS]
    pairs = _differences("", *both)
    unknown = [told for where, told in pairs if not any(re.fullmatch(known, where) for known in KNOWN)]
    assert not unknown, "\n".join(unknown)


def test_one_signal_more(found: Found) -> None:
    """The signal that stacks are asked for with is all that a rank catches beside what Python catches."""
    caught = [int(found[launcher][0]["process"]["status"]["SigCgt"], 16) for launcher in LAUNCHERS]
    assert caught[1] == caught[0] | 1 << (NUMBER - 1)


def test_what_is_hidden_is_not_there(found: Found) -> None:
    hidden = ("torch", "numpy", "jurymast", "sympy", "json", "asyncio")
    for rank in range(RANKS):
        modules = found["jurymast"][rank]["modules"]
        assert [name for name in modules if name.partition(".")[0] in hidden] == []


def test_no_two_ranks_share_what_is_random(found: Found) -> None:
    for what in OWN:
        drawn = [found[launcher][rank]["own"][what] for launcher in LAUNCHERS for rank in range(RANKS)]
        flat = [value for values in drawn for value in (values if isinstance(values, list) else [values])]
        assert len(set(flat)) == len(flat), (what, drawn)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_know_who_they_are(found: Found, method: str) -> None:
    told = found["jurymast"][0]["children"][method]
    begin = {"fork": "ForkProcess-", "spawn": "SpawnProcess-", "forkserver": "ForkServerProcess-"}
    assert told["name"].startswith(begin[method])
    assert (told["parent"], told["method"], told["thread"]) == ("MainProcess", method, "MainThread")
    assert told["main"] == ("__main__" if method == "fork" else "__mp_main__")


def _differences(where: str, torchrun: Any, jurymast: Any) -> Iterator[tuple[str, str]]:
    """Where the two differ, and how."""
    if torchrun == jurymast:
        return
    if isinstance(torchrun, dict) and isinstance(jurymast, dict):
        for name in sorted({*torchrun, *jurymast}):
            inner = f"{where}.{name}" if where else name
            yield from _differences(inner, torchrun.get(name, "nothing"), jurymast.get(name, "nothing"))
    elif isinstance(torchrun, list) and isinstance(jurymast, list):
        if len(torchrun) == len(jurymast):
            for number, pair in enumerate(zip(torchrun, jurymast, strict=True)):
                yield from _differences(f"{where}.{number}", *pair)
            return
        for launcher, one, other in (("torchrun", torchrun, jurymast), ("jurymast", jurymast, torchrun)):
            for item in one:
                if item not in other:
                    yield f"{where}[{item}]", f"{where}[{item}]: only under {launcher}"
    else:
        yield where, f"{where}: {torchrun} under torchrun, {jurymast} under jurymast"
