"""A training whose rank leaves all kinds of things behind: a child that ignores SIGTERM, one in a session of
its own, one that init would adopt, shared memory with a name, and a port. It ends in order when asked to."""

import os
import signal
import socket
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import torch

place, port = Path(sys.argv[1]), int(sys.argv[2])
attempt = os.environ["JURYMAST_ATTEMPT"]
name = f"jurymast-{place.name}"
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100000)"
DAEMON = f"import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); {CHILD}"

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
serving = socket.create_server(("127.0.0.1", port))  # the last attempt's child has it
serving.set_inheritable(True)
memory = shared_memory.SharedMemory(name, create=True, size=1 << 20)
children = [
    subprocess.Popen([sys.executable, "-c", code, str(place)], start_new_session=own, close_fds=False)
    for code, own in ((CHILD, False), (CHILD, True), (DAEMON, False))
]
children[-1].wait()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if step == 20:
        (place / f"attempt-{attempt}").touch()
