"""Works variables out before it imports torch, and others between that and what they are for."""

import os
import sys
import warnings

print("begins once", len(sys.argv))
warnings.filterwarnings("ignore", message="nothing of the kind")
warnings.simplefilter("default", UserWarning)
os.environ["OMP_NUM_THREADS"] = str(1 + len(os.environ["WORLD_SIZE"]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO" if int(os.environ["RANK"]) < 2 else "OFF"
for name in ("TORCH_SHOW_CPP_STACKTRACES", "NUMEXPR_MAX_THREADS"):
    os.environ[name] = "1"
with open(f"seen-{os.environ['RANK']}.txt", "w") as seen:
    seen.write("written anew\n")

import numpy
import torch
import torch.distributed as dist

print("threads", torch.get_num_threads(), "debug level", dist.get_debug_level(), numpy.__name__)
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when the compiler is imported
os.environ["TORCH_LOGS"] = "dynamo"
import torch._dynamo.config

print("compiler disabled:", torch._dynamo.config.disable)
warnings.warn("of the script")
print([(f[0], f[2].__name__) for f in warnings.filters if f[2] is UserWarning])
print(torch.compile(lambda x: x + 1)(torch.zeros(1)))
