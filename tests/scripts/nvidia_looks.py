"""Looks through the nvidia probe as told, a JSON line each way: open, look, energy, close.

A process of its own, because the library that pynvml loads cannot be changed once it is loaded.
"""

from __future__ import annotations

import json
import os
import sys

import jurymast_nvidia
from jurymast.health.probe import Context, Probe


def main() -> None:
    probe: Probe | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "open":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if order["visible"] is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = order["visible"]
            probe = jurymast_nvidia.probe(Context(**order["context"]))
            answer: object = probe is not None
        elif order["do"] == "look" and probe is not None:
            answer = [finding.to_json() for finding in probe.look(order["now"])]
        elif order["do"] == "energy":
            answer = dict(getattr(probe, "energy", dict)())
        else:
            if probe is not None:
                probe.close()
            answer = None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
