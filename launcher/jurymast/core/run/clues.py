"""How ends of ranks are interpreted: tables of exception texts and signals with the class of cause that they
indicate.

Rows are tried in order; the first match counts. Sources of the texts: strerror(3) for errno names,
`cudaGetErrorString` in NVIDIA's CUDA runtime documentation, `ncclGetErrorString` and torch's own messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# Messages of torch, gloo, NCCL and the socket layer when the *other* side has failed.
COMMUNICATION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer closed|socket (closed|timeout)|"
    r"ncclremoteerror|nccl(system|internal)error|remote process exited|nccl communicator was aborted|"
    r"unhandled (system|cuda) error|nccl error|"
    r"timed out waiting .*(recv|send|operation)|gloo.*(timeout|timed out|read error|write error)|"
    r"\bdist(network|store|backend)error|rendezvous.*(closed|timeout)|tcpstore|watchdog",
    re.IGNORECASE,
)
WATCHDOG = re.compile(r"watchdog|collective operation timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Clue:
    """An exception whose "CLASS: message" matches is of the class `kind`. `local`: the class instead if the
    text names a path on the node itself; "": paths do not matter."""

    pattern: re.Pattern[str]
    kind: str
    local: str = ""


def _clue(pattern: str, kind: str, local: str = "") -> Clue:
    return Clue(re.compile(pattern, re.IGNORECASE), kind, local)


EXCEPTIONS = (
    _clue(r"uncorrectable (ecc|nvlink) error|\bgpu (is lost|has fallen off)|gpu requires reset", "gpu_bad"),
    _clue(
        r"no cuda-capable device|cuda-capable device\(s\) is/are busy|system not yet initialized|"
        r"system has unsupported display driver|cuda driver initialization failed|cuda unknown error",
        "gpu_unavailable",
    ),
    _clue(r"cuda.*out of memory|outofmemoryerror|hip.*out of memory", "gpu_out_of_memory"),
    _clue(
        r"device-side assert|illegal memory access|illegal instruction was encountered|misaligned address|"
        r"unspecified launch failure|cublas_status_execution_failed",
        "gpu_exception",
    ),
    # Last: what torch.save says when a file ends before what it wrote, without the errno.
    _clue(
        r"no space left on device|disk quota exceeded|\[errno (28|122)\]|unexpected pos \d+ vs \d+",
        "storage_full",
        "disk_full",
    ),
    _clue(  # 107, 108 and 110 come from sockets, too, but then without a path
        r"input/output error|stale file handle|read-only file system|\[errno (5|30|116)\]|"
        r"\[errno (107|108|110)\][^']*: '|pytorchstreamwriter failed",
        "storage_failed",
        "disk_failed",
    ),
    _clue(r"^(import|modulenotfound)error|cannot open shared object file|undefined symbol", "import_failed"),
    _clue(r"^memoryerror|defaultcpuallocator: can't allocate|cannot allocate memory", "out_of_memory"),
)

# By number; those that are not here were sent by somebody else (`worker_killed`).
SIGNALS = {
    4: "worker_crash",  # SIGILL
    6: "worker_crash",  # SIGABRT
    7: "bus_error",  # SIGBUS
    8: "worker_crash",  # SIGFPE
    11: "worker_crash",  # SIGSEGV
    15: "worker_terminated",  # SIGTERM
}
SIGNAL_NAMES = {
    1: "SIGHUP", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV",
    15: "SIGTERM",
}  # fmt: skip
# With this much of /dev/shm in use, a SIGBUS means that a page could not be allocated.
SHM_FULL = 0.98


@lru_cache(maxsize=64)  # thousands of ranks fail with the same words
def exception_class(text: str, local_paths: tuple[str, ...]) -> str:
    """Return the class that an exception's "CLASS: message" indicates; "" if no clue matches. A clue about
    storage is the node's own trouble if the text names a path below one of `local_paths`."""
    for clue in EXCEPTIONS:
        if clue.pattern.search(text):
            here = any(re.search(rf"(?<![\w/.-]){re.escape(path)}(/|\b)", text) for path in local_paths)
            return clue.local if clue.local and here else clue.kind
    return ""
