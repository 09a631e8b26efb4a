"""`python -m jurymast.storage.export SOURCE TARGET torch|safetensors` writes one checkpoint as one file.

This is a process of its own, because it needs torch, which commands do not import. An error is one line on
stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.rundir import sync_directory

INSTALL = "pip install safetensors"


def export(source: Path, target: Path, form: str) -> int:
    """Write the contents of the DCP directory `source` to the new file `target`. Return how many values were
    left out because the form cannot hold them. Raises OSError, and whatever torch raises.
    """
    if form == "safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(f"the format safetensors needs a package: {INSTALL}")
    state = _load(source)
    # In a directory of its own, which is held: others may be able to write to the one of the target. Some
    # libraries write to another file there, and rename it.
    temporary = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    with contextlib.suppress(OSError):
        os.chmod(temporary, 0o700)  # whatever it has inherited
    try:
        with foreign.own_directory(Path(temporary)) as here:
            written = here / "written"
            try:
                left_out = _save(state, written, form)
                with foreign.reading_own(written) as file:
                    os.fsync(file.fileno())
                os.link(written, target)  # unlike a rename, this never replaces a file
            finally:
                for name in os.listdir(here):
                    os.unlink(here / name)
    finally:
        os.rmdir(temporary)
    with contextlib.suppress(PermissionError):  # who may write there need not be able to read it
        sync_directory(target.parent)
    return left_out


def _load(source: Path) -> dict[str, Any]:
    """Load the whole checkpoint into CPU memory, nested as it was saved."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from jurymast.checkpoint.tree import decode, reader

    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    with foreign.own_directory(source) as place:  # unpickling runs code as this user
        _load_state_dict(state, storage_reader=reader(place), planner=planner, no_dist=True)
    return {key: decode(value) for key, value in state.items()}


def _save(state: dict[str, Any], path: Path, form: str) -> int:
    """Return how many values were left out."""
    if form == "torch":
        import torch

        torch.save(state, path)
        return 0
    leaves = dict(_leaves(state))
    tensors = {name: value.contiguous() for name, value in leaves.items() if hasattr(value, "contiguous")}
    importlib.import_module("safetensors.torch").save_file(tensors, path)
    return len(leaves) - len(tensors)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for everything that is not a dict or list."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def main() -> None:
    source, target, form = sys.argv[1:]
    os.umask(0o077)
    warnings.simplefilter("ignore")  # torch's; stderr is for people
    try:
        left_out = export(Path(source), Path(target), form)
    except Exception as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    if left_out:
        sys.stderr.write(
            f"left out {left_out} values that are not tensors: this format has no place for them\n"
        )


if __name__ == "__main__":
    main()
