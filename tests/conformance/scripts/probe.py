"""Writes down all that a rank finds when it begins, and what its children find."""

import sys

modules = sorted(sys.modules)

import atexit
import gc
import json
import locale
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import random
import re
import resource
import signal
import tempfile
import threading
import warnings


def identity():
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    main = sys.modules["__main__"]
    return {
        "name": process.name, "daemon": process.daemon, "identity": process._identity,
        "config": sorted(process._config), "parent": parent and parent.name,
        "parent's id is right": parent is None or parent.pid == os.getppid(),
        "method": multiprocessing.get_start_method(True), "main": main.__name__, "argv": sys.argv,
        "torch": "torch" in sys.modules, "jurymast": sorted(n for n in sys.modules if n.startswith("jurymast")),
        "thread": threading.current_thread().name, "threads": threading.active_count(),
        "environ": sorted(os.environ),
        "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "signals": handlers(), "session": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "orig_argv": sys.orig_argv if process.name.startswith("Fork") else len(sys.orig_argv),
    }  # fmt: skip


def handlers():
    return {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()}


def loggers():
    return sorted({name.partition(".")[0] for name in logging.root.manager.loggerDict})


def tell(answers):
    answers.put(json.loads(json.dumps(identity(), default=str)))


def children():
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        child = context.Process(target=tell, args=(answers,))
        child.start()
        found[method] = answers.get()
        child.join()
    return found


def descriptors():
    names = os.listdir("/proc/self/fd")
    found = {name: os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")}
    return {name: [to.split(":")[0], os.get_inheritable(int(name))] for name, to in found.items()}


def status():
    wanted = ("Name", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "Threads", "CapEff", "THP_enabled",
              "CoreDumping", "Groups", "Cpus_allowed", "Umask", "ShdPnd", "SigPnd", "TracerPid")  # fmt: skip
    with open("/proc/self/status") as file:
        lines = [line.strip().split(":", 1) for line in file]
    return {name: value.strip() for name, value in lines if name in wanted}


def stream(file):
    return [type(file).__name__, file.name, file.mode, file.encoding, file.errors, file.line_buffering,
            file.write_through, file.isatty(), type(file.buffer).__name__, str(file.newlines), file.fileno(),
            type(getattr(file.buffer, "raw", file.buffer)).__name__, file.closed]  # fmt: skip


def read(path):
    with open(path) as file:
        return file.read()


def process():
    return {
        "descriptors": descriptors(),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
        "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)), "policy": os.sched_getscheduler(0),
        "session": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()), "cwd": os.getcwd(),
        "tasks": len(os.listdir("/proc/self/task")), "status": status(), "oom": read("/proc/self/oom_score_adj"),
        "cmdline": read("/proc/self/cmdline"), "comm": read("/proc/self/comm"), "exe": os.readlink("/proc/self/exe"),
        "timers": signal.getitimer(signal.ITIMER_REAL), "uid": (os.getuid(), os.geteuid(), os.getgid()),
    }  # fmt: skip


def python():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "filters": [str(f) for f in warnings.filters],
        "executable": sys.executable, "prefix": (sys.prefix, sys.base_prefix),
        "main": {n: re.sub("0x[0-9a-f]+", "0x", str(v)) for n, v in vars(main).items() if n.startswith("__") and n != "__builtins__"},
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        "hooks": [str(h) for h in (sys.excepthook, sys.displayhook, sys.unraisablehook, sys.breakpointhook,
                                   threading.excepthook, sys.gettrace(), sys.getprofile())],
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits(),
                   sys.getfilesystemencoding(), sys.dont_write_bytecode, threading.stack_size()),
        "gc": (gc.get_threshold(), gc.isenabled(), gc.get_debug()), "locale": locale.setlocale(locale.LC_ALL),
        "logging": (str(logging.root.handlers), logging.root.level, logging.lastResort.level),
        "loggers": loggers(),
        "tempfile": (tempfile.gettempdir(), tempfile.tempdir), "path_hooks": len(sys.path_hooks),
        "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "wakeup": signal.set_wakeup_fd(-1), "exits": atexit._ncallbacks(),
        "tracker": multiprocessing.resource_tracker._resource_tracker._fd,
        "thread": [threading.current_thread().name, threading.current_thread() is threading.main_thread(),
                   [t.name for t in threading.enumerate()], threading.get_ident() == threading.main_thread().ident],
        "authkey": len(multiprocessing.current_process().authkey),
    }  # fmt: skip


def torchs():
    import numpy
    import torch

    return {
        "seed": torch.initial_seed(), "draws": [random.random(), numpy.random.rand(), torch.rand(1).item()],
        "authkey": multiprocessing.current_process().authkey.hex(), "name": next(tempfile._get_candidate_names()),
    }, {
        "threads": torch.get_num_threads(), "interop": torch.get_num_interop_threads(),
        "grad": torch.is_grad_enabled(), "dtype": str(torch.get_default_dtype()), "origin": torch.__spec__.origin,
        "loader": type(torch.__loader__).__name__, "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiler": "torch._dynamo" in sys.modules, "sharing": torch.multiprocessing.get_sharing_strategy(),
        "filters": [str(f) for f in warnings.filters], "path": sys.path, "version": torch.__version__,
        "loggers": loggers(), "environ": sorted(os.environ), "signals": handlers(),
        "modules": sorted(n for n in sys.modules if n.startswith("torch")),
    }  # fmt: skip


def main():
    found = {"modules": modules, "environ": dict(os.environ), "signals": handlers(), "process": process()}
    found |= {"python": python(), "identity": identity()}
    found["own"], found["torch"] = torchs()
    found["children"] = children()
    with open(f"found-{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file, default=str, indent=1)


if __name__ == "__main__":
    main()
