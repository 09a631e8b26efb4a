"""Which options a batch script's head has, against real sbatch, which names each argument that it finds;
and options that only the installed Slurm knows."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.cluster import sbatch
from jurymast.errors import UsageError
from testcluster import Cluster

pytestmark = pytest.mark.slurm

PIECES = [
    "#SBATCH", "#SLURM", " #SBATCH", "#", "# why", "\t# why", "##SBATCH -N 9", "# \u2028 \x1c \x85", "", "  ",
    "#SBATCH--nodes=2", "#SBATCH\t-n4", "#SBATCH -N", "#SBATCH 2", "#SBATCH --job-name=a#b -N 3",
    "#SBATCH -J 'a b'", "#SBATCH --comment=\"a 'b'\"'c'", r"#SBATCH --comment='it\'s' -n 3",
    r'#SBATCH -J "a\\b\"c" --requeue', "#SBATCH -n 5 # -N 9", "#SBATCH --comment '' -N 9",
    r"#SBATCH --comment=a\bc\#d", "# \f", "#SBATCH\v-N\f4\r",
]  # fmt: skip
TESTS = Path(__file__).parents[1]
LIMIT_S = 240.0
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
    each = f"sbatch -vvvv --test-only {folder}/$n.sh 2>&1; echo ====="
    each = f"for n in $(seq 0 {len(tried) - 1}); do {each}; done"
    printed = cluster.login(["bash", "-c", each], timeout_s=240, check=False).stdout.split("=====\n")
    assert len(printed) == len(tried) + 1
    for text, said in zip(tried, printed, strict=False):
        ours, theirs = found_by_us(text), found_by_sbatch(said)
        assert ours == theirs, f"{text}\n{said}"


@pytest.fixture
def site_options(cluster: Cluster) -> Iterator[None]:
    """Slurm has a SPANK plugin with options of its own."""
    library = cluster.layout.etc / "site_options.so"
    version = cluster.login(["sbatch", "--version"]).stdout  # slurm-wlm 22.05.8
    major, minor, micro = map(int, re.findall(r"\d+", version)[:3])
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wall", "-Werror", f"-DVERSION={major << 16 | minor << 8 | micro}",
         "-o", str(library), str(TESTS / "support" / "spank_options.c")],
        check=True,
    )  # fmt: skip
    plugstack = cluster.layout.etc / "plugstack.conf"
    plugstack.write_text(f"required {library}\n")
    yield
    plugstack.unlink()
    library.unlink()


SCRIPT = """#!/bin/sh
#SBATCH --nodes=2 --site-level --site-image debian:12 --site-quiet
echo "script $SITE_IMAGE"
srun --site-level --site-image=step --site-resume 1 torchrun --nnodes=2 \\
    --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29511 show.py
"""


@pytest.mark.torch
@pytest.mark.usefixtures("site_options")
def test_options_of_a_plugin_reach_the_job_and_its_training(cluster: Cluster) -> None:
    work = cluster.shared / "site-options"
    cluster.login(["mkdir", "-p", str(work)])
    (work / "show.py").write_text(
        "import os; print('rank', os.environ['SITE_IMAGE'], os.environ['JURYMAST_RUN'] != '')\n"
    )
    (work / "job.sbatch").write_text(SCRIPT)
    done = cluster.login(
        [str(cluster.python.with_name("jurymast")), "submit", "--runs", str(work / "runs"), "--parsable",
         "--spares", "1", "job.sbatch"],
        cwd=work, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    printed = (work / f"slurm-{int(done.stdout)}.out").read_text()
    assert ended["JobState"] == "COMPLETED", printed
    assert printed.count("rank step True\n") == 2, printed  # the training runs under the agents
    assert "script debian:12\n" in printed
    refused = cluster.login(
        [str(cluster.python.with_name("jurymast")), "submit", "--runs", str(work / "runs"), "--site-imag2=x",
         "job.sbatch"],
        cwd=work, check=False,
    )  # fmt: skip
    assert "unknown option --site-imag2 (did you mean --site-image?)" in refused.stderr
    plain = cluster.login(
        [str(cluster.python.with_name("jurymast")), "submit", "--runs", str(work / "runs"), "--dry-run",
         "--site-level", "--site-image", "a b", "--site-level=2", "--nodes=2", "--", "show.py"],
        cwd=work, check=False,
    )  # fmt: skip
    assert "--site-level --site-image 'a b' --site-level=2" in plain.stdout, plain.stderr
