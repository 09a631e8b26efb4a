"""The scenarios that attribution is measured by: Llama 3's causes as far as events can tell of them, stories
in which healthy nodes were blamed elsewhere, and what tends to be mistaken for something else."""

from __future__ import annotations

from jurymast.core.state.settings import Settings
from support.scenarios import GLOO_RESET, NCCL_REMOTE, WATCHDOG, Scenario

GPU = "Llama 3: faulty GPU"
HBM = "Llama 3: GPU HBM3 memory"
SRAM = "Llama 3: GPU SRAM memory"
GSP = "Llama 3: GPU system processor"
THERMAL = "Llama 3: GPU thermal interface and sensor"
SILENT = "Llama 3: silent data corruption"
SOFTWARE = "Llama 3: software bug"
DEPENDENCY = "Llama 3: dependency"
SWITCH = "Llama 3: network switch, cable"
NIC = "Llama 3: network interface"
HOST = "Llama 3: host maintenance"
MEMORY = "Llama 3: system memory"
POWER = "Llama 3: power supply"
SSD = "Llama 3: SSD"
WATCHDOGS = "Llama 3: NCCL watchdog"
INNOCENT = "healthy nodes"
STORAGE = "storage"
PEOPLE = "asked for"
PROCESS = "a process's end"

CASCADE = f"others-than-n3 raises {NCCL_REMOTE}"
REPORT = Settings(bad_nodes="report")
NO_REQUEUE = Settings(requeues=0)

SCENARIOS = (
    # GPUs.
    Scenario("a GPU falls off the bus", GPU, f"n3 xid-79 gpu3; n3 signal 6; {CASCADE}", "n3", "gpu_bad",
             "swap"),
    Scenario("peers' errors are told first", GPU, f"{CASCADE}; n3 xid-79 gpu3; n3 signal 6", "n3",
             "gpu_bad", "swap"),
    Scenario("two probes tell of one GPU", GPU, "n3 xid-79 gpu3; n3 gpu-lost gpu3", "n3", "gpu_bad", "swap"),
    Scenario("an NVLink breaks and others cry", GPU,
             "n3 xid-74 gpu3; active xid-45; active xid-45 gpu1", "n3", "gpu_bad", "swap", alert=True),
    Scenario("a GPU's exception says it all", HBM,
             f"n3 raises RuntimeError: CUDA error: uncorrectable ECC error encountered; {CASCADE}",
             "n3", "gpu_bad", "swap"),
    Scenario("NCCL passes an ECC error on", HBM,
             f"n3 raises DistBackendError: NCCL error, Cuda failure 'uncorrectable ECC error'; {CASCADE}",
             "n3", "gpu_bad", "swap"),
    Scenario("a double-bit error", HBM, "n3 xid-48 gpu1; n3 xid-63 gpu1; n3 xid-45 gpu1", "n3", "gpu_bad",
             "swap"),
    Scenario("a row cannot be remapped", HBM, "n3 xid-64 gpu1", "n3", "gpu_bad", "swap"),
    Scenario("a row waits to be remapped", HBM, "n3 gpu-row-remap-pending gpu1", "n3", "gpu_suspect", "swap"),
    Scenario("contained memory errors", HBM,
             f"n3 xid-94 gpu1; n3 raises RuntimeError: CUDA error: an illegal memory access; {CASCADE}",
             "n3", "gpu_exception", "restart"),
    Scenario("SRAM errors", SRAM, "n3 gpu-sram-uncorrectable gpu2", "n3", "gpu_bad", "swap"),
    Scenario("the GPU system processor stops answering", GSP, "hang; n3 xid-119 gpu2", "n3", "gpu_bad",
             "swap"),
    Scenario("a GPU is slowed down by heat", THERMAL, "n3 gpu-hot gpu2", "n3", "gpu_suspect", "swap"),
    Scenario("a segmentation fault beside a bad GPU", GPU,
             f"n3 gpu-row-remap-pending gpu2; n3 signal 11; {CASCADE}", "n3", "gpu_suspect", "swap"),
    Scenario("a suspect with no spare waits for an incident", GPU,
             "n3 gpu-pcie-width gpu2", spares=0),
    Scenario("a suspect leaves when a spare has come", GPU,
             "n1,n6 silent; n3 gpu-pcie-width gpu2; n1 ready; n1 tested ok; n5 raises KeyError: 'x'",
             "n5", "worker_exception", "swap", out="n3,n6"),
    Scenario("page faults on one GPU, twice", GPU,
             f"n3 xid-31 gpu2; n3 raises RuntimeError: CUDA error: an illegal memory access; {CASCADE}; go\n"
             "wait 600; n3 xid-31 gpu2", "n3", "gpu_suspect", "swap"),
    Scenario("exceptions on one unit, twice", GPU,
             "n3 xid-13 gpu2 (GPC 1, TPC 3, SM 0); wait 600; n3 xid-13 gpu2 (GPC 1, TPC 3, SM 1)",
             "n3", "gpu_suspect", "swap"),
    Scenario("wrong results, found by tests", SILENT, "n3 gpu-hot gpu2; go; n3 tested bad; n4 silent",
             "n4", "node_lost", "swap", out="n3,n4"),
    # Network.
    Scenario("a NIC is gone", NIC, f"{CASCADE}; n3 ib-device-gone mlx5_0:1", "n3", "network_bad", "swap"),
    Scenario("one NIC of several goes down", NIC,
             f"n3 ib-link-down mlx5_1:1; active raises {NCCL_REMOTE}", "n3", "network_suspect", "restart"),
    Scenario("the ranks do without it, and fail again", NIC,
             f"n3 ib-link-down mlx5_1:1; active raises {NCCL_REMOTE}; go; active raises {NCCL_REMOTE}",
             "n3", "network_suspect", "swap"),
    Scenario("one NIC of several goes down and nothing fails", NIC, "n3 ib-link-down mlx5_1:1; wait 60"),
    Scenario("a switch fails: links are down", SWITCH,
             f"n3-n9 ib-link-down mlx5_0:1; active raises {NCCL_REMOTE}", "", "fabric_fault", "restart",
             alert=True, active=40),
    Scenario("a switch fails: nodes are silent", SWITCH, "n3-n7 silent", "", "fabric_fault", "swap",
             out="n3-n7", alert=True, active=20, spares=6),
    Scenario("a switch fails: NICs are gone", SWITCH, "n3-n9 ib-device-gone mlx5_0:1", "", "fabric_fault",
             "restart",
             alert=True, active=40),
    Scenario("a cable takes one node away", SWITCH, f"n3 silent; {CASCADE}", "n3", "node_lost", "swap"),
    Scenario("a collective ends for no reason seen", SWITCH, f"active raises {GLOO_RESET}", "",
             "communication",
             "restart"),
    # Hosts.
    Scenario("a node loses power", POWER, f"n4 silent; others-than-n4 raises {GLOO_RESET}", "n4",
             "node_lost", "swap"),
    Scenario("peers notice a dead node first", POWER, f"others-than-n4 raises {GLOO_RESET}; n4 silent",
             "n4", "node_lost", "swap"),
    Scenario("a bad GPU takes its node down", GPU, "n3 silent; n3 xid-79 gpu3", "n3", "node_lost", "swap"),
    Scenario("a node is taken for maintenance", HOST, "n4 left", "n4", "node_crash", "swap"),
    Scenario("a spare is lost", HOST, "n6 silent", out="n6"),
    Scenario("a driver is wedged", HOST, "hang; n3 driver-wedged gpu0", "n3", "host_bad", "swap"),
    Scenario("broken system memory", MEMORY, "n3 memory-uncorrectable", "n3", "host_bad", "swap"),
    Scenario("a disk fails beneath the ranks", SSD,
             "n3 disk-error sda1; n3 raises OSError: [Errno 5] Input/output error: '/tmp/cache'",
             "n3", "host_suspect", "swap"),
    Scenario("a disk fails, and a rank is the first to say so", SSD,
             "n3 raises OSError: [Errno 5] Input/output error: '/tmp/cache'; n3 disk-error sda1",
             "n3", "host_suspect", "swap"),
    Scenario("a disk fails that no rank uses", SSD, "n3 disk-error sda1", "n3", "host_suspect", "swap"),
    Scenario("a disk fails, and only the rank says so", SSD,
             "n3 raises OSError: [Errno 5] Input/output error: '/tmp/cache'", "n3", "disk_failed", "restart"),
    Scenario("a torchrun host dies", PROCESS, f"n3 host-died; {CASCADE}", "n3", "host_died", "restart"),
    Scenario("no spare and a bad node", GPU, "n3 xid-79 gpu3", "n3", "gpu_bad", "requeue", spares=0),
    Scenario("a bad spare", GPU, "n6 xid-79 gpu3", out="n6"),
    Scenario("a hot spare", THERMAL, "n6 gpu-hot gpu3", out="n6"),
    Scenario("a hot spare that passes its tests", THERMAL, "n6 gpu-hot gpu3; n6 tested ok"),
    # The program.
    Scenario("an exception, and its cascade", SOFTWARE, f"n3 raises ValueError: loss is nan; {CASCADE}",
             "n3", "worker_exception", "restart"),
    Scenario("an exception that is told last", SOFTWARE, f"{CASCADE}; n3 raises ValueError: loss is nan",
             "n3", "worker_exception", "restart"),
    Scenario("the same exception everywhere", SOFTWARE, "active raises ValueError: loss is nan",
             "", "worker_exception", "restart"),
    Scenario("a page fault by the program, on all GPUs", SOFTWARE,
             "active xid-31; active raises RuntimeError: CUDA error: an illegal memory access; go\n"
             "active xid-31; active raises RuntimeError: CUDA error: an illegal memory access",
             "", "gpu_exception", "restart"),
    Scenario("exceptions on many units of a GPU", SOFTWARE,
             "n3 xid-13 gpu2 (GPC 1, TPC 3, SM 0); wait 60; n3 xid-13 gpu2 (GPC 2, TPC 0, SM 1); wait 60\n"
             "n3 xid-13 gpu2 (GPC 1, TPC 3, SM 1)"),
    Scenario("a device-side assertion", SOFTWARE,
             f"n3 raises RuntimeError: CUDA error: device-side assert triggered; {CASCADE}",
             "n3", "gpu_exception", "restart"),
    Scenario("GPU memory runs out", SOFTWARE,
             f"n3 raises OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; {CASCADE}",
             "n3", "gpu_out_of_memory", "restart"),
    Scenario("the kernel kills for want of memory", SOFTWARE, f"n3 signal 9 oom=1; {CASCADE}",
             "n3", "out_of_memory", "restart"),
    Scenario("the probe has seen the kill", SOFTWARE, f"n3 oom-kill; n3 signal 9 oom=?; {CASCADE}",
             "n3", "out_of_memory", "restart"),
    Scenario("a kill for memory that the rank's cgroup did not count", PROCESS,
             f"n3 oom-kill; n3 signal 9 oom=0; {CASCADE}", "n3", "worker_killed", "restart"),
    Scenario("killed by somebody", PROCESS, f"n3 signal 9; {CASCADE}", "n3", "worker_killed", "restart"),
    Scenario("a segmentation fault", SOFTWARE, f"n3 signal 11; {CASCADE}", "n3", "worker_crash", "restart"),
    Scenario("an abort of the program's own", SOFTWARE, f"n3 signal 6 log=terminate called; {CASCADE}",
             "n3", "worker_crash", "restart"),
    Scenario("shared memory is full", SOFTWARE, f"n3 signal 7 shm=0.995; {CASCADE}", "n3", "shm_full",
             "restart"),
    Scenario("a mapped file is cut short", PROCESS, f"n3 signal 7 shm=0.1; {CASCADE}", "n3", "bus_error",
             "restart"),
    Scenario("a bad mapping on every node at once", SOFTWARE, "active signal 7", "", "bus_error", "restart"),
    Scenario("an epilog sends SIGTERM to one rank", PROCESS, f"n3 signal 15; {CASCADE}", "n3",
             "worker_terminated",
             "restart"),
    Scenario("SIGTERM is no cause beside another", SOFTWARE, "n4 signal 15; n3 raises KeyError: 'w'",
             "n3", "worker_exception", "restart"),
    Scenario("a module is missing", DEPENDENCY,
             "active raises ModuleNotFoundError: No module named 'flash_attn'",
             "", "import_failed", "restart"),
    Scenario("the program, then a GPU while ranks stop", SOFTWARE,
             "n4 raises ValueError: loss is nan; wait 1; n3 xid-79 gpu0", "n4", "worker_exception", "swap",
             out="n3"),
    # Hangs.
    Scenario("a rank is stopped", PROCESS, "n3 frozen", "n3", "rank_frozen", "restart"),
    Scenario("nobody steps and nothing is seen", WATCHDOGS, "hang", "", "hang", "restart"),
    Scenario("the watchdog aborts every rank", WATCHDOGS, f"active signal 6 log={WATCHDOG}", "",
             "collective_timeout",
             "restart"),
    Scenario("the watchdog is never the root", WATCHDOGS,
             f"others-than-n3 signal 6 log={WATCHDOG}; n3 signal 9 oom=1", "n3", "out_of_memory", "restart"),
    Scenario("one rank's late crash is a consequence", SOFTWARE,
             "n3 raises ValueError: loss is nan; wait 4; n4 signal 9", "n3", "worker_exception", "restart"),
    # Storage.
    Scenario("shared storage is full", STORAGE,
             "n3 raises OSError: [Errno 28] No space left on device: '/lustre/c'",
             "", "storage_full", "restart"),
    Scenario("a quota is used up", STORAGE,
             "active raises OSError: [Errno 122] Disk quota exceeded: '/home/a/c'",
             "", "storage_full", "restart"),
    Scenario("torch.save finds no room", STORAGE,
             "n3 raises RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
             "", "storage_full", "restart"),
    Scenario("a stale file handle", STORAGE,
             "n3 raises OSError: [Errno 116] Stale file handle: '/nfs/data/7'",
             "", "storage_failed", "restart"),
    Scenario("the same storage twice on the same node", STORAGE,
             "n3 raises OSError: [Errno 116] Stale file handle: '/nfs/data/7'; go\n"
             "n3 raises OSError: [Errno 116] Stale file handle: '/nfs/data/9'", "", "storage_failed",
             "restart"),
    Scenario("storage hangs, and the ranks with it", STORAGE, "active storage-hangs /lustre; hang",
             "", "storage_failed", "restart", alert=True),
    Scenario("storage is nearly full and nothing fails", STORAGE,
             "n3 storage-full /lustre; n4 storage-full /lustre", alert=True),
    Scenario("a node's own disk is full", SSD,
             "n3 raises OSError: [Errno 28] No space left on device: '/tmp/x'",
             "n3", "disk_full", "restart"),
    # Healthy nodes that were blamed elsewhere.
    Scenario("sympathetic Xids on many nodes", INNOCENT, "n2-n79 xid-45", alert=True, active=80),
    Scenario("a fabric manager restarts everywhere", INNOCENT, "n2-n12 gpu-fabric", "", "common_fault",
             "restart",
             alert=True, active=40),
    Scenario("what many showed is held against nobody later", INNOCENT,
             "n4-n12 xid-119; go; wait 1200; n2 raises KeyError: 'x'", "n2", "worker_exception", "restart",
             alert=True, active=40),
    Scenario("a driver upgrade confuses every probe", INNOCENT, "active gpus-unseen"),
    Scenario("an old Xid in the log", INNOCENT, "n3 old xid-79 gpu3; wait 60"),
    Scenario("a lone informational Xid", INNOCENT, "n3 xid-63 gpu0; n4 xid-43 gpu1; wait 60"),
    Scenario("a finding long before the failure", INNOCENT,
             "n3 gpu-throttled gpu1; wait 7200; n4 raises ValueError: loss is nan", "n4", "worker_exception",
             "restart", spares=0),
    Scenario("a clock that is off does not crash ranks", INNOCENT,
             "n3 clock-offset; n3 signal 11", "n3", "worker_crash", "restart", spares=0),
    Scenario("a second bad node within the limit's time", INNOCENT,
             "n3 xid-79 gpu1; go; n4 xid-64 gpu1; wait 60", "n3", "gpu_bad", "swap", alert=True),
    Scenario("a second bad node whose ranks fail twice", GPU,
             "n3 xid-79 gpu1; go; n4 xid-64 gpu1; wait 600; n4 signal 11; go; wait 600; n4 signal 11",
             "n4", "gpu_bad", "swap", out="n3,n4", alert=True),
    Scenario("the policy only reports", INNOCENT, "n3 xid-79 gpu1; wait 60", alert=True, settings=REPORT),
    Scenario("nothing can take a bad node's place", INNOCENT, "n3 xid-79 gpu1; wait 60", alert=True, spares=0,
             settings=NO_REQUEUE),
    Scenario("the newcomer shows the same", INNOCENT,
             "n3 signal 9; go; n3 signal 9; go; n6 signal 9", "n6", "worker_killed", "restart", out="n3"),
    Scenario("a link that is up again", NIC,
             "n3 ib-device-gone mlx5_0:1; go; n3 ib-device-gone mlx5_0:1 ok; n3 tested ok",
             "n3", "network_bad", "swap", out=""),
    # People.
    Scenario("a drain by hand", PEOPLE, "ask drain n3", "n3", "drain_asked", "swap"),
    Scenario("a restart by hand beside an error", PEOPLE, f"ask restart; n3 raises {GLOO_RESET}", "",
             "restart_asked",
             "restart"),
)  # fmt: skip
