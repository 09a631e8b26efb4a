"""The site's settings: one INI file that only root can write. README.md lists the keys."""

from __future__ import annotations

import configparser
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path("/etc/jurymast/site.ini")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Any other key is an error: a mistyped one must not mean the default.
_KEYS = {
    "health": ("command", "limit_s"),
    "verdicts": ("spool", "max_age_s"),
    "drain": ("verdicts", "own_findings", "resume", "dry_run", "max_fraction", "max_per_hour"),
    "sweep": ("processes", "shared_memory", "min_uid"),
    "files": ("state", "log"),
    "slurm": ("bin", "conf"),
}


class ConfigError(Exception):
    """The file cannot be used. The message is one line that names the file."""


@dataclass(frozen=True)
class Config:
    """The settings. `health_limit_s` and `max_age_s` are in seconds. `log` is "" for syslog alone.
    `slurm_bin` and `slurm_conf` say where Slurm is, if not in its usual places: slurmd does not pass that
    on."""

    health_command: tuple[str, ...] = ("/opt/jurymast/bin/python", "-I", "-m", "jurymast.health.once")
    health_limit_s: float = 30.0
    spool: Path = Path("/var/spool/jurymast")
    max_age_s: float = 1800.0
    act_on_verdicts: bool = True
    act_on_own_findings: bool = False
    resume: bool = True
    dry_run: bool = False
    max_fraction: float = 0.02
    max_per_hour: int = 4
    sweep_processes: str = "report"
    sweep_shared_memory: str = "report"
    min_uid: int = 1000
    state: Path = Path("/var/lib/jurymast")
    log: str = ""
    slurm_bin: str = ""
    slurm_conf: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The environment for Slurm's commands, munge's and the probes."""
        environment = dict(os.environ)
        environment["PATH"] = ":".join(filter(None, (self.slurm_bin, SYSTEM_PATH)))
        if self.slurm_conf:
            environment["SLURM_CONF"] = self.slurm_conf
        return environment


def load(path: Path) -> Config:
    """Read the settings in `path`; without a file, all are the defaults. Raises ConfigError."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"{path}: users other than root can write to it: chown root, chmod 644")
            parser.read_file(file)
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    for section in parser.sections():
        for key in parser[section]:
            if key not in _KEYS.get(section, ()):
                raise ConfigError(f"{path}: unknown key {key} in [{section}]; see README.md")
    try:
        return _read(parser)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(parser: configparser.ConfigParser) -> Config:
    for section in _KEYS:
        if not parser.has_section(section):
            parser.add_section(section)
    health, verdicts, drain, sweep, files, slurm = (parser[section] for section in _KEYS)
    default = Config()
    command = tuple(shlex.split(health.get("command", shlex.join(default.health_command))))
    if not command or not command[0].startswith("/"):
        raise ValueError("command in [health] must begin with an absolute path")
    return Config(
        health_command=command,
        health_limit_s=health.getfloat("limit_s", default.health_limit_s),
        spool=Path(verdicts.get("spool", str(default.spool))),
        max_age_s=verdicts.getfloat("max_age_s", default.max_age_s),
        act_on_verdicts=drain.getboolean("verdicts", default.act_on_verdicts),
        act_on_own_findings=drain.getboolean("own_findings", default.act_on_own_findings),
        resume=drain.getboolean("resume", default.resume),
        dry_run=drain.getboolean("dry_run", default.dry_run),
        max_fraction=drain.getfloat("max_fraction", default.max_fraction),
        max_per_hour=drain.getint("max_per_hour", default.max_per_hour),
        sweep_processes=_choice(sweep, "processes", ("off", "report", "kill")),
        sweep_shared_memory=_choice(sweep, "shared_memory", ("off", "report", "remove")),
        min_uid=sweep.getint("min_uid", default.min_uid),
        state=Path(files.get("state", str(default.state))),
        log=files.get("log", default.log),
        slurm_bin=slurm.get("bin", default.slurm_bin),
        slurm_conf=slurm.get("conf", default.slurm_conf),
    )


def _choice(section: configparser.SectionProxy, key: str, choices: tuple[str, ...]) -> str:
    value: str = section.get(key, "report")
    if value not in choices:
        raise ValueError(f"{key} in [{section.name}] must be {', '.join(choices)}, not {value}")
    return value
