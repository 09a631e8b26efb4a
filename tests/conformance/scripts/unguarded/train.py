"""All at the top of the script, as in a notebook: a loader process, classes to pickle, its own source, data."""

import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import sys

spec = importlib.util.find_spec("torch")
print("torch is there:", spec is not None, spec.name, os.path.basename(spec.origin), "torch" in sys.modules)
print("numpy:", os.path.basename(importlib.util.find_spec("numpy").origin), "numpy" in sys.modules)
print("version", importlib.metadata.version("torch"), importlib.util.find_spec("no_such_module"))

import code  # of this directory; Python has one of the same name, which torch imports

import statistics  # likewise

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

print(code.WHOSE, statistics.mean([1, 2]), sys.modules["code"] is code)
print(sys.modules["torch"].__spec__.name, torch.__spec__.origin == spec.origin, torch.__name__, torch.__package__)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


class Config:
    def __init__(self, width):
        self.width = width

    def layer(self):
        return torch.nn.Linear(self.width, self.width)


def double(x):
    """Twice x."""
    return 2 * x


print(__name__, __file__, __spec__, __package__, __doc__, __builtins__.__name__, sorted(globals())[:12])
print(sys.argv, os.getcwd(), sys.path[0], sys.stdout.write_through, sys.modules["__main__"].Config is Config)
print(inspect.getsource(double), inspect.getsourcefile(Config), inspect.getmodule(double))
with open(__file__) as own:
    print(len(own.read()), "characters in", own.name)
with open("data/words.txt") as words:
    print(words.read().split())
with open(os.path.join(os.path.dirname(__file__), "data", "words.txt")) as words:
    print(len(words.read()))

torch.save({"config": Config(3), "function": double}, f"config-{rank}.pt")
again = torch.load(f"config-{rank}.pt", weights_only=False)
print(again["config"].layer(), again["function"](4), again["config"].__class__.__module__)
print(pickle.loads(pickle.dumps(Config)) is Config, Config)

torch.manual_seed(rank)
for batch in DataLoader(torch.arange(8.0), batch_size=4, num_workers=1, multiprocessing_context="fork"):
    print(batch, torch.rand(1))
for batch in DataLoader(list(range(8)), 4, num_workers=1, collate_fn=lambda b: Config(sum(b)).width):
    print(batch)
everything = [None] * dist.get_world_size()
dist.all_gather_object(everything, Config(rank))
print([config.width for config in everything], [type(config) is Config for config in everything])
dist.destroy_process_group()
try:
    import no_such_module
except ImportError as error:
    print(type(error).__name__, error, error.name)
sys.exit()
