"""Files that another user could have made: nothing of theirs is believed, waited for, or run."""

from __future__ import annotations

import ctypes
import errno
import grp
import inspect
import json
import os
import pickle
import pwd
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from jurymast import foreign, processes
from jurymast.agent.storage_processes import local_root
from jurymast.checkpoint import memory_tier
from jurymast.checkpoint.directory import (
    MANIFEST,
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    hash_file,
)
from jurymast.checkpoint.group import Group
from jurymast.checkpoint.shared_tier import SharedTier
from jurymast.checkpoint.state import ScriptState
from jurymast.cli.main import main
from jurymast.cli.options import write_page
from jurymast.cluster.allocation import local_process
from jurymast.cluster.earlier import forgiven_file, forgiven_nodes, past_runs, summary_file
from jurymast.cluster.slurm import check_runs_directory
from jurymast.errors import RunDirectoryError
from jurymast.keeper.memory import MappedBuffer
from jurymast.report.fleet import kept_file, read_fleet
from jurymast.report.which_run import find_run, run_ids
from jurymast.rundir import RunDirectory
from jurymast.storage.export import export
from jurymast.wire import endpoint
from support.commands import RUN, Place, swapped

MALLORY, ADA = 65533, 65534
FORGED = "20991231-235959-newer-ffff"
JOB = "4711"
as_others = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


class Runs:
    """Pickled as a call that makes this directory: what an attacker would have run."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._proof),)


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory that all users may write to, as many sites have for a project."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is root's alone
        place = Path(folder)
        place.chmod(0o1777)
        yield place


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def give(path: Path, uid: int) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid, follow_symlinks=False)


def malicious_checkpoint(run: RunDirectory, proof: Path) -> None:
    """A checkpoint that passes every check, of which the metadata is a program."""
    directory = CheckpointDirectory(run.checkpoints)
    place = directory.begin(100, 1)
    (place / ".metadata").write_bytes(pickle.dumps(Runs(proof)))
    size, digest = hash_file(place / ".metadata")
    files = (FileRecord(".metadata", size, digest),)
    directory.seal(place, CheckpointManifest(100, 1, 1, torch.__version__, files))
    directory.publish(place, 100)


@pytest.fixture
def shared(common: Path) -> Place:
    """Ada's run of a Slurm job, and beside it a newer one by Mallory that claims the same job."""
    place = Place(common)
    runs = {RUN: ADA, FORGED: MALLORY}
    for name, uid in runs.items():
        run = place.story(swapped(), name)
        (run.submission / "jobs").mkdir(parents=True, exist_ok=True)
        (run.submission / "jobs" / JOB).touch()
        run.checkpoints.mkdir(exist_ok=True)
        if uid == MALLORY:
            malicious_checkpoint(run, common / "proof")
            for path in (run.root, *run.root.rglob("*")):
                path.chmod(0o755)
        give(run.root, uid)
    place.runs.chmod(0o1777)
    common.chmod(0o1777)
    return place


@as_others
@pytest.mark.parametrize("forged", [FORGED, JOB])
def test_a_forged_run_of_my_job_is_not_taken_for_mine(shared: Place, forged: str) -> None:
    """Nor a directory that has the job's number for its name."""
    (shared.runs / FORGED).rename(shared.runs / forged)
    with acting_as(ADA):
        assert run_ids(shared.runs) == [RUN]
        assert find_run(JOB, shared.runs).root.name == RUN


@as_others
@pytest.mark.parametrize(
    "words", [["checkpoints", FORGED, "export", "100", "out"], ["cancel", FORGED], ["restart", FORGED]]
)
def test_nothing_is_done_about_anothers_run(
    shared: Place, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JURYMAST_RUNS", str(shared.runs))
    main([words[0], "--help"])  # the interpreter's own files may be root's alone
    with acting_as(ADA):
        assert main(words) == 73
    assert f"{FORGED} belongs to {foreign.user_name(MALLORY)}" in capsys.readouterr().err
    assert not (shared.root / "proof").exists()


@as_others
def test_a_colleagues_run_is_shown_with_whose_it_is_and_nothing_of_it_is_run(
    shared: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JURYMAST_RUNS", str(shared.runs))
    looks = (["status"], ["report"], ["events"], ["checkpoints"], ["checkpoints", "verify"])
    for command, *words in looks:
        main([command, RUN, *words])
    (shared.runs / FORGED / "slurm/jobs/4712").write_bytes(b"\xff\0")  # a cluster's name
    os.mkfifo(shared.runs / FORGED / "slurm/jobs/4713", 0o644)
    capsys.readouterr()
    with acting_as(ADA):
        for command, *words in looks:
            assert main([command, FORGED, *words]) == 0
            told = capsys.readouterr()
            assert f"this run belongs to {foreign.user_name(MALLORY)}" in told.err
            assert told.out
    assert not (shared.root / "proof").exists()


@as_others
def test_anothers_checkpoint_is_not_unpickled(shared: Place) -> None:
    tier_root = shared.runs / FORGED / "checkpoints"
    tier = SharedTier(tier_root, Group(), keep=3, attempt=1, stale=lambda: "")
    with acting_as(ADA):
        found, _ = tier.candidates()
        assert "is not private to this user" in tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
        with pytest.raises(foreign.NotOurs):
            export(CheckpointDirectory(tier_root).path(100), shared.root / "out", "torch")
    assert not (shared.root / "proof").exists()
    with acting_as(MALLORY):
        tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
    assert (shared.root / "proof").exists(), "the attack is none, and this test shows nothing"


@as_others
def test_a_file_of_a_checkpoint_that_others_can_write_to_is_not_unpickled(common: Path) -> None:
    """Although its directory is this user's own, and what was hashed was right."""
    run = RunDirectory(common / "run")
    run.create()
    malicious_checkpoint(run, common / "proof")
    give(run.root, ADA)
    metadata = CheckpointDirectory(run.checkpoints).path(100) / ".metadata"
    with acting_as(ADA):
        tier = SharedTier(run.checkpoints, Group(), keep=3, attempt=1, stale=lambda: "")
        found, _ = tier.candidates()
        metadata.chmod(0o666)
        refused = tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
        assert f"{metadata} is not private to this user" in refused
        with pytest.raises(CheckpointException):
            export(metadata.parent, common / "out", "torch")
        assert not (common / "proof").exists()
        metadata.chmod(0o600)
        tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
    assert (common / "proof").exists(), "the attack is none, and this test shows nothing"


@as_others
@pytest.mark.parametrize("what", ["a link", "a file", "a pipe"])
def test_a_page_is_written_into_nothing_of_another_user_s(common: Path, what: str) -> None:
    """In a directory that others may write to: a link may lead to any file of this user's."""
    page, precious = common / "page.html", common / "precious"
    precious.write_text("Ada's")
    give(precious, ADA)
    with acting_as(MALLORY):
        if what == "a link":
            page.symlink_to(precious)
        elif what == "a file":
            page.touch()
            page.chmod(0o666)
        else:
            os.mkfifo(page, 0o666)
    with acting_as(ADA):
        with pytest.raises(RunDirectoryError, match="cannot write"):
            write_page("secret", page)
        own = common / "own"
        own.symlink_to(precious)
        write_page("a page", own)
        write_page("another", precious)
        write_page("", Path("/dev/null"))
        write_page("new", common / "new.html")
    if what == "a file":
        assert page.read_text() == ""
    assert precious.read_text() == "another"
    assert (common / "new.html").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    os.umask(found := os.umask(0o077))
    return found


@as_others
def test_an_export_writes_through_nobody_s_link(common: Path) -> None:
    """To a directory that others may write to: no name in it can be foreseen, and no file is replaced."""
    run = RunDirectory(common / "run")
    run.create()
    own = common / "precious"
    own.write_text("Ada's")
    saved = CheckpointDirectory(run.checkpoints)
    place = saved.begin(100, 1)
    dcp.save({"x": torch.ones(1)}, checkpoint_id=place)
    saved.publish(place, 100)
    for path in (run.root, own):
        give(path, ADA)
    with acting_as(MALLORY):
        (common / f".out.{os.getpid()}").symlink_to(own)
    with acting_as(ADA):
        export(saved.path(100), common / "out", "torch")
        assert torch.load(common / "out", weights_only=True)["x"].item() == 1.0
    assert own.read_text() == "Ada's"


@as_others
def test_anothers_runs_say_nothing_about_nodes_and_hang_nothing(shared: Place) -> None:
    """Not even with a pipe in place of a plan, or of what was kept of earlier runs."""
    pipe = shared.runs / "20990101-000000-pipe-0000"
    pipe.mkdir(mode=0o755)
    os.mkfifo(pipe / "plan.json", 0o666)
    give(pipe, MALLORY)
    with acting_as(ADA):
        kept = summary_file(shared.runs)
    os.mkfifo(kept, 0o666)
    os.chown(kept, MALLORY, MALLORY)
    with acting_as(ADA):
        assert [run.run for run in past_runs(shared.runs)] == [RUN]
        assert run_ids(shared.runs) == [RUN]
        with pytest.raises(OSError, match="not an ordinary file"):
            foreign.read(pipe / "plan.json", 10)


@as_others
def test_a_fleet_has_the_runs_of_others_and_counts_those_that_may_not_be_read(shared: Place) -> None:
    with acting_as(ADA):
        fleet = read_fleet([shared.runs])
        assert json.loads(kept_file(shared.runs).read_text())["entries"].keys() == {RUN, FORGED}
    owners = {Path(name).name: run.user for name, run in fleet.runs.items()}
    assert owners == {RUN: foreign.user_name(ADA), FORGED: foreign.user_name(MALLORY)}
    with acting_as(MALLORY):
        fleet = read_fleet([shared.runs])
    assert [Path(name).name for name in fleet.runs] == [FORGED]
    ((name, why),) = fleet.unreadable
    assert (Path(name).name, f"belongs to {foreign.user_name(ADA)}" in why) == (RUN, True)


@as_others
def test_anothers_word_on_which_nodes_are_forgiven_is_not_believed(shared: Place) -> None:
    with acting_as(ADA):
        word = forgiven_file(shared.runs)
    word.write_text('{"v": 1, "entries": {"n3": 1.0}}')
    for owner, believed in ((MALLORY, {}), (ADA, {"n3": 1.0})):
        os.chown(word, owner, owner)
        with acting_as(ADA):
            assert forgiven_nodes(shared.runs) == believed


def test_only_what_this_user_alone_can_write_is_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (own / "file").write_bytes(b"x")
    assert foreign.owns(own)
    assert foreign.read_own(own / "file", 10) == b"x"
    with foreign.own_directory(own) as place:
        own.rename(tmp_path / "elsewhere")
        assert (place / "file").read_bytes() == b"x"
    own = tmp_path / "elsewhere"
    (tmp_path / "own").symlink_to(own)
    with pytest.raises(OSError), foreign.own_directory(tmp_path / "own"):
        pass
    for path in (own, own / "file"):
        path.chmod(0o770)
    assert not foreign.owns(own)
    with pytest.raises(foreign.NotOurs, match="chmod go-w"):
        foreign.read_own(own / "file", 10)
    with pytest.raises(foreign.NotOurs), foreign.own_directory(own):
        pass
    (tmp_path / "link").symlink_to(own / "file")
    with pytest.raises(OSError) as caught:
        foreign.read_own(tmp_path / "link", 10)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(OSError, match="has 1 bytes, at most 0 are allowed"):
        foreign.read(own / "file", 0)


# Links and names in a directory that others can write to.

OTHER = "20261117-110000-other-abce"


def link(place: Path, target: Path) -> None:
    place.symlink_to(target)
    os.chown(place, MALLORY, MALLORY, follow_symlinks=False)


@as_others
@pytest.mark.parametrize("way", ["a link", "a directory", "a run of theirs"])
def test_the_number_of_a_job_means_that_job(shared: Place, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Whatever somebody has called like it, in the runs directory or in the one where the user is."""
    other = shared.story(swapped(), OTHER)
    give(other.root, ADA)
    here = shared.root / "here"
    here.mkdir()
    for place in (shared.runs / JOB, here / JOB):
        if way == "a link":
            link(place, other.root)
        elif way == "a directory":
            place.mkdir()
        else:
            (shared.runs / FORGED).rename(place) if (shared.runs / FORGED).exists() else place.mkdir()
    monkeypatch.chdir(here)
    with acting_as(ADA):
        assert find_run(JOB, shared.runs).root.name == RUN
        assert find_run(f"{JOB};cluster", shared.runs).root.name == RUN


@as_others
def test_a_link_is_no_run_of_mine(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("20261117-120000-link-0000", "latest", "$(touch proof)", "-rf", "a b", "run\n", "local-7"):
        link(shared.runs / name, shared.runs / RUN)
        (shared.runs / f"{name}.d").mkdir()
        give(shared.runs / f"{name}.d", MALLORY)
    main(["cancel", "--help"])
    with acting_as(ADA):
        assert run_ids(shared.runs) == [RUN]
        assert [run.run for run in past_runs(shared.runs)] == [RUN]
        monkeypatch.setenv("JURYMAST_RUNS", str(shared.runs))
        for name in ("latest", "20261117-120000-link-0000", str(shared.runs / "latest")):
            assert main(["cancel", name]) == 73


@as_others
def test_a_link_of_mine_leads_where_i_made_it_lead(shared: Place) -> None:
    (shared.runs / "mine").symlink_to(shared.runs / RUN)
    os.chown(shared.runs / "mine", ADA, ADA, follow_symlinks=False)
    with acting_as(ADA):
        assert find_run("mine", shared.runs).root == (shared.runs / RUN).resolve()
        assert run_ids(shared.runs) == [RUN]


@as_others
def test_one_failure_is_one_strike_however_often_it_is_there(shared: Place) -> None:
    with acting_as(ADA):
        (before,) = past_runs(shared.runs)
    assert before.departures
    for number in range(5):
        link(shared.runs / f"20261117-12000{number}-link-0000", shared.runs / RUN)
        copy = shared.runs / f"20261117-13000{number}-copy-0000"
        shutil.copytree(shared.runs / RUN, copy)
        give(copy, ADA)
    with acting_as(ADA):
        assert sum((list(run.departures) for run in past_runs(shared.runs)), []) == list(before.departures)
        assert sum((list(run.spans) for run in past_runs(shared.runs)), []) == list(before.spans)


@as_others
def test_completion_offers_no_name_that_a_shell_would_run(shared: Place) -> None:
    for name in (
        "2026$(touch proof)",
        "2026`touch proof`",
        "2026;touch proof",
        "2026 x",
        "2026\n$(x)",
        "2026'x",
    ):
        (shared.runs / name).mkdir()
        (shared.runs / name / "plan.json").write_text("{}")
        give(shared.runs / name, ADA)
    with acting_as(ADA):
        assert run_ids(shared.runs) == [RUN]


# Runs directories of others.


@as_others
@pytest.mark.parametrize(
    ("owner", "mode", "who"),
    [
        (0, 0o1777, ""), (0, 0o755, ""), (ADA, 0o700, ""), (ADA, 0o1777, ""), (MALLORY, 0o755, MALLORY),
        (MALLORY, 0o1777, MALLORY), (0, 0o777, "all users"), (ADA, 0o777, "all users"),
        (ADA, 0o770, "group"), (0, 0o2775, "group"),
    ],
)  # fmt: skip
def test_a_runs_directory_in_which_others_can_replace_a_run_is_refused(
    common: Path, owner: int, mode: int, who: str | int
) -> None:
    runs = common / "runs"
    runs.mkdir()
    os.chown(runs, owner, MALLORY)
    runs.chmod(mode)
    who = foreign.user_name(who) if isinstance(who, int) else who
    with acting_as(ADA):
        assert foreign.who_may_change(runs).startswith(who)
        assert bool(foreign.who_may_change(runs)) == bool(who)
        if not who:
            check_runs_directory(runs) if os.access(runs, os.W_OK, effective_ids=True) else None
        elif os.access(runs, os.W_OK, effective_ids=True):
            with pytest.raises(RunDirectoryError, match="would be run as you"):
                check_runs_directory(runs)
            check_runs_directory(runs, shared=True)


@as_others
def test_an_access_control_list_is_no_private_group(common: Path) -> None:
    """A new directory gets it from the one above, if that has a default list, whatever the umask."""

    def entry(tag: int, may: int, who: int = 0xFFFFFFFF) -> bytes:  # acl(5), as the kernel has it
        return struct.pack("<HHI", tag, may, who)

    runs = common / "runs"
    whole = [entry(1, 7), entry(2, 7, MALLORY), entry(4, 0), entry(16, 7), entry(32, 0)]
    try:
        os.setxattr(common, "system.posix_acl_default", struct.pack("<I", 2) + b"".join(whole))
    except OSError:
        pytest.skip("this file system has no access control lists")
    ada = next(user for user in pwd.getpwall() if has_private_group(user) and user.pw_uid)
    runs.mkdir()
    os.chown(runs, ada.pw_uid, ada.pw_gid)
    with acting_as(ada.pw_uid):
        assert "access control list" in foreign.who_may_change(runs)
        runs.chmod(0o700)
        assert foreign.who_may_change(runs) == ""


def has_private_group(user: pwd.struct_passwd) -> bool:
    try:
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


@as_others
def test_a_run_that_was_swapped_while_it_waited_is_not_started(shared: Place, common: Path) -> None:
    """Its directory, its plan, or a link in place of one."""
    run = RunDirectory(shared.runs / RUN)
    with acting_as(ADA):
        assert run.own_plan().run
    for swap in (shared.runs / FORGED, shared.runs / "link"):
        if swap.name == "link":
            link(swap, shared.runs / "kept")
        run.root.rename(shared.runs / "kept")
        swap.rename(run.root)
        with acting_as(ADA), pytest.raises(RunDirectoryError):
            run.own_plan()
        run.root.rename(swap)
        (shared.runs / "kept").rename(run.root)
    os.chown(run.plan_file, MALLORY, MALLORY)
    run.plan_file.chmod(0o644)
    with acting_as(ADA), pytest.raises(RunDirectoryError, match="nothing of this run is started"):
        run.own_plan()
    os.chown(run.plan_file, ADA, ADA)
    run.root.chmod(0o777)
    with acting_as(ADA), pytest.raises(RunDirectoryError, match="nothing of this run is started"):
        run.own_plan()


@pytest.mark.parametrize("text", ["", "00", "ab" * 31, "ab" * 33, " ", "\n"])
def test_a_secret_of_another_length_is_none(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    assert len(run.secret()) == 32
    run.secret_file.write_text(text)
    with pytest.raises(RunDirectoryError, match="cannot read the run's secret"):
        run.secret()


# What a terminal would take for a command.

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"


@as_others
@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["status", "--nodes"], ["events"], ["events", "--all"], ["events", "--json"], ["logs"],
        ["logs", "--job"], ["logs", "--all"], ["logs", "--rank", "7"], ["report"], ["checkpoints"],
        ["checkpoints", "verify"], ["cancel"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_nothing_in_a_colleagues_run_reaches_the_terminal_as_a_command(
    shared: Place, words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(shared.runs / FORGED)
    plan = json.loads(run.plan_file.read_text())
    plan["name"] = plan["script"] = ESCAPE
    run.plan_file.write_text(json.dumps(plan))
    (run.submission / f"job-{ESCAPE}.log").write_text(f"{ESCAPE}\n")
    (run.submission / "job-1\n\x1b.log").write_text(f"{ESCAPE}\n")
    logs = run.attempt_logs(run.newest_attempt())
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "rank-00000.log").write_text(f"{ESCAPE}\n")
    for name in ("rank-x.log", "rank-.log", f"rank-{ESCAPE}.log", "rank-\u0663\u0663\u0663\u0663\u0663.log"):
        (logs / name).write_text(ESCAPE)
    manifest = next(run.checkpoints.glob("step-*/*.json"))
    values = json.loads(manifest.read_text())
    for broken in ({**values, "format": ESCAPE}, {**values, "format": [ESCAPE]}):
        manifest.write_text(json.dumps(broken))
        (run.checkpoints / f"step-{ESCAPE}").mkdir(exist_ok=True)
        with next(run.journal_files()).open("a") as file:
            file.write(f"{ESCAPE}\n")
        for path in (run.root, *run.root.rglob("*")):
            path.chmod(0o755)
            os.chown(path, MALLORY, MALLORY)
        monkeypatch.setenv("JURYMAST_RUNS", str(shared.runs))
        main([words[0], "--help"])
        capfd.readouterr()
        with acting_as(ADA):
            main([words[0], FORGED, *words[1:]])
        out, err = capfd.readouterr()
        assert out or err
        bad = {letter for letter in out + err if not letter.isprintable()} - {"\n", "\t"}
        assert not bad
        assert "Traceback" not in err


# Devices, sizes, and what is left behind.


@as_others
def test_a_device_is_not_opened(tmp_path: Path) -> None:
    """To open a tape rewinds it, and a watchdog restarts the machine: a terminal here, which would answer."""
    device = tmp_path / "plan.json"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(4, 255))  # nobody has it: to open it is another error
    with pytest.raises(OSError, match="it is not an ordinary file"):
        foreign.read(device, 10)
    with pytest.raises(OSError, match="it is not an ordinary file"):
        foreign.read_own(device, 10)
    with pytest.raises(OSError):
        os.open(device, os.O_RDONLY)


def test_links_permissions_and_directories_are_named_as_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert foreign.read(tmp_path / "link", 10) == b"x"
    with pytest.raises(OSError) as refused:
        foreign.read_own(tmp_path / "link", 10)
    assert (refused.value.errno, refused.value.filename) == (errno.ELOOP, str(tmp_path / "link"))
    with pytest.raises(foreign.NotAFile) as refused:
        foreign.read(tmp_path, 10)
    assert refused.value.errno == errno.EISDIR
    with pytest.raises(FileNotFoundError):
        foreign.read(tmp_path / "none", 10)


def test_every_reader_states_how_much_it_takes() -> None:
    """There is no limit for all kinds of files, which would have to be that of the largest."""
    for read in (foreign.read, foreign.read_own, foreign.load, foreign.load_own):
        assert inspect.signature(read).parameters["most"].default is inspect.Parameter.empty
    assert foreign.NOTE_BYTES_MAX < foreign.PLAN_BYTES_MAX < foreign.MANIFEST_BYTES_MAX <= 32 << 20


@pytest.mark.parametrize("name", ["a step's manifest", "an endpoint", "a pulse", "local.json"])
def test_a_file_that_is_too_long_for_its_kind_is_not_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its size alone: nothing of it is parsed."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    files: dict[str, tuple[Path, Callable[[], object]]] = {
        "a step's manifest": (
            tmp_path / "checkpoints" / "step-00000100" / MANIFEST,
            lambda: CheckpointDirectory(tmp_path / "checkpoints").manifest(100),
        ),
        "an endpoint": (run.epochs / endpoint.NEWEST, lambda: endpoint.find(run.epochs)),
        "a pulse": (run.epochs / endpoint.PULSE, lambda: endpoint.read_pulse(run.epochs)),
        "local.json": (run.submission / "local.json", lambda: local_process(run)),
    }
    path, use = files[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(foreign.MANIFEST_BYTES_MAX + 1)
    monkeypatch.setattr(foreign, "parse", lambda data: pytest.fail("it was parsed"))
    with suppress(OSError, BadCheckpoint):
        assert not use()


def test_a_plan_and_a_note_have_limits_of_their_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.plan_file.write_bytes(b" " * (foreign.PLAN_BYTES_MAX + 1))
    for read in (run.plan, run.own_plan):
        with pytest.raises(RunDirectoryError):
            read()
    with pytest.raises(OSError, match="at most"):
        foreign.load(run.plan_file, foreign.NOTE_BYTES_MAX)


@as_others
@pytest.mark.parametrize("way", ["a directory", "a file", "a link"])
def test_a_local_disk_on_which_the_usual_name_is_taken_serves_all_the_same(common: Path, way: str) -> None:
    usual = common / f"jurymast-{os.getuid()}"
    assert local_root(str(common), "run") == usual / "run"
    usual.rmdir()  # it is made at once, before anybody else can take the name
    if way == "a directory":
        usual.mkdir(mode=0o777)
    elif way == "a file":
        usual.touch()
    else:
        usual.symlink_to("/etc")
    os.chown(usual, MALLORY, MALLORY, follow_symlinks=False)
    planted = common / f"{usual.name}-planted"
    planted.mkdir(mode=0o777)
    os.chown(planted, MALLORY, MALLORY)
    with acting_as(ADA):
        found = local_root(str(common), "run")
        assert found.parent.parent == common
        assert found.parent not in (usual, planted)
        assert foreign.owns(found.parent)
        assert local_root(str(common), "run") == found, "the next agent finds the images"


def test_no_core_is_left_of_what_holds_secrets_and_the_ranks_keep_their_limit() -> None:
    code = (
        "import resource as r; from jurymast.processes import allow_core, leave_no_core as l\n"
        "r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2)\n"  # many systems begin with none
        "before = r.getrlimit(r.RLIMIT_CORE); was = l(); now = r.getrlimit(r.RLIMIT_CORE); allow_core(was)\n"
        "print(now[0], r.getrlimit(r.RLIMIT_CORE) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]


def test_images_are_left_out_of_core_files_of_agents_and_ranks() -> None:
    buffer = MappedBuffer(1 << 20)
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer.map))
    sections = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    (flags,) = [re.search(r"VmFlags:(.*)", one) for one in sections if one.startswith(f"{start:x}-")]
    assert flags is not None
    assert "dd" in flags[1].split()
    for module in (processes, memory_tier):  # everything that maps them
        text = inspect.getsource(module)
        maps = text.count("= mmap.mmap(")
        assert maps > 0
        assert maps == text.count(" leave_out_of_cores(") - text.count("def leave_out")
