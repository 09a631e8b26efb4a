"""Which options a batch script's head has, against real sbatch, which names each argument that it finds."""

from __future__ import annotations

import random
import re

import pytest

from jurymast.cluster import sbatch
from jurymast.errors import UsageError
from testcluster import Cluster

pytestmark = pytest.mark.slurm

PIECES = [
    "#SBATCH", "#SLURM", " #SBATCH", "#", "# why", "\t# why", "##SBATCH -N 9", "# \u2028 \x1c \x85 x", "", "  ",
    "#SBATCH--nodes=2", "#SBATCH\t-n4", "#SBATCH -N", "#SBATCH 2", "#SBATCH --job-name=a#b -N 3", "#SBATCH -J 'a b'",
    "#SBATCH --comment=\"a 'b'\"'c'", r"#SBATCH --comment='it\'s' -n 3", r'#SBATCH -J "a\\b\"c" --requeue',
    "#SBATCH -n 5 # -N 9", "#SBATCH --comment '' -N 9", r"#SBATCH --comment=a\bc\#d", "# \f", "#SBATCH\v-N\f4\r",
]  # fmt: skip
SEED, SCRIPTS_TRIED = 20260217, 60


def scripts() -> list[str]:
    """Each piece by itself, and random heads of several, some with a command in the middle."""
    rng = random.Random(SEED)
    heads = [[piece] for piece in PIECES]
    heads += [rng.choices([*PIECES, "true"], k=rng.randint(2, 7)) for _ in range(SCRIPTS_TRIED)]
    return ["\n".join(["#!/bin/sh", *head, ""]) for head in heads]


def found_by_us(text: str) -> list[str] | None:
    """The words of the options; None if they are refused."""
    try:
        return [word for given in sbatch.parse(text, "head", {}).sbatch for word in given.words]
    except UsageError:
        return None


def found_by_sbatch(printed: str) -> list[str] | None:
    """The same, from sbatch's debug messages."""
    refused = re.search("Invalid directive|requires an argument|DOS line breaks", printed)
    return None if refused else re.findall(r'Found in script, argument "(.*)"\n', printed)


def test_sbatch_finds_the_same_options(cluster: Cluster) -> None:
    folder = cluster.shared / "heads"
    folder.mkdir(exist_ok=True)
    tried = scripts()
    for number, text in enumerate(tried):
        (folder / f"{number}.sh").write_text(text, newline="")
    # --test-only submits nothing; the shell's own mark ends each script's messages.
    each = f"for n in $(seq 0 {len(tried) - 1}); do sbatch -vvvv --test-only {folder}/$n.sh 2>&1; echo =====; done"
    printed = cluster.login(["bash", "-c", each], timeout_s=240, check=False).stdout.split("=====\n")
    assert len(printed) == len(tried) + 1
    for text, said in zip(tried, printed, strict=False):
        ours, theirs = found_by_us(text), found_by_sbatch(said)
        assert ours == theirs, f"{text}\n{said}"
