"""Says by how many threads torch works, which it asked for in a way that cannot be read from this text; exits
with 3 in the first attempt."""

import os
import sys

print("begins")
os.environ["OMP_NUM_THREADS"] = str(len("ab"))

import torch  # noqa: E402

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("threads", torch.get_num_threads(), flush=True)
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()  # the first to fail ends the others: not before each has said its part
sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 3)
