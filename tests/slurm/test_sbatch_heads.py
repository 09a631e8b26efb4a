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
LIMIT_S = 600.0
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


# A launcher, tasks of Python that inherit the job's options, tasks with their own (by the beginnings of their
# names), and steps that train nothing.
SCRIPT = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=2 --site-level --site-image debian:12 --output=out
#SBATCH --site-quiet
#JURYMAST train: yes
export SRUN_CPUS_PER_TASK=1
echo "said script $SITE_IMAGE $SITE_GIVEN"
srun --ntasks-per-node=1 --site-level --site-image=step --site-resume 1 \\
    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29511 \\
    show.py launcher
srun python show.py job
srun --overlap --site-im=tasks --site-lev=7 python show.py tasks
srun --overlap --site-image 'two words' -n1 -N1 sh -c 'echo "said other $SITE_IMAGE $SITE_GIVEN"'
srun --overlap --site-imag2=x -n1 -N1 true
echo "said refused $?"
"""
SHOW = """import os, sys
print("said", sys.argv[1], os.environ["SITE_IMAGE"], os.environ["SITE_GIVEN"])
print("ours", sys.argv[1], "JURYMAST_RUN" in os.environ)
"""


def told(cluster: Cluster, work: Path, *submit: str) -> tuple[list[str], list[str]]:
    """What the job says, and which of its ranks are those of a run of ours."""
    cluster.login(["mkdir", "-p", str(work)])
    (work / "show.py").write_text(SHOW)
    (work / "job.sbatch").write_text(SCRIPT)
    done = cluster.login(
        [*submit, "--parsable", "job.sbatch"], cwd=work, check=False,
        env={"OMP_NUM_THREADS": "1", "PATH": f"{cluster.python.parent}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    assert ended["JobState"] == "COMPLETED", printed
    lines = sorted(printed.splitlines())
    return [line for line in lines if line.startswith("said")], [
        line for line in lines if line.startswith("ours")
    ]


@pytest.mark.torch
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("site_options")
def test_options_of_a_plugin_reach_the_job_and_its_training(cluster: Cluster) -> None:
    work = cluster.shared / "site-options"
    submit = (str(cluster.python.with_name("jurymast")), "submit", "--runs", str(work / "runs"), "--spares=1")
    theirs, _ = told(cluster, cluster.shared / "site-options-sbatch", "sbatch")
    found, ours = told(cluster, work, *submit)
    assert found == theirs
    # Which options of the job a step inherits differs between releases.
    assert any(line.startswith("said launcher step step,") for line in found)
    assert ours == ["ours job True"] * 4 + ["ours launcher True"] * 2 + ["ours tasks True"] * 4
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
