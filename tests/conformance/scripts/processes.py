"""Processes of all kinds, threads, signals and what is left to do at the end."""

import atexit
import concurrent.futures
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.multiprocessing


def square(x):
    return x * x, multiprocessing.current_process().name.split("-")[0], torch.tensor([x]).item()


def who():
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    return [process.name, process.daemon, parent and parent.name, multiprocessing.get_start_method(True),
            sys.modules["__main__"].__name__, os.path.basename(sys.modules["__main__"].__file__ or ""),
            sys.argv, "torch" in sys.modules, threading.current_thread().name, "RANK" in os.environ]


def tell(answers):
    answers.put(who())


def trained(rank, answers):
    torch.manual_seed(rank)
    answers.put((rank, torch.rand(2).tolist()))


def fails():
    print("a child prints", flush=True)
    sys.exit(7)


def stopped(number, frame):
    print("caught", signal.Signals(number).name, frame.f_code.co_name)


def finish_later():
    threading.main_thread().join()
    print("a thread ends after the main one")


def main():
    print(who())
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        child = context.Process(target=tell, args=(answers,))
        child.start()
        print(method, answers.get())
        child.join()
        print(child.exitcode, child.name)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=fails)
    child.start()
    child.join()
    print("ended with", child.exitcode)
    with multiprocessing.Pool(2) as pool:
        print(pool.map(square, range(4)), [pool.apply(len, ((1, 2),))])
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        print(list(pool.map(square, range(3))))
    answers = torch.multiprocessing.get_context("fork").Queue()
    torch.multiprocessing.start_processes(trained, (answers,), nprocs=1, start_method="fork")
    print(answers.get())
    with multiprocessing.Manager() as manager:
        shared = manager.dict(a=1)
        shared["b"] = 2
        print(dict(shared))

    ask = "import sys, os, multiprocessing as m; print(m.get_start_method(), sys.argv, sys.stdout.write_through, " \
          "sorted(n for n in sys.modules if n in ('torch', 'json', 'jurymast')), sys.path[0] == '')"  # fmt: skip
    print(subprocess.run([sys.executable, "-c", ask, "x"], capture_output=True, text=True, check=True).stdout)
    print(subprocess.check_output("echo $RANK $WORLD_SIZE; ls /proc/self/fd | wc -l", shell=True, text=True))
    print(os.system("exit 3"), os.popen("echo from a shell").read())
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    print("forked:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        print(number.name, signal.signal(number, stopped))
        os.kill(os.getpid(), number)
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        print("interrupted")
    signal.signal(signal.SIGALRM, stopped)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.pause()
    found = queue.Queue()
    daemon = threading.Thread(target=lambda: found.put(threading.active_count()), daemon=True)
    daemon.start()
    print("threads:", found.get())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        print(list(pool.map(abs, (-1, -2))))
    with tempfile.NamedTemporaryFile() as file:
        print(os.path.dirname(file.name), os.path.exists(file.name))
    try:
        sys.stdin.read(1)
        print("standard input:", sys.stdin.name)
    except OSError as error:
        print("standard input:", error)
    print("the last line of main, without its end", end="")


class Closing:
    def __del__(self):
        if not sys.is_finalizing():
            print("removed while Python is whole")
        os.write(1, b"removed\n")


if __name__ == "__main__":
    atexit.register(print, "first registered, last told")
    atexit.register(lambda: print("at the exit:", threading.active_count(), len(multiprocessing.active_children())))
    closing = Closing()
    unflushed = open(f"unflushed-{os.environ['RANK']}.txt", "w")
    unflushed.write("never flushed, never closed")
    main()
    threading.Thread(target=finish_later).start()
    print()
