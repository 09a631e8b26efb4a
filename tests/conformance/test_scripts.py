"""What trains under torchrun trains under jurymast, unchanged: the same output, files, weights and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.harness import Case, assert_alike, run_both

pytestmark = pytest.mark.torch

# Each launcher's ranks begin with nothing compiled, and compile no headers and no probe of the processor.
COMPILER = {
    "TORCHINDUCTOR_CACHE_DIR": "../compiled",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}
ENDS = {"message": 1, "code": 3, "exception": 1, "at once": 4, "killed": -9, "segfault": -11}


def _end(how: str, code: int) -> Case:
    return Case(how, ("ends.py",), ("ends.py", how), fails={0: code})


def _accelerates(name: str) -> Case:
    """A test of accelerate's own, as it is installed."""
    command = ("-m", f"accelerate.test_utils.scripts.{name}")
    return Case(name, (), command, {"ACCELERATE_USE_CPU": "true"}, needs="accelerate", ordered=False)


CASES = [
    Case("loaders", ("loaders.py",), ("loaders.py",), ordered=False),
    Case("unguarded", ("unguarded",), ("train.py", "--name", "a b", "")),
    Case("processes", ("processes.py",), ("processes.py",)),
    Case("module", ("package",), ("-m", "trainer.train", "--steps", "2", "--", "--rest")),
    Case("directory", ("folder",), ("app", "x")),
    Case("literal", ("variables_literal.py",), ("variables_literal.py",)),
    Case("computed", ("variables_computed.py",), ("variables_computed.py", "x")),
    Case("compiled", ("compiled.py",), ("compiled.py",)),
    # Fails: ranks that wait for their C++ compilers within DDP's forward are taken for hung.
    Case("inductor", ("inductor.py",), ("inductor.py",), COMPILER),
    # torch gives each checkpoint's metadata an id of its own.
    Case("sharded", ("sharded.py",), ("sharded.py",), unlike=("checkpoint/.metadata",), needs="torchdata"),
    Case("hugging face", ("trainer_hf.py",), ("trainer_hf.py",), needs="transformers"),
    # Lightning writes the path of a checkpoint into it; the weights have a file of their own.
    Case(
        "lightning",
        ("trainer_lightning.py",),
        ("trainer_lightning.py",),
        needs="lightning",
        unlike=("out/last.ckpt", "out/epoch=2-step=12.ckpt"),
    ),
    *(_accelerates(name) for name in ("test_script", "test_sync")),
    *(_end(how, code) for how, code in ENDS.items()),
]


# Of which another one shows the same, but for one thing.
LONG = (
    "directory", "processes", "computed", "inductor", "test_sync", "code", "at once", "message", "killed",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.long] * (case.name in LONG)) for case in CASES],
)
def test_a_script_does_the_same_under_both(case: Case, tmp_path: Path, session_folder: Path) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    torchrun, jurymast = run_both(case, tmp_path, session_folder)
    assert torchrun.printed[0] != [[], []]
    assert_alike(case, torchrun, jurymast)
