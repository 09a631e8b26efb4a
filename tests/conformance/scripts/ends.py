"""Rank 0 ends in the way that is asked for; rank 1 waits to be stopped."""

import atexit
import ctypes
import os
import signal
import sys
import time

HOW = sys.argv[1]
RANK = int(os.environ["RANK"])


class DataMissing(RuntimeError):
    pass


def stop(number, frame):
    print("stopping", flush=True)
    sys.exit(0)


def deep(level):
    if level:
        deep(level - 1)
    try:
        raise KeyError("shard-3")
    except KeyError as error:
        raise DataMissing("no data\nat all") from error


atexit.register(print, "the end of", RANK)
unflushed = open(f"unflushed-{RANK}.txt", "w")
unflushed.write("written")
print("begins", RANK)
if RANK == 1:
    signal.signal(signal.SIGTERM, stop)
    open("ready", "w").close()
    while True:
        time.sleep(0.01)
while not os.path.exists("ready"):
    time.sleep(0.01)
print("to the end by", HOW)
if HOW == "message":
    sys.exit("no data at /data")
elif HOW == "code":
    sys.exit(3)
elif HOW == "exception":
    deep(2)
elif HOW == "at once":
    os._exit(4)
elif HOW == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif HOW == "segfault":
    ctypes.string_at(0)
