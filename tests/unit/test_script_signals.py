"""Signals for a batch script, and what else reaches it and its steps, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from jurymast.agent.ranks import tell_ranks
from jurymast.cluster.signals import WARNINGS
from jurymast.cluster.slurm import users_script
from jurymast.processes import TASKS_ALONE_VARIABLE
from jurymast.rundir import RunDirectory
from jurymast.script import WARNING, shims
from jurymast.script.step import node_command
from support.waiting import wait_until

RUN_SCRIPT = """
import sys
from pathlib import Path
from jurymast.script.job import run_script
goes_on = lambda: sys.argv[3:] == ["goes on"]
sys.exit(run_script(Path(sys.argv[1]), ["a b"], {}, warns=sys.argv[2] == "warns", goes_on=goes_on))
"""


@pytest.mark.parametrize("warns", [True, False])
def test_signals_for_the_batch_process_reach_the_script(tmp_path: Path, warns: bool) -> None:
    """But for our own warning of the time limit, and the SIGTERM that Slurm sends to all."""
    job = RunDirectory(tmp_path)
    job.submission.mkdir()
    traps = "trap 'exec echo $1' USR1; trap 'echo > warned' USR2; echo > ready"
    loop = "while :; do sleep 0.01; done"
    users_script(job).write_text(f"#!/bin/bash\ncd {tmp_path}\n{traps}\n{loop}\n")
    command = [sys.executable, "-c", RUN_SCRIPT, str(users_script(job)), "warns" if warns else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until("the script's traps", (tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR2)
        if not warns:
            wait_until("its warning", (tmp_path / "warned").exists)
        process.send_signal(signal.SIGUSR1)
        told, _ = process.communicate(timeout=120)
    assert (told, process.returncode) == ("a b\n", 0)
    assert (tmp_path / "warned").exists() is not warns


@pytest.mark.parametrize(("traps", "ends"), [(True, 0), (False, -signal.SIGTERM)])
def test_a_sigterm_that_does_not_end_the_job_is_for_the_script(
    tmp_path: Path, traps: bool, ends: int
) -> None:
    """As with `--signal=B:TERM@60`, which Slurm sends to the batch process alone."""
    job = RunDirectory(tmp_path)
    job.submission.mkdir()
    trap = "trap 'exec echo trapped' TERM\n" if traps else ""
    loop = "while :; do sleep 0.01; done"
    users_script(job).write_text(f"#!/bin/bash\ncd {tmp_path}\n{trap}echo > ready\n{loop}\n")
    command = [sys.executable, "-c", RUN_SCRIPT, str(users_script(job)), "", "goes on"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until("the script's traps", (tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=60)
    assert (told, process.returncode) == ("trapped\n" if traps else "", ends)


def has_heard(heard: Path, times: int) -> bool:
    return heard.exists() and heard.stat().st_size >= times


def test_a_warning_while_the_scripts_commands_come_and_go(tmp_path: Path) -> None:
    job = RunDirectory(tmp_path)
    job.submission.mkdir()
    heard = tmp_path / "heard"
    loop = "until [[ -e enough ]]; do (/bin/true; :) | /bin/true; done"
    users_script(job).write_text(
        f"#!/bin/bash\ncd {tmp_path}\ntrap 'echo >> heard' USR1; echo > ready\n{loop}\necho done\n"
    )
    command = [sys.executable, "-c", RUN_SCRIPT, str(users_script(job)), ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until("the script's traps", (tmp_path / "ready").exists)
        for number in range(1, 101):
            process.send_signal(signal.SIGUSR1)
            wait_until("the trap", partial(has_heard, heard, number))
        (tmp_path / "enough").touch()
        told, _ = process.communicate(timeout=120)
    assert (told, process.returncode) == ("done\n", 0)


@pytest.mark.parametrize(("traps", "printed"), [(False, ""), (True, "trapped\nafter 143\n")])
def test_a_script_does_not_go_on_before_slurms_sigterm_has_reached_it_too(
    tmp_path: Path, traps: bool, printed: str
) -> None:
    ready = tmp_path / "ready"
    code = (
        "import os, pathlib, signal, time\nfrom jurymast.script import step\n"
        f"step.SHELL_LIMIT_S = {5.0 if traps else 60.0}\n"  # a busy machine must not change the result
        "signal.signal(signal.SIGTERM, step.end_after_the_script)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    )
    trap = "trap 'echo trapped' TERM\n" if traps else ""
    script = f"{trap}{shlex.join([sys.executable, '-c', code])}\necho after $?\n"
    with subprocess.Popen(["/bin/bash", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        wait_until("the step", ready.exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the shell
            shell.wait(0.3)
        shell.send_signal(signal.SIGTERM)
        assert shell.communicate(timeout=60)[0] == printed


def test_a_signal_that_comes_before_the_script_waits_for_its_traps(tmp_path: Path) -> None:
    job = RunDirectory(tmp_path)
    job.submission.mkdir()
    script = "#!/bin/bash\ntrap 'exec echo trapped' USR1\nwhile :; do sleep 0.01; done\n"
    users_script(job).write_text(script)
    early = "import os, signal\nfrom jurymast.script import hold\nhold()\n"
    early += "os.kill(os.getpid(), signal.SIGUSR1)\n"
    done = subprocess.run(
        [sys.executable, "-c", early + RUN_SCRIPT, str(users_script(job)), ""], capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("trapped\n", 0)


def test_a_script_that_a_signal_ends_ends_its_batch_process_so(tmp_path: Path) -> None:
    job = RunDirectory(tmp_path)
    job.submission.mkdir()
    users_script(job).write_text("#!/bin/sh\nkill -INT $$\n")
    command = [sys.executable, "-c", RUN_SCRIPT, str(users_script(job)), ""]
    done = subprocess.run(command, timeout=120, check=False)
    assert done.returncode == -signal.SIGINT


SAVES_WHEN_WARNED = """
import pathlib, signal, sys
def save(number, _frame):
    pathlib.Path("saved").write_text(signal.Signals(number).name)
    sys.exit(7)
for number in map(int, sys.argv[1:]):
    assert signal.signal(number, save) == signal.SIG_DFL
pathlib.Path("ready").touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("warning", WARNINGS)
def test_a_warning_to_all_processes_of_a_step_does_not_end_the_shell_around_its_command(
    tmp_path: Path, warning: signal.Signals
) -> None:
    """The step would end with that shell, and Slurm would kill the command while it saves."""
    step, program = tmp_path / "step", tmp_path / "node"
    step.mkdir()
    program.write_text(node_command(RunDirectory(tmp_path / "job"), step, {}, 1, tmp_path / "log", {}))
    program.chmod(0o700)
    slurms = {"SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1"}
    command = [str(program), sys.executable, "-c", SAVES_WHEN_WARNED, *(str(int(one)) for one in WARNINGS)]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, **slurms}, start_new_session=True
    ) as process:
        try:
            wait_until("the command", (tmp_path / "ready").exists)
            os.killpg(process.pid, warning)
            assert process.wait(60) == 7
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "saved").read_text() == warning.name
    assert (step / "ended-n1").read_text() == "7\n"


TAKES_SIGNALS = """
import pathlib, signal, subprocess, sys, time
from jurymast.script import hold
hold()
from jurymast.script import signals as taken
from jurymast.script.signals import StepSignals
from jurymast.script.srun import parse
taken.TWICE_S = 60.0  # a busy machine must not change the result
class Training:
    def warned(self): print("warned", flush=True)
    def ordered_to_end(self): print("ordered to end", flush=True)
signals = StepSignals(parse([*sys.argv[2:], "x"]), parts="parts" in sys.argv[1])
signals.listen()
srun = subprocess.Popen([sys.executable, "-c", pathlib.Path("srun.py").read_text()])
while not pathlib.Path("ready").exists(): time.sleep(0.01)
signals.training = Training() if "trains" in sys.argv[1] else None
signals.started(srun)
pathlib.Path("listens").touch()
srun.wait()
signals.close()
"""
SRUN = """
import pathlib, signal
heard = []
def hear(number, _frame):
    print(signal.Signals(number).name, flush=True)
    if number in (signal.SIGTERM, signal.SIGHUP): raise SystemExit
for number in (1, 2, 3, 10, 12, 15): signal.signal(number, hear)
pathlib.Path("ready").touch()
while True: signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "options", "sent", "told"),
    [
        ("trains", "", "USR1 USR2", "warned SIGUSR1 warned SIGUSR2"),
        ("", "", "USR1 USR2", "SIGUSR1 SIGUSR2"),
        ("trains", "", "USR1 USR1", "warned SIGUSR1 warned SIGUSR1"),
        ("trains parts", "", "USR1 USR1 USR2", "warned SIGUSR1 warned SIGUSR2"),
        ("trains", "", "RTMIN+16", "warned"),
        ("trains", "", "TERM", "ordered to end"),
        ("trains", "", "HUP QUIT", "ordered to end ordered to end"),
        ("trains", "", "INT USR1", "SIGINT warned SIGUSR1"),
        ("trains", "", "INT INT", "SIGINT ordered to end"),
        ("trains", "-X", "INT", "ordered to end"),
        ("trains", "--quit-on-interrupt", "INT", "ordered to end"),
        ("", "", "INT INT", "SIGINT SIGTERM"),
        ("", "", "HUP", "SIGHUP"),
    ],
)
def test_the_front_end_of_a_step_takes_signals_as_srun_does(
    tmp_path: Path, how: str, options: str, sent: str, told: str
) -> None:
    """Those for ranks go to the real srun; those that end a training are for its supervisor."""
    (tmp_path / "srun.py").write_text(SRUN)
    command = [sys.executable, "-c", TAKES_SIGNALS, how, *options.split()]
    expected = told.replace("ordered to end", "ordered-to-end").split()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            wait_until("the front end", (tmp_path / "listens").exists)
            heard: list[str] = []
            for name in sent.split():
                number = signal.SIGRTMIN + 16 if "+" in name else getattr(signal, f"SIG{name}")
                process.send_signal(number)
                if len(heard) < len(expected) and not (
                    name == "USR1" and heard[-1:] == ["SIGUSR1"] and "parts" in how
                ):
                    heard.append(process.stdout.readline().strip().replace(" ", "-"))
                    if heard[-1] == "warned" and "+" not in name:
                        heard.append(process.stdout.readline().strip())
            assert heard == expected
        finally:
            os.killpg(process.pid, signal.SIGKILL)


WARNED = """
import pathlib, signal
from jurymast.processes import name_process
from jurymast.script import WARNING, shims
from jurymast.script.step import PROCESS_NAME
for number in (signal.SIGUSR1, signal.SIGUSR2, WARNING):
    signal.signal(number, lambda number, _: pathlib.Path("warned").write_text(str(int(number))))
name_process(PROCESS_NAME)
pathlib.Path("ready").touch()
while True: signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_warning_for_trainings_is_no_signal_of_the_scripts(tmp_path: Path, number: int) -> None:
    """Their front ends pass SIGUSR1 and SIGUSR2 on to the ranks."""
    job = RunDirectory(tmp_path)
    job.submission.mkdir()
    (tmp_path / "step.py").write_text(WARNED)
    users_script(job).write_text(
        f"#!/bin/bash\ncd {tmp_path}\ntrap : USR1 USR2\n{sys.executable} step.py &\nwhile :; do wait; done\n"
    )
    command = [sys.executable, "-c", RUN_SCRIPT, str(users_script(job)), "warns"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            wait_until("the front end", (tmp_path / "ready").exists)
            process.send_signal(number)
            told = wait_until(
                "the warning", lambda: (tmp_path / "warned").exists() and (tmp_path / "warned").read_text()
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert int(told) == WARNING


ENDS_STEP = [
    ("srun x & wait_for_it; kill -TERM $!; wait $!", "TERM", 3),
    ("srun x & wait_for_it; kill -USR1 $!; wait $!", "USR1", 3),
    ("srun x > log & wait_for_it; kill -HUP $!; wait $!", "HUP", 3),
    ("srun x | cat & wait_for_it; kill -USR2 $(cat pid); wait", "USR2", 0),
    ("(srun x & wait_for_it; kill -USR1 $!; wait $!; exit $?) & wait $!", "USR1", 3),
    ("f() { srun x & wait_for_it; kill -INT $!; wait $!; }; set -eu; f", "INT", 3),
    ("srun x & wait_for_it; kill %1; wait $!", "TERM", 3),
    ("trap 'kill $(jobs -p)' EXIT; srun x & wait_for_it; exit 4", "TERM", 4),
    ("timeout 1h srun x & wait_for_it; kill $!; wait $!", "TERM", 3),
    # Not a shell that only runs srun: what ends it ends the step.
    ("(srun x; echo > after) & wait_for_it; kill -TERM $!; wait $!", "TERM", 143),
    ("{ srun x; echo > after; } & wait_for_it; kill -USR1 $!; wait $!", "TERM", 138),
]


# In bash 5.3, or where QUIT is ignored, these are as any `srun x &`, and the signal is for the step.
ENDS_WITH_STEP = {
    "(srun x; echo > after) & wait_for_it; kill -TERM $!; wait $!": ("TERM", 3),
    "{ srun x; echo > after; } & wait_for_it; kill -USR1 $!; wait $!": ("USR1", 0),
}
NEW_BASH = (5, 3)


def hears_all() -> None:
    """These tests may run in the background of a shell, which ignores both."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def bash_release() -> tuple[int, ...]:
    told = subprocess.run(["bash", "-c", "echo ${BASH_VERSINFO[@]:0:2}"], stdout=subprocess.PIPE, text=True)
    return tuple(map(int, told.stdout.split()))


@pytest.mark.parametrize("ignored", [False, True], ids=["", "QUIT is ignored"])
@pytest.mark.parametrize(("script", "heard", "code"), ENDS_STEP)
def test_a_signal_for_a_background_step_reaches_it(
    tmp_path: Path, script: str, heard: str, code: int, *, ignored: bool
) -> None:
    """$! is srun itself, as without us, or passes signals on to it."""
    if ignored or bash_release() >= NEW_BASH:
        heard, code = ENDS_WITH_STEP.get(script, (heard, code))
    job = RunDirectory(tmp_path / "run")
    job.create()
    shims.write(job, sys.executable)
    (tmp_path / "bin").mkdir()
    shims.write_program(
        tmp_path / "bin" / "srun",
        f"#!{sys.executable}\nimport os, pathlib, signal, sys\n"
        "def hear(number, _frame):\n"
        "    pathlib.Path('heard').write_text(signal.Signals(number).name[3:])\n"
        "    os._exit(3)\n"
        "for name in ('TERM', 'HUP', 'INT', 'QUIT', 'USR1', 'USR2'):\n"
        "    signal.signal(getattr(signal, 'SIG' + name), hear)\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "pathlib.Path('ready').touch()\n"
        "while True: signal.pause()\n",
    )
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    environment = shims.with_shims({"PATH": path, "SLURM_JOB_ID": "7"}, job)
    begin = "wait_for_it() { until [ -e ready ]; do sleep 0.05; done; }\n"
    begin += f"trap {'' if ignored else '-'!r} QUIT\n"
    done = subprocess.run(
        ["bash", "-c", begin + script], env=environment, timeout=120, check=False, cwd=tmp_path,
        preexec_fn=hears_all,
    )  # fmt: skip
    wait_until("the signal", lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").read_text())
    assert ((tmp_path / "heard").read_text(), done.returncode) == (heard, code)
    assert (tmp_path / "after").exists() == (code == 0 and "after" in script)


TRACED = {
    "an ERR trap": "trap 'echo \"line $LINENO: $BASH_COMMAND: $? $_\"' ERR\n  srun $ARGS 3 'a b'\necho on $?",
    "one that functions have": "set -E; trap 'echo failed' ERR\nsrun 3; srun 0; srun 4 || :",
    "set -e": "trap 'echo \"at its end: $BASH_COMMAND: $?\"' EXIT\nset -eu\nIFS=,\nsrun 0\nsrun 3 a\necho",
    "handled": "set -e; trap 'echo failed' ERR\nsrun 3 || echo $?\nsrun 4 && echo || echo $?\n! srun 5",
    "set -x": "set -x\nsrun 0 \"a b\"\nsrun 3\nsrun 4 | cat\n(srun 5; echo in $?)\nsrun 6 &\nwait",
    "another job": "set -x; export SLURM_JOB_ID=8\nsrun 3; echo $?",
}  # fmt: skip


@pytest.mark.parametrize("name", TRACED)
def test_what_a_script_sees_of_its_srun_is_what_it_sees_of_a_program(tmp_path: Path, name: str) -> None:
    job = RunDirectory(tmp_path / "run")
    for folder in (tmp_path / "bin", shims.folder(job)):
        folder.mkdir(parents=True)
        shims.write_program(folder / "srun", '#!/bin/sh\necho "$@"\nexit $1\n')
    users = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "ARGS": "3"}

    def told(environment: dict[str, str]) -> tuple[int, list[str]]:
        done = subprocess.run(
            ["bash", "-c", TRACED[name]], env=environment, text=True, timeout=120, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, sorted(done.stdout.splitlines())  # of a pipe's ends either may be first

    assert told(shims.with_shims(users, job)) == told(users)


def test_functions_that_a_script_exports_reach_its_steps(tmp_path: Path) -> None:
    """dash drops them, and is what many nodes call sh."""
    job, step, python = RunDirectory(tmp_path / "a run"), tmp_path / "step", tmp_path / "python"
    step.mkdir()
    shims.write_program(python, f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))\n")
    shims.write(job, str(python))
    users = {"PATH": os.environ["PATH"], "BASH_FUNC_f%%": "() {  echo f of $1\n}", "SHLVL": "3"}
    told = subprocess.run([shims.folder(job) / "srun"], env=users, stdout=subprocess.PIPE, check=True).stdout
    assert {name: json.loads(told)[name] for name in users} == users
    for alone in (True, False):
        shims.write_program(
            step / "node", node_command(job, step, {}, 1, tmp_path / "spares", {}, tasks_alone=alone)
        )
        here = {**users, "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
        command = [str(step / "node"), "bash", "-c", "f $SHLVL"]
        done = subprocess.run(command, env=here, capture_output=True, text=True, check=True)
        assert done.stdout == "f of 4\n", "as of a shell within the script's"


PART = """
import pathlib, signal, sys
from jurymast.script import hold
hold()
from jurymast.script import signals as taken
from jurymast.script.signals import PartSignals
from jurymast.script.srun import parse
taken.TWICE_S = 60.0  # a busy machine must not change the result
PartSignals(parse([*sys.argv[2:], "x"]), int(sys.argv[1])).listen()
pathlib.Path("listens").touch()
for count in range(1, 9):
    signal.pause()
    pathlib.Path(f"took-{count}").touch()
"""


@pytest.mark.parametrize(
    ("options", "sent", "told"),
    [("", "USR1 USR2 HUP", "SIGUSR1 SIGUSR2 SIGHUP"), ("", "USR1 INT INT", "SIGUSR1 SIGTERM"),
     ("", "INT USR2 TERM", "SIGUSR2 SIGTERM"), ("-X", "INT", "SIGTERM")],
)  # fmt: skip
def test_a_signal_for_one_srun_of_a_training_is_for_the_one_that_leads(
    tmp_path: Path, options: str, sent: str, told: str
) -> None:
    """A training with one srun for each node."""
    leads = [sys.executable, "-c", SRUN]
    with subprocess.Popen(leads, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as leader:
        assert leader.stdout is not None
        wait_until("the leader", (tmp_path / "ready").exists)
        command = [sys.executable, "-c", PART, str(leader.pid), *options.split()]
        with subprocess.Popen(command, cwd=tmp_path) as part:
            try:
                wait_until("the part", (tmp_path / "listens").exists)
                heard = []
                for number, name in enumerate(sent.split(), 1):
                    part.send_signal(getattr(signal, f"SIG{name}"))
                    wait_until(name, (tmp_path / f"took-{number}").exists)
                    if name != "INT":
                        heard.append(leader.stdout.readline().strip())
                rest = leader.stdout.read().split()  # it ends by the last one
                assert [*heard, *rest] == told.split()
            finally:
                part.kill()
                leader.kill()


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def says(path: Path, text: str) -> bool:
    return text_of(path) == text


TELLS = """
import pathlib, signal, sys
default = [signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler) for number in range(1, 16)
           if number not in (9, 13)]
heard = []
def hear(number, _frame):
    heard.append(signal.Signals(number).name[3:])
    pathlib.Path("heard").write_text(" ".join(heard))
for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM"):
    signal.signal(getattr(signal, "SIG" + name), hear)
pathlib.Path("command").write_text(f"{sys.stdin.readline()}{all(default)} {sys.argv[1:]}")
while heard[-1:] != ["TERM"]: signal.pause()
sys.exit(7)
"""


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize("guarded", [False, True], ids=["the command", "the agent"])
def test_a_signal_for_a_task_alone_is_passed_on(tmp_path: Path, shell: str, guarded: bool) -> None:
    """As by Slurm where it finds a step's processes by cgroups: the shell around the command is the task. A
    guard of an agent is told, if there is one, and the command of the user's own is spared."""
    step, program = tmp_path / "a step", tmp_path / "node"
    step.mkdir()
    log = tmp_path / "log"
    text = node_command(RunDirectory(tmp_path / "job"), step, {}, 1, log, {}, tasks_alone=True)
    program.write_text(text.replace("#!/bin/sh", f"#!{shell}", 1))
    program.chmod(0o700)
    slurms = {"SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1"}
    command = [str(program), sys.executable, "-c", TELLS, "an argument"]
    guard = None
    names = ["USR1", "HUP", "USR2", "USR1", "INT", "QUIT", "ALRM", "TERM"]
    if guarded:
        (tmp_path / "guard").mkdir()
        guard = subprocess.Popen(
            [sys.executable, "-c", TELLS], cwd=tmp_path / "guard", stdin=subprocess.DEVNULL
        )
        wait_until("the guard", (tmp_path / "guard" / "command").exists)
        (step / "guard-n1").write_text(f"{guard.pid}\n")
    heard = tmp_path / ("guard" if guarded else ".") / "heard"
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, **slurms}, start_new_session=True, stdin=subprocess.PIPE
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(b"input\n")
            process.stdin.flush()
            wait_until("the command", (tmp_path / "command").exists)
            wait_until("what it tells", (tmp_path / "command").read_text)
            for number, name in enumerate(names):
                process.send_signal(getattr(signal, f"SIG{name}"))
                told = " ".join(names[: number + 1])
                wait_until(name, partial(says, heard, told))
            if guard is not None:
                assert guard.wait(60) == 7
                assert not (tmp_path / "heard").exists()
                process.send_signal(signal.SIGTERM)  # the guard is gone
            assert process.wait(60) == 7
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "command").read_text() == "input\nTrue ['an argument']"
    assert (step / "ended-n1").read_text() == "7\n"


GUARDED = """
import pathlib, signal, sys, time
from jurymast.agent import guard
def agent(_kills):
    heard = []
    def hear(number, _frame):
        heard.append(signal.Signals(number).name[3:])
        pathlib.Path("heard").write_text(" ".join(heard))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked signals"
    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM"):
        signal.signal(getattr(signal, "SIG" + name), hear)
    pathlib.Path("ready").touch()
    while heard[-1:] != ["ALRM"]: signal.pause()
    return 0
sys.exit(guard.run(agent))
"""


@pytest.mark.parametrize("alone", [True, False])
def test_a_guard_passes_signals_for_the_task_alone_on_to_its_agent(tmp_path: Path, alone: bool) -> None:
    """Where Slurm signals all that runs below the task, the agent has it already."""
    environment = {**os.environ, **({TASKS_ALONE_VARIABLE: "1"} if alone else {})}
    names = ["USR1", "HUP", "USR2", "USR1", "INT", "QUIT", "ALRM"]
    heard = tmp_path / "heard"
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED], cwd=tmp_path, env=environment, start_new_session=True
    ) as process:
        try:
            wait_until("the agent", (tmp_path / "ready").exists)
            for number, name in enumerate(names):
                process.send_signal(getattr(signal, f"SIG{name}"))
                if alone:
                    told = " ".join(names[: number + 1])
                    wait_until(name, partial(says, heard, told))
            if alone:
                assert process.wait(60) == 0
            else:
                (agent,) = psutil.Process(process.pid).children()
                agent.send_signal(signal.SIGALRM)
                assert process.wait(60) == 0
                assert heard.read_text() == "ALRM"
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()


RANK = """
import os, pathlib, signal, sys
name, catches, child = sys.argv[1], sys.argv[2] == "catches", sys.argv[3:]
def hear(number, _frame):
    pathlib.Path(name + "-heard").write_text(signal.Signals(number).name)
if catches:
    signal.signal(signal.SIGUSR1, hear)
if child and os.fork() == 0:
    os.execv(sys.executable, [sys.executable, __file__, *child])
pathlib.Path(name).write_text(str(os.getpid()))
while True: signal.pause()
"""


@pytest.mark.parametrize(
    ("program", "hears"),
    [(["rank", "catches", "loader", "no"], "rank"), (["bash", "no", "rank", "catches"], "rank"),
     (["bash", "catches", "rank", "catches"], "bash")],
    ids=["a rank with a loader", "below a program", "a program with a trap"],
)  # fmt: skip
def test_a_signal_for_a_rank_is_for_the_process_that_would_have_got_it(
    tmp_path: Path, program: list[str], hears: str
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), *program]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as process:
        try:
            pids = {}
            for name in (program[0], program[2]):
                pids[name] = int(wait_until(name, partial(text_of, tmp_path / name)))
            tell_ranks([process.pid], [pids["rank"]], signal.SIGUSR1)
            wait_until("the signal", (tmp_path / f"{hears}-heard").exists)
            assert [path.name for path in tmp_path.glob("*-heard")] == [f"{hears}-heard"]
            assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids.values())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


BECOMES = """
import os, signal, sys
from jurymast import processes
from jurymast.worker import rank
processes.ignore_signals()
signal.pthread_sigmask(signal.SIG_BLOCK, processes.OF_JOBS)
if os.fork():
    os.wait()
else:
    rank._bind_to_host(os.getppid())
    rank._become("grep", ["^Sig[BI]", "/proc/self/status"], dict(os.environ))
"""


def test_a_rank_begins_with_the_signals_of_a_task() -> None:
    """None is ignored or blocked: neither those that our processes ignore, nor those that Python does."""
    done = subprocess.run(
        [sys.executable, "-c", BECOMES], capture_output=True, text=True, timeout=60, check=True
    )
    _, blocked, _, ignored = done.stdout.split()
    ordinary = (1 << 31) - 1  # whoever starts these tests may ignore others, which are the C library's own
    assert [int(mask, 16) & ordinary for mask in (blocked, ignored)] == [0, 0], done.stderr
