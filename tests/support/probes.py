"""A third party's probe package, made where Python finds it and told by a file what to do at each look."""

from __future__ import annotations

import os
from pathlib import Path

MODULE = """
import os, signal, time
from pathlib import Path
from jurymast.health.probe import Finding, Verdict

HERE = Path(__file__).parent

class Acme:
    interval_s = 0.05
    def __init__(self, name, memory):
        self.name = name
        self.first = memory
        self.folder = HERE / name
        self.last = ""
        self.joules = {}
    def energy(self):
        return self.joules
    def look(self, now):
        pid = self.folder / "pid"
        partial = pid.with_suffix(".partial")
        partial.write_text(str(os.getpid()))
        partial.rename(pid)
        word, _, rest = (self.folder / "word").read_text().partition(" ")
        with (self.folder / "looks").open("a") as looks:
            looks.write(word + "\\n")
        if word == "hang":
            while True:
                signal.pause()
        if word == "used":
            self.joules = {"acme0": float(rest)}
        if word == "spin":
            end = time.monotonic() + float(rest)
            while time.monotonic() < end:
                pass
        if word == "stat":
            os.statvfs(rest)
        if word == "abort":
            os.abort()
        if word == "raise":
            raise RuntimeError("acme is out of order")
        if word == "event" and rest != self.last:
            self.last = rest
            return [Finding(probe=self.name, code="acme-event", verdict=Verdict.UNKNOWN, kind="application",
                            message=rest, at=float(rest), once=True)]
        if word == "count":
            self.first = int(rest) if self.first is None else self.first
            if int(rest) > self.first:
                return [Finding(probe=self.name, code="acme-gained", verdict=Verdict.BAD, kind="hardware",
                                message=f"{int(rest) - self.first} more", device="acme0")]
        if word == "blind":
            return [Finding(probe=self.name, code="not-observable", verdict=Verdict.UNKNOWN, kind="hardware",
                            message="acme0 cannot be seen", device=rest)]
        if word == "now":
            return [Finding(probe=self.name, code="acme-event", verdict=Verdict.UNKNOWN, kind="application",
                            message=repr(now), at=now, once=True)]
        if word == "find":
            return [Finding(probe=self.name, code="acme-high", verdict=Verdict(rest), kind="host",
                            message="acme is high", device="acme0")]
        if word == "hostile":
            return self.hostile(rest)
        return []
    def hostile(self, how):
        def finding(**values):
            return Finding(**{**dict(probe=self.name, code="acme-high", verdict=Verdict.UNKNOWN, kind="host",
                                     message="acme is high", device="acme0"), **values})
        if how == "long":
            return [finding(message="x" * (20 << 20))]
        if how == "many":
            return (finding(device=f"acme{i}", message="y" * 1000) for i in range(100_000))
        if how == "nan":
            return [finding(at=float("nan"))]
        if how == "name":
            return [finding(probe="other")]
        if how in ("leaves", "leaves-and-aborts"):
            if not (self.folder / "left").exists():
                import subprocess
                ways = {}, {"preexec_fn": os.setpgrp}, {"start_new_session": True, "env": {}}
                left = [subprocess.Popen(["/bin/sleep", "600"], **way).pid for way in ways]
                (self.folder / "left").write_text(" ".join(map(str, left)))
            if how == "leaves-and-aborts":
                os.abort()
            while True:
                signal.pause()
        raw = {"garbage": b"\\xff\\xfe\\x00\\n", "deep": b"[" * 500_000 + b"\\n", "other": b'{"say": 5}\\n',
               "infinite": b'{"say": "look", "limit_s": Infinity}\\n'}[how]
        for fd in map(int, os.listdir("/proc/self/fd")):  # the pipe to the agent among them
            if fd > 2:
                try:
                    os.write(fd, raw)
                except OSError:
                    pass
        return []
    def close(self):
        (self.folder / "closed").touch()

class Remembering(Acme):
    def remember(self):
        return self.first

def make(name, context):
    if (HERE / name / "word").read_text() == "refuse":
        raise ImportError("no acme library")
    if (HERE / name / "word").read_text() == "nothing":
        return None
    kind = Remembering if name.startswith("kept") else Acme
    return kind(name, context.memory)
"""


class Acme:
    """Probes named `names` in a package below `folder`. Those whose names begin with "kept" remember the
    first value that they counted."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._folder = folder
        functions = "".join(f"def {name}(context):\n    return make({name!r}, context)\n" for name in names)
        (folder / "acme_probes.py").write_text(MODULE + functions)
        metadata = folder / "acme_probes-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-probes\nVersion: 1.0\n")
        points = "".join(f"{name} = acme_probes:{name}\n" for name in names)
        (metadata / "entry_points.txt").write_text(f"[jurymast.probes]\n{points}")
        for name in names:
            (folder / name).mkdir()
            self.tell(name, "ok")

    @property
    def python_path(self) -> str:
        """For PYTHONPATH: this package before all others."""
        return os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH", ""))))

    def tell(self, name: str, word: str) -> None:
        """At a look: ok, `find VERDICT`, `count VALUE` (bad if more than at first), `blind DEVICE`,
        `event TIME`, now, `used JOULES`, raise, hang, `spin SECONDS`, `stat PATH`, abort,
        `hostile HOW`; when it is opened: nothing, refuse."""
        partial = self._folder / name / "partial"
        partial.write_text(word)
        partial.rename(self._folder / name / "word")

    def looks(self, name: str) -> list[str]:
        """What it was told at each look so far."""
        file = self._folder / name / "looks"
        return file.read_text().split() if file.exists() else []

    def pid(self, name: str) -> int:
        """Of the process that looked last."""
        return int((self._folder / name / "pid").read_text())

    def looked_more(self, name: str, count: int) -> bool:
        return len(self.looks(name)) > count

    def has_other_pid(self, name: str, pid: int) -> bool:
        return self.pid(name) != pid
