"""What the text of tasks shows of them: ranks of one training, or independent tasks.

Only text is read: the Python scripts that a step's command names, and the modules beside them that these
import. What is installed is not looked into, so it may hide a training.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jurymast.cluster.control import mpi_default
from jurymast.cluster.sbatch import CommandLine
from jurymast.script import recognise

# Whatever makes a process group of torch's, or has another library make one.
GROUPS = re.compile(
    r"\btorch\.distributed\b|\bfrom\s+torch\s+import\b[^\n]*\bdistributed\b|\binit_process_group\b|"
    r"\bDistributedDataParallel\b|\b(pytorch_)?lightning\b|\baccelerate\b|\bdeepspeed\b|\w*Train(er|ingArguments)\b|"
    r"\btorchtitan\b|\bmegatron\b|\bcomposer\b|\bcolossalai\b|\bnemo\b|\bjurymast\b|"
    r"\bMASTER_ADDR\b|\bWORLD_SIZE\b"
)
# Trainings of many processes without torch: nothing tells us when these form their group.
OTHERS = re.compile(r"\bjax\.distributed\b|\b(tf|tensorflow)\.distribute\b|\bSlurmClusterResolver\b")
# Libraries whose processes find each other through the MPI for which srun starts them.
MPIS = re.compile(
    r"^\s*(?:import|from)\s+(mpi4py|mpi4jax|petsc4py|slepc4py|dolfinx?|firedrake|horovod)\b|\s-m\s+(mpi4py)\b",
    re.MULTILINE,
)
# What is loaded or started by a name that only the running program knows.
HIDES = re.compile(
    r"\bimportlib\b|\b__import__\b|\brunpy\b|\bsubprocess\b|\bexec\(|\bos\.(exec|system|spawn)"
)
# Libraries that make no group unless the script itself says so.
HARMLESS = frozenset({
    "PIL", "attr", "attrs", "boto3", "click", "cv2", "datasets", "dotenv", "einops", "h5py", "joblib", "lxml",
    "matplotlib", "mpi4py", "msgspec", "networkx", "nltk", "numba", "numpy", "omegaconf", "pandas", "polars",
    "psutil", "pyarrow", "pydantic", "regex", "requests", "rich", "safetensors", "scipy", "seaborn",
    "sklearn", "tokenizers", "tomli", "torch", "torchaudio", "torchvision", "tqdm", "transformers", "xarray",
    "yaml", "zarr",
})  # fmt: skip
FILES_MAX = 200
# The variable from which srun reads --mpi, and the value for tasks of no MPI.
MPI_VARIABLE, NO_MPI = "SLURM_MPI_TYPE", "none"


@dataclass(frozen=True)
class Shown:
    """`training`: a word of the text that shows one, "" if there is none. `foreign`: it is one of another
    library than torch. `whole`: nothing that could show one was left unread. `mpi`: a word that shows
    processes of an MPI."""

    training: str = ""
    foreign: bool = False
    whole: bool = True
    mpi: str = ""

    @property
    def independent(self) -> bool:
        return self.whole and not self.training


def shows(
    command: Sequence[str],
    read: Callable[[str], str],
    variables: Mapping[str, str],
    *,
    for_mpi: bool = False,
) -> Shown:
    """Return what the Python scripts of a task's command show. `read` returns the text of a file, "" for any
    other word; `variables`: of the step. `for_mpi`: srun would start them for an MPI; otherwise no program
    is one of an MPI's."""
    path = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    texts = recognise.texts(command, read, variables)
    named = [program for text in texts for program in _programs(text)]
    reading = _Reading(read, ["", *path], for_mpi=for_mpi)
    for text in texts:
        reading.look(text, GROUPS)
    for program in named:
        reading.open(program)
    return reading.shown(whole=bool(named))


def of_step(srun: CommandLine, read: Callable[[str], str], variables: Mapping[str, str]) -> tuple[Shown, str]:
    """What the text of a step's tasks shows, and why only srun can start them: they belong to an MPI, as the
    text shows, or as the user says where it shows no training; "" if they do not."""
    asked = srun.last("mpi") or variables.get(MPI_VARIABLE)
    mpi = asked or mpi_default() or NO_MPI
    shown = shows(srun.command, read, variables, for_mpi=mpi != NO_MPI)
    if shown.mpi:
        return shown, f"{shown.mpi} in it shows processes of an MPI (`--mpi={mpi}`)"
    if asked and mpi != NO_MPI and not (shown.training or shown.independent):
        return shown, f"`--mpi={mpi}` asks for an MPI, and nothing in it shows a training"
    return shown, ""


def _programs(text: str) -> Iterator[str]:
    """The scripts, and after `-m ` the modules, that a text runs with Python."""
    for match in recognise.PYTHON.finditer(text):
        if match[2] is None:
            yield from re.findall(r"\S+\.py\b", match[0])
        else:
            yield re.sub(r"^-\w*m\s+", "-m ", match[2]).strip("\"'")


class _Reading:
    """Reads scripts and what they import, until one shows a training."""

    def __init__(self, read: Callable[[str], str], path: Sequence[str], *, for_mpi: bool) -> None:
        self._read, self._path, self._for_mpi = read, path, for_mpi
        self._known: set[str] = set()
        self._training, self._foreign, self._whole, self._mpi = "", False, True, ""

    def shown(self, *, whole: bool) -> Shown:
        return Shown(self._training, self._foreign, whole and self._whole, self._mpi)

    @property
    def _over(self) -> bool:
        """Whether no further text could show more."""
        return bool(self._mpi if self._for_mpi else self._training)

    def look(self, text: str, *words: re.Pattern[str]) -> None:
        """Note what these words in a text show of a training, and others of an MPI."""
        found = next(filter(None, (one.search(text) for one in words)), None)
        if found and not self._training:
            self._training, self._foreign = found[0], OTHERS in words and OTHERS.search(text) is not None
        if self._for_mpi and not self._mpi and (mpi := MPIS.search(text)):
            self._mpi = mpi[1] or mpi[2]

    def open(self, program: str) -> None:
        roots = [*self._path, str(Path(program).parent)]
        if self._over:
            return
        if not program.startswith("-m "):
            self._text(program, roots)
        elif not self._module(program.removeprefix("-m "), roots, ("/__main__.py", ".py")):
            self._whole = False

    def _module(self, name: str, roots: Sequence[str], ends: Sequence[str] = (".py", "/__init__.py")) -> bool:
        """Read a module and its packages; return whether one of the folders `roots` has it."""
        parts = name.split(".")
        for size in range(1, len(parts)):
            for root in roots:
                self._text(os.path.join(root, *parts[:size], "__init__.py"), roots, there=False)
        places = [os.path.join(root, *parts) + end for root in roots for end in ends]
        return any(self._text(place, roots, there=False) for place in places)

    def _text(self, file: str, roots: Sequence[str], *, there: bool = True) -> bool:
        if file in self._known:
            return True
        text = self._read(file) if len(self._known) < FILES_MAX else ""
        if not text:
            self._whole &= not there
            return os.path.exists(file)
        self._known.add(file)
        self.look(text, GROUPS, OTHERS)
        if self._over:
            return True
        self._whole &= HIDES.search(text) is None
        try:
            names = list(_imported(ast.parse(text), Path(file)))
        except (SyntaxError, ValueError):
            self._whole = False
            return True
        for name, others, own in names:
            self._import(name, others, [own, *roots] if own else roots)
        return True

    def _import(self, name: str, others: Sequence[str], roots: Sequence[str]) -> None:
        top = name.partition(".")[0]
        if self._over or top in sys.stdlib_module_names or top in HARMLESS:
            return
        within = [self._module(f"{name}.{other}", roots) for other in others]
        if not (self._module(name, roots) or any(within)):
            self._whole = False


def _imported(tree: ast.AST, file: Path) -> Iterator[tuple[str, list[str], str]]:
    """The name of each module that is imported, what of it, and the folder for one relative to the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if not node.level:
                yield node.module or "", names, ""
                continue
            folder = str(file.parents[min(node.level, len(file.parents)) - 1])
            if node.module:
                yield node.module, names, folder
            else:
                yield from ((name, [], folder) for name in names)
