"""What a site installs, as root, on this machine: settings, the sweep after jobs, the programs themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jurymast_site.config import Config, ConfigError, load
from jurymast_site.guard import NotRoots, require_program, require_roots, require_tree
from jurymast_site.system import Failed, Log, state_directory

SITE = Path(__file__).parents[2] / "slurm" / "site"
# Above every user of a machine that runs tests: nothing of theirs is touched.
STRAY, BUSY, MIN_UID = 2_000_001, 2_000_002, 2_000_000

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the site's pieces run as root")


# Settings.


def test_settings_are_read_and_no_file_means_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path / "none.ini") == Config()
    path = tmp_path / "site.ini"
    path.write_text(
        "[health]\ncommand = /opt/j/bin/jurymast health --json --probe nvidia\nlimit_s = 12.5\n[drain]\n"
        "own_findings = yes\ndry_run = on\n[sweep]\nprocesses = kill\n[slurm]\nbin = /opt/slurm/bin\n"
    )
    config = load(path)
    assert config.health_command == ("/opt/j/bin/jurymast", "health", "--json", "--probe", "nvidia")
    assert (config.health_limit_s, config.act_on_own_findings, config.dry_run) == (12.5, True, True)
    assert (config.sweep_processes, config.sweep_shared_memory) == ("kill", "report")
    assert config.environment["PATH"].startswith("/opt/slurm/bin:/usr/local/sbin:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[drain]\nresum = no\n", r"unknown key resum in \[drain\]"),
        ("[drian]\nresume = no\n", r"unknown key resume in \[drian\]"),
        ("[drain]\nresume = maybe\n", "Not a boolean: maybe"),
        ("[health]\nlimit_s = soon\n", "soon"),
        ("[health]\ncommand = jurymast health\n", "absolute path"),
        ("[sweep]\nprocesses = maim\n", "must be off, report, kill, not maim"),
        ("resume = no\n", "no section headers"),
    ],
)
def test_mistakes_in_the_settings_name_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "site.ini"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("mode", "uid"), [(0o666, 0), (0o664, 0), (0o644, STRAY)])
def test_settings_that_others_can_write_are_refused(tmp_path: Path, mode: int, uid: int) -> None:
    path = tmp_path / "site.ini"
    path.write_text("[drain]\ndry_run = no\n")
    os.chown(path, uid, 0)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="users other than root can write to it"):
        load(path)


def test_root_runs_and_keeps_only_what_is_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    require_program([str(program)])
    os.chown(program, STRAY, 0)
    with pytest.raises(NotRoots, match="users other than root can write to it"):
        require_program([str(program)])
    os.chown(program, 0, 0)
    tmp_path.chmod(0o777)
    with pytest.raises(NotRoots, match=f"{tmp_path}: users other than root can write to it"):
        require_program([str(program)])
    tmp_path.chmod(0o1777)
    require_program([str(program)])
    state = state_directory(tmp_path / "a" / "state")
    assert state.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(state)
    with pytest.raises(Failed):
        state_directory(link)
    state.chmod(0o777)
    with pytest.raises(Failed, match="must belong to root"):
        state_directory(state)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment of root's, with one package and one directory that a .pth file adds. Its programs
    name their Python in all the ways that installers do."""
    place = tmp_path / "environment"
    packages = place / "lib" / "python3.99" / "site-packages"
    for folder in (place / "bin", packages / "package", tmp_path / "added"):
        folder.mkdir(parents=True)
    (place / "bin" / "python").symlink_to("python3")
    (place / "bin" / "python3").symlink_to("/usr/bin/python3")
    (place / "lib64").symlink_to("lib")
    (place / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (packages / "package" / "module.py").write_text("")
    (place / "lib" / "python399.zip").write_text("")
    (packages / "added.pth").write_text(f"import sys\n{tmp_path / 'added'}\n")
    (tmp_path / "added" / "other.py").write_text("")
    (tmp_path / "reached").symlink_to(place)
    (place / "bin" / "program").write_text(f"#!{place}/bin/python -I\n")
    for name, quote in (("long", ""), ("spaced", '"'), ("quoted", "'")):
        text = f"#!/bin/sh\n'''exec' {quote}{place}/bin/python{quote} \"$0\" \"$@\"\n' '''\n"
        (place / "bin" / name).write_text(text)
    (place / "bin" / "found").write_text("#!/usr/bin/env -S A=b python -I\n")
    monkeypatch.setenv("PATH", f"{place}/bin")
    return tmp_path


PACKAGES = "environment/lib/python3.99/site-packages"
PARTS = [
    "environment", "environment/bin", "environment/bin/python", "environment/bin/python3", "reached",
    "environment/pyvenv.cfg", "environment/lib64", "environment/lib/python3.99",
    "environment/lib/python399.zip",
    f"{PACKAGES}/package/module.py", f"{PACKAGES}/added.pth", "added", "added/other.py",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "program", ["python", "program", "long", "spaced", "quoted", "found", "nice", "within env", "by env"]
)
def test_root_looks_through_no_python_that_another_user_can_change(
    environment: Path, program: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a link, a directory on the way, or a file that is imported decides what root runs."""
    if program == "by env":
        monkeypatch.setenv("PATH", str(environment / "reached" / "bin"))
    around = {
        "nice": ["/usr/bin/nice", "-n", "5"], "within env": ["/usr/bin/env", "-i"],
        "by env": ["/usr/bin/env", "A=b", "python"],
    }.get(program, [])  # fmt: skip
    python = [] if program == "by env" else [str(environment / "reached" / "bin" / program)]
    if program in ("nice", "within env"):
        python = [str(environment / "reached" / "bin" / "python")]
    command = [*around, *python, "-I", "-m", "jurymast.health.once"]
    require_program(command)
    os.chown(environment / part, STRAY, STRAY, follow_symlinks=False)
    with pytest.raises(NotRoots, match="users other than root"):
        require_program(command)


def test_a_file_that_root_gives_its_program_is_roots(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text("")
    require_program(["/usr/bin/env", str(script), "/nowhere"])
    script.chmod(0o666)
    with pytest.raises(NotRoots, match="probe.py"):
        require_program(["/usr/bin/env", str(script)])


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_what_is_missing_where_others_could_make_it_is_not_roots(tmp_path: Path, mode: int) -> None:
    """The target of a link in root's tree, or a file that root's program is given."""
    common = tmp_path / "common"
    common.mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "module.py").symlink_to(common / "missing.py")
    require_tree(str(tmp_path / "tree"))
    require_program(["/usr/bin/env", str(common / "missing.py")])
    common.chmod(mode)
    with pytest.raises(NotRoots, match="can"):
        require_tree(str(tmp_path / "tree"))
    with pytest.raises(NotRoots, match="can"):
        require_program(["/usr/bin/env", str(common / "missing" / "probe.py")])


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(NotRoots, match="too many links"):
        require_roots(str(tmp_path / "a"))


# The programs.


def run(program: str, config: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(SITE / program), "--config", str(config)], capture_output=True, text=True,
        timeout=60, check=False, cwd="/", env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("program", ["prolog", "epilog"])
def test_prolog_and_epilog_never_fail_and_never_ask_slurm(tmp_path: Path, program: str) -> None:
    """A Prolog that fails drains the node; one that asks Slurm something may wait for itself."""
    called = tmp_path / "called"
    for name in ("squeue", "sinfo", "scontrol", "sacct"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {called}\n")
        (tmp_path / name).chmod(0o755)
    config = tmp_path / "site.ini"
    config.write_text(
        f"[sweep]\nmin_uid = {MIN_UID}\n[files]\nlog = {tmp_path}/log\n[slurm]\nbin = {tmp_path}\n"
    )
    done = run(program, config, PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_JOB_UID="1000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    config.write_text("[sweep]\nprocesses = nonsense\n")
    assert run(program, config).returncode == 0
    assert not called.exists()


def test_the_health_check_without_slurm_says_so_and_does_nothing(tmp_path: Path) -> None:
    config = tmp_path / "site.ini"
    log = tmp_path / "log"
    (tmp_path / "squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    config.write_text(f"[files]\nstate = {tmp_path}/state\nlog = {log}\n[slurm]\nbin = {tmp_path}\n")
    done = run("healthcheck", config, SLURMD_NODENAME="n1")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert "failed: squeue: exit code 1: Unable to contact slurm controller" in log.read_text()
    config.write_text("[files]\nstates = /tmp\n")
    assert run("healthcheck", config).returncode == 1


@pytest.mark.parametrize(("uid", "mode"), [(STRAY, 0o644), (0, 0o666)])
def test_root_runs_nothing_of_a_tree_that_others_can_write_to(tmp_path: Path, uid: int, mode: int) -> None:
    for name in ("slurm.py", "guard.py", "__init__.py", "json.py"):
        tree = tmp_path / name / "site"
        shutil.copytree(SITE, tree, ignore=shutil.ignore_patterns("__pycache__"))
        changed = tree / "jurymast_site" / name
        with changed.open("a") as file:
            file.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
        os.chown(changed, uid, 0)
        changed.chmod(mode)
        assert_nothing_runs(tmp_path, tree)


def test_nor_of_one_that_is_reached_through_a_directory_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.copytree(SITE, theirs / "site", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "link").symlink_to(theirs / "site")
    os.chown(theirs, STRAY, STRAY)
    assert_nothing_runs(tmp_path, theirs / "site")
    assert_nothing_runs(tmp_path, tmp_path / "link")
    os.chown(theirs, 0, 0)
    run(str(tmp_path / "link" / "healthcheck"), tmp_path / "site.ini", SLURMD_NODENAME="n1")
    assert (tmp_path / "state").exists(), "it was refused because of something else"
    os.chown(tmp_path / "link", STRAY, STRAY, follow_symlinks=False)
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "log").unlink(missing_ok=True)
    assert_nothing_runs(tmp_path, tmp_path / "link")


def assert_nothing_runs(place: Path, tree: Path) -> None:
    config = place / "site.ini"
    config.write_text(f"[files]\nstate = {place}/state\nlog = {place}/log\n[sweep]\nmin_uid = {MIN_UID}\n")
    for program, code in (("healthcheck", 1), ("prolog", 0), ("epilog", 0)):
        done = run(str(tree / program), config, SLURMD_NODENAME="n1")
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert not [name for name in ("ran", "state", "log") if (place / name).exists()]


def test_the_programs_guard_themselves_in_the_same_way() -> None:
    texts = [(SITE / name).read_text() for name in ("healthcheck", "prolog", "epilog")]
    assert texts[1] == texts[2]
    own = texts[0].replace("jurymast-healthcheck", "jurymast-sweep").replace("sys.exit(1)", "sys.exit(0)")
    assert own.replace("jurymast_site.healthcheck", "jurymast_site.sweep") == texts[1]


SINFO = """
if [ -e {here}/away ] && [ -e {here}/called ]; then echo Unable to contact slurm controller >&2; exit 1; fi
case "$*" in
*--nodes=n1*) cat {here}/n1;;
*) echo "n1|$(cat {here}/n1)"; for n in 2 3 4 5; do echo "n$n|$(cat {here}/others)"; done; cat {here}/idle;;
esac
"""
SCONTROL = """
echo "$*" >> {here}/called
case "$*" in
*State=DRAIN*) echo "drained|${{4#Reason=}}" > {here}/n1; cp {here}/after {here}/others;;
*State=RESUME*) echo "idle|none" > {here}/n1;;
esac
"""


BAD = '{"verdict": "bad", "findings": [{"verdict": "bad", "kind": "hardware", "code": "gpu-lost"}]}'
TOO_MANY = "ALERT: not drained after all, because max_per_hour = 4 is reached: "


def drained(s_ago: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - s_ago))
    return f"drained|jurymast: [hardware] code=gpu-lost gpu=1 job=- ts={stamp} boot=x\n"


def five_of_500(here: Path, others_s_ago: float | None) -> Path:
    """The configuration of n1's health check, which finds it bad; four others come out, for drains of so
    long ago, between its look at them and its own drain."""
    (here / "after").write_text("idle|none\n" if others_s_ago is None else drained(others_s_ago))
    noted = "n6|drained|for the electrician:\nask Ada, \377|\n\n".encode("latin-1")
    (here / "idle").write_bytes(noted + b"".join(b"n%d|idle|none\n" % number for number in range(7, 501)))
    for name in ("n1", "others"):
        (here / name).write_text("idle|none\n")
    for name, script in (("squeue", ""), ("sinfo", SINFO), ("scontrol", SCONTROL)):
        (here / name).write_text("#!/bin/sh\n" + script.format(here=here))
        (here / name).chmod(0o755)
    spool = here / "spool"
    spool.mkdir()
    spool.chmod(0o1733)
    config = here / "site.ini"
    config.write_text(
        f"[health]\ncommand = /bin/echo {shlex.quote(BAD)}\n[drain]\nown_findings = yes\n"
        f"[verdicts]\nspool = {spool}\n[files]\nstate = {here}/state\nlog = {here}/log\n"
        f"[slurm]\nbin = {here}\n"
    )
    return config


@pytest.mark.parametrize(
    ("others_s_ago", "stays"), [(None, False), (60.0, True), (3000.0, True), (3700.0, False)]
)
def test_of_many_nodes_that_drain_at_once_none_stays_out_beyond_the_limit(
    tmp_path: Path, others_s_ago: float | None, stays: bool
) -> None:
    config = five_of_500(tmp_path, others_s_ago)
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert (tmp_path / "n1").read_text().startswith("idle" if stays else "drained|jurymast: [hardware] code=")
    called = (tmp_path / "called").read_text()
    assert ("State=DRAIN" in called, "State=RESUME" in called) == (True, stays)
    assert (TOO_MANY in (tmp_path / "log").read_text()) == stays


@pytest.mark.parametrize(("others_s_ago", "stays"), [(None, False), (60.0, True)])
def test_a_node_that_could_not_look_at_the_others_any_more_does_so_in_its_next_round(
    tmp_path: Path, others_s_ago: float | None, stays: bool
) -> None:
    """Also when that round finds nothing of its own: a verdict is read only once."""
    config = five_of_500(tmp_path, others_s_ago)
    (tmp_path / "away").touch()  # slurmctld, from the drain on
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 1
    assert (tmp_path / "n1").read_text().startswith("drained")
    (tmp_path / "away").unlink()
    config.write_text(config.read_text().replace("own_findings = yes", "own_findings = no"))
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert (tmp_path / "n1").read_text().startswith("idle" if stays else "drained|jurymast: [hardware] code=")
    assert (TOO_MANY in (tmp_path / "log").read_text()) == stays
    # Once it has looked, those that come out later do not bring it back.
    (tmp_path / "others").write_text(drained(0.0))
    before = (tmp_path / "n1").read_text()
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert (tmp_path / "n1").read_text() == before


@pytest.mark.parametrize(("uid", "mode"), [(STRAY, 0o755), (0, 0o777)])
def test_root_looks_through_no_program_that_others_can_write(tmp_path: Path, uid: int, mode: int) -> None:
    config = five_of_500(tmp_path, None)
    program = tmp_path / "probes"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho '{BAD}'\n")
    config.write_text(config.read_text().replace("/bin/echo", str(program)))
    program.chmod(mode)
    os.chown(program, uid, 0)
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert "users other than root can write to it" in (tmp_path / "log").read_text()
    assert not (tmp_path / "ran").exists()
    program.chmod(0o755)
    os.chown(program, 0, 0)
    run("healthcheck", config, SLURMD_NODENAME="n1")
    assert (tmp_path / "ran").exists(), "the attack is none, and this test shows nothing"


def test_a_verdict_is_read_after_a_look_that_began_later_and_saw_something(tmp_path: Path) -> None:
    """The look under way may have been at what the verdict is about before it happened."""
    config = five_of_500(tmp_path, None)
    program, verdict = tmp_path / "probes", tmp_path / "spool" / "n1.late"
    program.write_text(f"#!/bin/sh\necho {{}} > {verdict}\necho '{BAD}'\n")
    program.chmod(0o755)
    text = config.read_text().replace("own_findings = yes", "own_findings = no")
    config.write_text(text.replace("/bin/echo", str(program)))
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert verdict.exists()
    program.write_text("#!/bin/sh\nexit 7\n")  # nothing was seen, so nothing speaks against it
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert "the probes could not be run" in (tmp_path / "log").read_text()
    assert verdict.exists()
    program.write_text(f"#!/bin/sh\necho '{BAD}'\n")
    assert run("healthcheck", config, SLURMD_NODENAME="n1").returncode == 0
    assert not verdict.exists()


def test_the_programs_import_nothing_of_a_users(tmp_path: Path) -> None:
    """Neither PYTHONPATH nor the directory they are started in."""
    (tmp_path / "json.py").write_text("raise SystemExit('a stranger was imported')\n")
    for program in ("healthcheck", "prolog", "epilog"):
        assert (SITE / program).read_text().startswith("#!/usr/bin/python3 -I\n")
        done = subprocess.run(
            [SITE / program, "--help"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("what", ["a pipe", "a pipe that nobody empties", "a link", "another name of a file"])
def test_root_s_log_waits_for_nobody_and_changes_no_other_file(tmp_path: Path, what: str) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("as it was")
    if what.startswith("a pipe"):
        os.mkfifo(log)
    elif what == "a link":
        log.symlink_to(other)
    else:
        os.link(other, log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK) if what.endswith("empties") else -1
    lines = Log("test", str(log))
    for _ in range(200):
        lines.say("x" * 600)
    if reader >= 0:
        os.close(reader)
    assert other.read_text() == "as it was"
    own = tmp_path / "own"
    Log("test", str(own)).say("told")
    assert own.read_text().endswith(": told\n")
