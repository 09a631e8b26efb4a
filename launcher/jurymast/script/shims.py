"""Programs that a batch script finds before the real ones.

srun is in a directory that comes first on PATH. torchrun, like any other launcher that starts ranks, runs in
Python: a hook that Python imports at its start replaces it in the very Python that trains. So the script may
activate an environment or a container with its own torchrun, in which jurymast must be installed as well. All
these files are in the run directory, the only directory that a container has to see.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from jurymast import foreign
from jurymast.errors import ClusterUnavailableError
from jurymast.interpreter import run_module
from jurymast.rundir import RunDirectory, make_folder, write_atomically

# The batch script's run directory, for everything that runs below the script.
RUN_VARIABLE = "JURYMAST_SCRIPT_RUN"
# The script's Slurm job. In another job, submitted by the script with all its variables, our programs do
# nothing.
JOB_VARIABLE = "JURYMAST_SCRIPT_JOB"
# The step's folder, for everything that runs below the command of a training step.
STEP_VARIABLE = "JURYMAST_STEP"
# A module that the script loads may put the real srun before ours on PATH, but a shell function comes before
# everything on PATH. It runs all in subshells that are silent under `set -x`: traps still find the script's
# srun in $BASH_COMMAND (but with `set -E` in bash 5.2), and one for ERR runs once.
FUNCTION = "BASH_FUNC_srun%%"
# In `srun ... &`, $! is a shell that only runs the function: our srun replaces it, and gets the signals for
# $!. Of all subshells of bash before 5.3 that one alone ignores QUIT and not INT. In others, such as
# `(srun ...; srun ...) &`, a signal that ends the shell is the step's end; our program learns from $$ whether
# one has called it. With bash 5.3, or if the script ignores INT or QUIT, nobody can tell which it is: unless
# the shell has traps of its own, it passes signals on while the step runs, and ends after it if one of them
# was to end it.
SHELL_VARIABLE = "JURYMAST_SCRIPT_SHELL"
SILENT = "{ set +x; } 2> /dev/null"
_ENDING = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FUNCTION_TEXT = """\
() {{  if ( {silent}; [ "${job}" != "$SLURM_JOB_ID" ] ); then ( {silent}; exec srun "$@" )
 elif ( {silent}
  IFS=$' \\t' caller= ignored= always=
  while read -r name caller && [ "$name" != PPid: ]; do :; done < "/proc/$BASHPID/status"
  while read -r name ignored && [ "$name" != SigIgn: ]; do :; done < "/proc/$caller/status"
  while read -r name always && [ "$name" != SigIgn: ]; do :; done < "/proc/$$/status"
  [ "$caller" != "$$" ] && [ "$((0x${{ignored:-0}} & 6)),$((0x${{always:-0}} & 2)),$({traps})" = 4,0, ]
 ) 2> /dev/null; then {silent}; exec {srun} "$@"
 elif ( {silent}
  IFS=$' \\t' caller= ignored= caught= always=
  while read -r name caller && [ "$name" != PPid: ]; do :; done < "/proc/$BASHPID/status"
  while read -r name ignored && [ "$name" != SigIgn: ]; do :; done < "/proc/$caller/status"
  while read -r name caught && [ "$name" != SigCgt: ]; do :; done < "/proc/$caller/status"
  while read -r name always && [ "$name" != SigIgn: ]; do :; done < "/proc/$$/status"
  [ "$caller" != "$$" ] && [ "$((0x${{ignored:-0}} & 4)),$((0x${{caught:-0}} & {own}))" = 4,0 ] &&
   [ "$((0x${{always:-0}} & 2)),$({traps}),$((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] > 502))" != 0,,0 ]
 ) 2> /dev/null; then
  {{ local - && set +xe; local {main}_{{step,code,came,ends}}=; }} 2> /dev/null
  ( {main}=$$ exec {srun} "$@" ) <&0 & {main}_step=$!
  trap '{main}_came=1; kill -s USR1 "${main}_step"' USR1
  trap '{main}_came=1; kill -s USR2 "${main}_step"' USR2
  trap '{main}_came=1; kill -s INT "${main}_step"' INT
  trap '{main}_came=1 {main}_ends=1; kill -s HUP "${main}_step"' HUP
  trap '{main}_came=1 {main}_ends=1; kill -s QUIT "${main}_step"' QUIT
  trap '{main}_came=1 {main}_ends=1; kill -s TERM "${main}_step"' TERM
  while {main}_came=; wait "${main}_step"; {main}_code=$?
   [ "${main}_came" ] && [ "${main}_code" -gt 128 ]; do :; done
  trap - USR1 USR2 INT HUP QUIT TERM
  [ -z "${main}_ends" ] || exit "${main}_code"
  ( exit "${main}_code" )
 else ( {silent}; {main}=$$ exec {srun} "$@" )
 fi && ( {silent} )
}}"""
# Directories that containers see in addition to their own. If both variables are set, apptainer reads only
# the first, so our directory is added to the user's.
BINDS = ("APPTAINER_BIND", "SINGULARITY_BIND")
BIND = """\
case "${0}${1}" in
"") export {0}="${run}" {1}="${run}" ;;
*) {0}="${{{0}:+${0},${run}}}" {1}="${{{1}:+${1},${run}}}" ;;
esac"""

# dash drops variables with names that shells cannot have, such as functions that a script exports. With -p,
# bash reads no file of the user's first (BASH_ENV).
SHELL = "/bin/bash -p" if os.access("/bin/bash", os.X_OK) else "/bin/sh"
SRUN = """\
#!{runs_in}
if [ "${{{main}:-$PPID}}" = "$PPID" ]; then unset {main}; else {main}=$PPID; fi
exec {ours} "$@"
"""
# The shell itself removes the folder from PATH, because it takes quoted text literally: a run directory may
# have any name.
WITHOUT_FOLDER = """\
#!{runs_in}
PATH=:$PATH:
while case "$PATH" in *:{folder}:*) ;; *) false ;; esac; do
  PATH=${{PATH%%:{folder}:*}}:${{PATH#*:{folder}:}}
done
PATH=${{PATH#:}}
PATH=${{PATH%:}}
"""
# A script finds itself, and what is beside it, by `scontrol show job` and its Command=, and keeps a copy of
# itself by `scontrol write batch_script`. Both have the file that jurymast has submitted, in the run
# directory; the script is another.
SCONTROL = (
    WITHOUT_FOLDER
    + """\
case "$*" in *show*job*|*write*batch_script*) ;; *) exec scontrol "$@" ;; esac
told=$(scontrol "$@"; code=$?; echo .; exit $code)
code=$? told=${{told%.}}
ours={ours} theirs={theirs} script={script}
is_ours() {{ [ "$1" = "$(cat "$ours")" ]; }}
if case "$*" in *batch_script*) [ "$code" = 0 ] ;; *) false ;; esac; then
  for last; do :; done
  case "$last" in *[!0-9_]*) ;; *) last=slurm-$last.sh ;; esac
  if is_ours "$(printf %s "$told")"; then cat "$script"; exit; fi
  if [ -f "$last" ] && is_ours "$(cat "$last")"; then cat "$script" > "$last"; fi
fi 2> /dev/null
while case "$told" in *"Command=$ours"*) ;; *) false ;; esac; do
  told="${{told%%"Command=$ours"*}}Command=$theirs${{told#*"Command=$ours"}}"
done
printf %s "$told"
exit $code
"""
)
# For a script that has replaced PYTHONPATH; the hook does the rest.
TORCHRUN = (
    WITHOUT_FOLDER
    + """\
PYTHONPATH={hook}${{PYTHONPATH:+:$PYTHONPATH}}
export PATH PYTHONPATH
exec torchrun "$@"
"""
)


def folder(directory: RunDirectory) -> Path:
    return directory.submission / "bin"


def hook(directory: RunDirectory) -> Path:
    return folder(directory) / "hook"


def trainings(directory: RunDirectory) -> Path:
    """The folder that records which run belongs to which training; made with the first training."""
    return directory.submission / "trainings"


def write(
    directory: RunDirectory, python: str, submitted: str = "", users: str = "", script: str = ""
) -> None:
    """Write the programs into the run directory. `submitted`: the file that sbatch got in place of the
    `users` own, whose text `script` has; "" if no such file is known. Raises OSError."""
    place = folder(directory)
    make_folder(hook(directory))
    ours = shlex.join(run_module("jurymast.script", "srun", python=python))
    write_program(place / "srun", SRUN.format(runs_in=SHELL, ours=ours, main=SHELL_VARIABLE))
    text = TORCHRUN.format(
        runs_in=SHELL, folder=shlex.quote(str(place)), hook=shlex.quote(str(hook(directory)))
    )
    write_program(place / "torchrun", text)
    if submitted and not (place / "scontrol").exists():  # after a requeue only the training is known
        text = SCONTROL.format(
            runs_in=SHELL, folder=shlex.quote(str(place)), ours=shlex.quote(submitted),
            theirs=shlex.quote(users), script=shlex.quote(script),
        )  # fmt: skip
        write_program(place / "scontrol", text)
    name = "sitecustomize.py"
    write_atomically(
        hook(directory) / name, foreign.read(Path(__file__).parent / "hook" / name, foreign.NOTE_BYTES_MAX)
    )


def write_program(path: Path, text: str) -> None:
    """Write an executable file. Raises OSError."""
    write_atomically(path, text.encode())
    os.chmod(path, 0o700)


def with_shims(environment: Mapping[str, str], directory: RunDirectory) -> dict[str, str]:
    """`environment` with our programs before all others."""
    values = without_shims(environment)
    place = str(folder(directory))
    values["PATH"] = os.pathsep.join([place, values.get("PATH", os.defpath)])
    values["PYTHONPATH"] = os.pathsep.join([str(hook(directory)), *filter(None, [values.get("PYTHONPATH")])])
    values[FUNCTION] = FUNCTION_TEXT.format(
        job=JOB_VARIABLE,
        main=SHELL_VARIABLE,
        srun=shlex.quote(f"{place}/srun"),
        silent=SILENT,
        traps="trap -p QUIT",
        own=sum(1 << number - 1 for number in _ENDING),
    )
    values[RUN_VARIABLE] = str(directory.root)
    values[JOB_VARIABLE] = environment.get("SLURM_JOB_ID", "")
    return values


def exports(directory: RunDirectory, step: Path) -> str:
    """Shell text that does the same in a training step's command, and lets containers see the run
    directory."""
    root = shlex.quote(str(directory.root))
    lines = [f"{RUN_VARIABLE}={root}", f'{JOB_VARIABLE}="$SLURM_JOB_ID"']
    lines.append(f"{STEP_VARIABLE}={shlex.quote(str(step))}")
    for name, first in (("PATH", folder(directory)), ("PYTHONPATH", hook(directory))):
        lines.append(f'{name}={shlex.quote(str(first))}"${{{name}:+:${name}}}"')
    return "\n".join([*(f"export {line}" for line in lines), BIND.format(*BINDS, run=RUN_VARIABLE)])


def in_the_script(environment: Mapping[str, str]) -> bool:
    """Whether this process runs below one of our batch scripts, in that script's own job."""
    job = environment.get(JOB_VARIABLE)
    return job is not None and RUN_VARIABLE in environment and job == environment.get("SLURM_JOB_ID")


def without_shims(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as the user set it."""
    values = dict(environment)
    run = values.pop(RUN_VARIABLE, "")
    in_step = values.pop(STEP_VARIABLE, None) is not None
    for name in (FUNCTION, JOB_VARIABLE, SHELL_VARIABLE):
        values.pop(name, None)
    if not run:
        return values
    job = RunDirectory(run)
    ours = [("PATH", os.pathsep, str(folder(job))), ("PYTHONPATH", os.pathsep, str(hook(job)))]
    ours += [(name, ",", run) for name in BINDS if in_step]
    for name, separator, own in ours:
        kept = [entry for entry in values.pop(name, "").split(separator) if entry not in ("", own)]
        if kept:
            values[name] = separator.join(kept)
    return values


def real(program: str, environment: Mapping[str, str]) -> str:
    """The path of the program that the user would get without ours. Raises ClusterUnavailableError."""
    found = shutil.which(program, path=without_shims(environment).get("PATH", os.defpath))
    if found is None:
        raise ClusterUnavailableError(f"{program} is not in PATH: {environment.get('PATH', '')}")
    return found
