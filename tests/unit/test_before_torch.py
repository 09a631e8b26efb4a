"""What is read from a script's text: the variables that it sets before it imports torch, and whether its
beginning may run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.worker.before_torch import UNKNOWN, of_module, of_script, of_text
from jurymast.worker.server import names_compiler

OMP = ["OMP_NUM_THREADS"]
SET = "os.environ['OMP_NUM_THREADS'] = str(n)\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", {"OMP_NUM_THREADS": "4"}),
        ("from os import environ\nenviron['A'] = '1'\nfrom torch import nn\n", {"A": "1"}),
        ("import os\nos.environ.update({'A': '1'}, B='2')\n", {"A": "1", "B": "2"}),
        ("import os\nos.environ.setdefault('A', '1')\nos.environ.setdefault('GIVEN', '2')\n", {"A": "1"}),
        ("import os\nos.environ['A'] = '1'\nos.environ.setdefault('A', '2')\n", {"A": "1"}),
        ("import os\nimport torch\nos.environ['A'] = '1'\n", {}),
        ("import os\nimport torch.nn as nn\nos.environ['A'] = '1'\n", {}),
        ("import os\nos.environ['A'] = str(4)\nos.environ['B'] = f'{1}'\nos.environ[name] = 'x'\n", {}),
        ("import os\nif True:\n    os.environ['A'] = '1'\n", {}),
        ("import os\nother.environ['A'] = '1'\n", {}),
        ("this is no Python", {}),
        ("", {}),
    ],
)
def test_only_what_is_plain_is_set_ahead(source: str, found: dict[str, str]) -> None:
    assert of_text(source).presets({"GIVEN": "yes"}) == found


def test_a_script_that_sets_the_compiler_up() -> None:
    assert names_compiler("import torch\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = where\n")
    assert not names_compiler("import torch\nos.environ['OMP_NUM_THREADS'] = '1'\n")


def test_what_only_the_running_script_knows() -> None:
    source = "import os\nos.environ['A'] = '1'\nos.environ['A'] = str(2)\nos.environ.update(B=x, C='3')\n"
    found = of_text(source + "import torch\nos.environ['D'] = x\n")
    assert [*found.computed] == ["A", "B", "C"]
    assert found.presets({}) == {}


@pytest.mark.parametrize(
    ("source", "computed"),
    [
        (SET + "import torch", OMP),
        (SET + "from torch import nn", OMP),
        ("import torch\n" + SET, []),
        ("import lightning\n" + SET, []),
        ("if n:\n    " + SET + "import torch", OMP),
        ("for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):\n    os.environ[name] = n\nimport torch",
         ["OMP_NUM_THREADS", "MKL_NUM_THREADS", UNKNOWN]),
        ("def main():\n    " + SET + "    import torch\nmain()", OMP),
        ("def main():\n    import torch\nmain()", []),
        ("@threads(OMP_NUM_THREADS=n)\ndef main():\n    import torch\n", OMP),
        ("exec('os.environ[\"OMP_NUM_THREADS\"] = str(n)')\nimport torch", [*OMP, UNKNOWN]),
        ("exec(open(path).read())\nimport torch", [UNKNOWN]),
        ("exec('n = 1')\nimport torch", []),
        ("os.environ.update(settings)\nimport torch", [UNKNOWN]),
        ("os.environ |= settings\nimport torch", [UNKNOWN]),
        ("os.putenv('OMP_NUM_THREADS', n)\nimport torch", OMP),
        ("os.environ.pop('OMP_NUM_THREADS', None)\nimport torch", OMP),
        ("settings = {'OMP_NUM_THREADS': n}\nset_all(settings)\nimport torch", OMP),
        ("env = os.environ\nenv['OMP_NUM_THREADS'] = n\nimport torch", OMP),
        ("n = os.environ.get('OMP_NUM_THREADS', '1')\nif 'OMP_X' in os.environ: pass\nimport torch", []),
        ("try:\n    import torch\nexcept ImportError:\n    pass\n" + SET, OMP),
        ('"""Set OMP_NUM_THREADS first."""\nimport torch', []),
        ("os.environ['TORCH_NCCL_X'] = str(n)\nimport torch", ["TORCH_NCCL_X"]),
    ],
)  # fmt: skip
def test_what_the_text_shows_that_it_may_set(source: str, computed: list[str]) -> None:
    assert sorted(of_text(source).computed) == sorted(computed)


@pytest.mark.parametrize(
    ("source", "repeatable"),
    [
        ("import os, argparse\nparser = argparse.ArgumentParser()\nprint('begins')\nimport torch", True),
        ("import torch\nos.mkdir(path)", True),
        ("os.mkdir(path)\nimport torch", False),
        ("if x:\n    wandb.init()\nimport torch", False),
        ("with open(path, 'w') as f:\n    f.write(x)\nimport torch", False),
        ("def later():\n    os.mkdir(path)\nimport torch", True),
        ("def later():\n    os.mkdir(path)\nlater()\nimport torch", False),
        ("@register\ndef later(): pass\nimport torch", False),
        ("class A:\n    made = os.mkdir(path)\nimport torch", False),
    ],
)
def test_what_may_not_run_twice(source: str, repeatable: bool) -> None:
    assert of_text(source).repeatable is repeatable


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_users_modules_are_read_in_the_order_of_their_imports(tmp_path: Path) -> None:
    write(tmp_path, {
        "train.py": "from app.model import Model\n" + SET,
        "app/__init__.py": "import os\nos.environ['MKL_NUM_THREADS'] = '2'\n",
        "app/model.py": "from . import threads\nimport torch\nos.environ['KMP_X'] = str(n)\n",
        "app/threads.py": "import os\nos.environ['GOMP_X'] = str(n)\n",
    })  # fmt: skip
    found = of_script(str(tmp_path / "train.py"))
    assert [*found.computed] == ["GOMP_X"], "torch is imported before the rest"
    assert found.presets({}) == {"MKL_NUM_THREADS": "2"}


def test_a_module_is_read_as_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {
        "app/__init__.py": "import os\nos.environ['MKL_NUM_THREADS'] = '2'\n",
        "app/__main__.py": "import os\nos.mkdir('out')\nfrom app.train import run\nrun()\n",
        "app/train.py": "import os\n" + SET + "import torch\n",
        "app/other.py": "import torch\n",
    })  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found = of_module("app")
    assert ([*found.computed], found.repeatable) == (OMP, False)
    assert found.presets({}) == {"MKL_NUM_THREADS": "2"}
    assert of_module("app.other").computed == {}
    assert [*of_script(str(tmp_path / "app")).computed] == [], "as a folder it has no package app"


def test_a_module_that_is_imported_under_a_condition_sets_nothing_ahead(tmp_path: Path) -> None:
    write(tmp_path, {
        "train.py": "def main():\n    import settings\n    import torch\nmain()\n",
        "settings.py": "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n",
    })  # fmt: skip
    found = of_script(str(tmp_path / "train.py"))
    assert ([*found.computed], found.presets({})) == (OMP, {})
