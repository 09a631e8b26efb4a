"""What is read from a script's text: the variables that it sets before it imports torch."""

from __future__ import annotations

import pytest

from jurymast.worker.server import computed, names_compiler, presets


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
def test_only_what_is_plain_counts(source: str, found: dict[str, str]) -> None:
    assert presets(source, {"GIVEN": "yes"}) == found


def test_a_script_that_sets_the_compiler_up() -> None:
    assert names_compiler("import torch\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = where\n")
    assert not names_compiler("import torch\nos.environ['OMP_NUM_THREADS'] = '1'\n")


def test_what_only_the_running_script_knows() -> None:
    source = "import os\nos.environ['A'] = '1'\nos.environ['A'] = str(2)\nos.environ.update(B=x, C='3')\n"
    assert computed(source + "import torch\nos.environ['D'] = x\n") == {"A", "B"}
    assert presets(source, {}) == {"C": "3"}
