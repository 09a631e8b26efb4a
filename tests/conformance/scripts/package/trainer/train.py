"""Trains, started by `-m trainer.train`."""

import argparse
import multiprocessing
import os
import pickle
import sys

import torch
import torch.distributed as dist

from . import model
from .settings import WIDTH


class Item:
    value = 1


def child(answers):
    answers.put((__name__, sys.modules["__main__"].__name__, sys.modules["__main__"].__spec__.name, Item.__module__))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    print(parser.prog, options, WIDTH, sys.argv, sys.path[0], os.getcwd())
    print(__name__, __package__, __file__, __spec__.name, __spec__.parent, __spec__.origin, __spec__.cached is None)
    print(sys.orig_argv[1:], sys.modules["__main__"].__spec__ is __spec__, "trainer.train" in sys.modules)
    print(pickle.loads(pickle.dumps(Item)).value, type(__loader__).__name__, torch.__name__)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        process = context.Process(target=child, args=(answers,))
        process.start()
        answer = answers.get()
        process.join()
        print(method, answer)
    layer = torch.nn.parallel.DistributedDataParallel(model.build())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _step in range(options.steps):
        layer(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    print([parameter.tolist() for parameter in layer.parameters()])
    dist.barrier()  # torch 2.13 may hang when gloo's group ends right after the last backward, unless the GIL rests
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
