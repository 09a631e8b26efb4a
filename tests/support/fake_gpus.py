"""GPUs for machines without any: NVIDIA's library, faked in C, under the real pynvml of a child process.

    gpus = FakeGpus(tmp_path)
    child = subprocess.Popen([...], env={**os.environ, **gpus.environment()})
    gpus.set(gpu=3, ecc_uncorrectable=1)
    gpus.xid(3, 79)

A process loads the library when it first asks for it, and hears of what is set here at its next call. What
can be set stands in fake_nvml/fake_nvml.c; as long as nothing is, all are healthy.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml") / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
STATE_VARIABLE = "FAKE_NVML_STATE"
EVENT_XID = 0x8
EVENT_RECOVERY_ACTION = 0x8000
ALL = -1


def build(folder: Path, without: Sequence[str] = ()) -> Path:
    """Compile the library into `folder`, without the symbols named (an older driver). Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "symbols"
    hidden = "".join(f"{name}; " for name in without)
    script.write_text(f"{{ global: nvml*; local: {hidden}*; }};\n")
    subprocess.run(
        [
            "cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}",
            f"-Wl,--version-script={script}", "-o", str(folder / LIBRARY), str(SOURCE),
        ],
        check=True,
    )  # fmt: skip
    return folder


class FakeGpus:
    """`gpus` healthy GPUs. The library goes into `folder`, or comes from `library` (a folder of `build`).

    `state` is the file that the library reads: by default in `folder`. On a cluster give each node its own,
    and the job FAKE_NVML_STATE=/some/path/%n: its processes put the node's name ($SLURMD_NODENAME) there.
    """

    def __init__(
        self, folder: Path, gpus: int = 8, *, library: Path | None = None, state: Path | None = None
    ) -> None:
        self.library = library or build(folder)
        self.state = state or folder / "state"
        self._gpus = gpus
        self.clear()

    def environment(self) -> dict[str, str]:
        """To be added to a process's environment, before it starts."""
        others = os.environ.get("LD_LIBRARY_PATH")
        paths = f"{self.library}:{others}" if others else str(self.library)
        return {"LD_LIBRARY_PATH": paths, STATE_VARIABLE: str(self.state)}

    def clear(self) -> None:
        """All healthy again, no call fails, nothing happened."""
        self._lines = [f"gpus -1 - {self._gpus}"]
        self._write()

    def set(self, gpu: int = ALL, **values: int) -> None:
        """What `gpu` answers from now on; `nvlink_state_3=0` is link 3's alone."""
        for name, value in values.items():
            stem, _, link = name.rpartition("_")
            self._add("set", gpu, f"{stem}.{link}" if link.isdigit() else name, value)

    def fail(self, call: str, code: int, gpu: int = ALL) -> None:
        """`call` ("nvmlDeviceGetRepairStatus", or "field.230") answers with NVML's error `code`."""
        self._add("fail", gpu, call, code)

    def hang(self, call: str) -> None:
        self._add("hang", ALL, call, 1)

    def crash(self, call: str) -> None:
        self._add("crash", ALL, call, 1)

    def xid(self, gpu: int, code: int) -> None:
        self.event(gpu, EVENT_XID, code)

    def event(self, gpu: int, kind: int, data: int = 0) -> None:
        """For those who registered for it before: once each."""
        self._add("event", gpu, hex(kind), data, time.time_ns())

    def _add(self, *words: object) -> None:
        self._lines.append(" ".join(map(str, words)))
        self._write()

    def _write(self) -> None:
        """In one step: a reader sees the old state or the new one."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.state.with_name(f"{self.state.name}.{os.getpid()}")
        fresh.write_text("\n".join(self._lines) + "\n")
        fresh.replace(self.state)
