"""Sets variables, as constants, before it imports torch."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "2"
os.environ.setdefault("MKL_NUM_THREADS", "2")
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["TORCH_LOGS"] = "+dynamo"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

print("torch" in sys.modules, "numpy" in sys.modules)

import logging

import torch
import torch.distributed as dist

print("threads", torch.get_num_threads(), torch.get_num_interop_threads())
print("debug level", dist.get_debug_level())
print("torch._dynamo" in sys.modules)
torch.nn.Linear(2, 2)
import torch._dynamo
import torch._inductor.config

print("dynamo logs at", logging.getLogger("torch._dynamo").getEffectiveLevel(), torch._logging.is_dtrace_enabled()
      if hasattr(torch._logging, "is_dtrace_enabled") else "")  # fmt: skip
print("compile threads", torch._inductor.config.compile_threads)
print(sorted(name for name in os.environ if name.startswith(("TORCH_", "OMP", "MKL", "KMP", "TORCHINDUCTOR")) and
             not name.startswith(("TORCH_NCCL_", "TORCH_FR_"))))  # fmt: skip
print(torch.__config__.parallel_info().splitlines()[:3])
