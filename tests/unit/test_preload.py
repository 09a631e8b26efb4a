"""Modules loaded ahead: not there until they are imported, and then as if they had been loaded only then.

Each test runs in an interpreter of its own, with a small package that is called torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = {
    "torch/__init__.py": """
        import logging, os, warnings
        import asyncio, colorsys
        LOG = logging.getLogger("torch")
        THREADS = os.environ.get("OMP_NUM_THREADS")
        LEVEL = os.environ.get("TORCH_LEVEL")
        os.environ["SET_BY_TORCH"] = "1"
        warnings.filterwarnings("ignore", message="of torch")
        from torch import nn
    """,
    "torch/nn.py": "NAME = 'nn'",
    "torch/late.py": "import os\nimport vendor\nLATE = os.environ.get('TORCHINDUCTOR_X')",
    "vendor/__init__.py": "from vendor import extern",
    "vendor/extern.py": """
        import sys
        class Importer:
            def find_spec(self, name, path=None, target=None):
                return None
        sys.meta_path.append(Importer())
    """,
    "colorsys_other/colorsys.py": "OTHERS = True",
}
BEGIN = """
import sys
loaded = frozenset(sys.modules)
import concurrent, os, warnings
from jurymast.worker import preload
filters = list(warnings.filters)
own = preload.Bundle(modules={n: m for n, m in sys.modules.items() if n not in loaded})
import multiprocessing
bundles = [own, preload.load(["torch"], native=True), preload.load(["torch.late", "torch.gone"])]
stale, told = [], []
hidden = preload.Hidden(bundles, loaded, dict(os.environ), stale.append, lambda: told.append("torch"))
ahead = bundles[1].modules["torch"]
hidden.hide()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = text.splitlines()
        path.write_text("\n".join(line.removeprefix("        ") for line in lines) + "\n")
    return tmp_path


def check(folder: Path, program: str, **variables: str) -> None:
    """The program's assertions hold, after BEGIN."""
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": path, "OTHER": str(folder / "colorsys_other"), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_nothing_is_there_before_it_is_imported(run: Path) -> None:
    check(
        run,
        """
assert not [n for n in sys.modules if n.partition(".")[0] in ("torch", "colorsys", "jurymast")]
assert warnings.filters == filters and "SET_BY_TORCH" not in os.environ
""",
    )


def test_an_import_finds_what_was_loaded_ahead_as_it_was(run: Path) -> None:
    check(
        run,
        """
spec = ahead.__spec__
import torch.nn
import torch
assert torch is ahead and torch.__spec__ is spec and told == ["torch"] and stale == []
assert torch.nn is sys.modules["torch.nn"]
assert warnings.filters[0][1].pattern == "of torch" and os.environ["SET_BY_TORCH"] == "1"
assert "torch.late" not in sys.modules and not hasattr(torch, "late")
from torch import late
assert late is bundles[2].modules["torch.late"] and torch.late is late
assert "colorsys" not in sys.modules
import colorsys
assert colorsys is bundles[1].modules["colorsys"]
""",
    )


def test_a_finder_of_imports_is_there_with_its_package(run: Path) -> None:
    """As setuptools' VendorImporter."""
    check(
        run,
        """
finders = lambda: [type(finder).__name__ for finder in sys.meta_path if finder is not hidden]
before = finders()
assert before == [type(finder).__name__ for finder in sys.meta_path[1:]] and "Importer" not in before
import torch.late
assert finders() == before and "vendor" not in sys.modules
import vendor
assert finders() == [*before, "Importer"] and vendor is bundles[2].modules["vendor"]
""",
    )


def test_pythons_own_modules_have_what_they_imported(run: Path) -> None:
    """asyncio is loaded with torch, its package concurrent before: nothing imports its futures once more."""
    check(
        run,
        """
assert "asyncio" not in sys.modules and "concurrent.futures" not in sys.modules
import asyncio
assert asyncio.base_events.concurrent.futures.ThreadPoolExecutor
""",
    )


def test_loggers_of_later_are_not_disabled_now(run: Path) -> None:
    """As torch's are not when a script that has set its logging up imports torch."""
    check(
        run,
        """
import logging.config
logging.config.dictConfig({"version": 1})
assert ahead.LOG.disabled
import torch
assert not torch.LOG.disabled
""",
    )


@pytest.mark.parametrize("kind", ["nb_func", "function"])
def test_what_complains_of_being_left_over_is_taken_apart_at_the_end(run: Path, kind: str) -> None:
    """With the rest, also where the script has imported none of it. What native code made has no file of its
    own."""
    (run / "torch/late.py").write_text(f"left = type('{kind}', (), {{}})()\ndel __file__\n")
    check(
        run,
        f"""
import gc
gc.freeze()
hidden.end()
assert ("torch.late" in sys.modules, gc.get_freeze_count() == 0) == 2 * ({kind == "nb_func"},)
""",
    )


def test_the_script_is_nobodys_to_keep(run: Path) -> None:
    check(run, "assert all(m is not sys.modules['__main__'] for s in bundles for m in s.modules.values())\n")


def test_asking_whether_there_is_a_torch_loads_nothing(run: Path) -> None:
    check(
        run,
        """
from importlib.util import find_spec
spec = find_spec("torch")
assert spec.origin == ahead.__file__ and spec.submodule_search_locations
assert "torch" not in sys.modules and "torch.nn" not in sys.modules and told == []
import torch
assert torch is ahead
""",
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '3'", ["OMP_NUM_THREADS"]),  # read by Python code and by libraries
        ("os.environ['OMP_PROC_BIND'] = 'true'", ["OMP_PROC_BIND"]),  # perhaps read by libraries
        ("del os.environ['TORCH_LEVEL']", ["TORCH_LEVEL"]),
        ("os.environ['TORCH_LEVEL'] = '1'", []),  # what it was
        ("os.environ['TORCH_NCCL_X'] = '1'", []),  # read when a process group is made
        ("os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'", []),  # asked for by Python code, each time
        ("os.environ['WANDB_PROJECT'] = 'mine'", []),
        ("os.environ['TORCHINDUCTOR_X'] = '1'", []),  # not by this import
    ],
)
def test_what_the_import_reads_must_be_what_it_was(run: Path, change: str, names: list[str]) -> None:
    check(
        run,
        f"{change}\nimport torch\nassert stale == ({[names]} if {names} else []), stale\n",
        TORCH_LEVEL="1",
    )


def test_a_part_that_is_loaded_late_reads_its_variables_late(run: Path) -> None:
    check(
        run,
        """
import torch
os.environ["TORCHINDUCTOR_X"] = "1"
assert stale == []
import torch.late
assert stale == [["TORCHINDUCTOR_X"]]
""",
    )


def test_a_file_of_the_users_of_the_same_name_is_what_is_imported(run: Path) -> None:
    check(
        run,
        """
sys.path.insert(0, os.environ["OTHER"])
import colorsys
assert colorsys.OTHERS
import torch
assert torch is ahead and stale == []
""",
    )


def test_another_torch_than_the_one_loaded_ahead(run: Path) -> None:
    other = run / "other" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    check(run, f"sys.path.insert(0, {str(other.parent)!r})\nimport torch\nassert stale == [['sys.path']]\n")


def test_without_torch_ahead_its_import_is_told(run: Path) -> None:
    begin = BEGIN.replace("bundles = [own, preload.load", "bundles = [own] or [own, preload.load").replace(
        'ahead = bundles[1].modules["torch"]\n', ""
    )
    path = os.pathsep.join([str(run), *sys.path])
    program = "import torch.nn\nassert told == ['torch']\n"
    program += "assert type(torch.__loader__).__name__ == 'SourceFileLoader'\n"
    program += "assert 'exec_module' not in vars(torch.__loader__)\n"
    subprocess.run(
        [sys.executable, "-c", begin + program], check=True, env={**os.environ, "PYTHONPATH": path}
    )
