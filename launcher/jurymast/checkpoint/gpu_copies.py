"""Copies from a GPU into a slot that run alongside the training; imported only where CUDA is in use.

They run on a stream of their own. What an optimizer owns cannot change before its next step, so only that
step waits for its copies. Whatever the training does next on its stream waits for all other copies (buffers,
which a forward pass changes, and tensors of unknown use). The CPU waits for none.

A script may break this: it may write parameters elsewhere, for example to evaluate averaged weights. An image
that was copied meanwhile is found and not published, and from then on the training waits for all copies.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

log = logging.getLogger("jurymast.checkpoint")

# Tensors of an image whose last elements are compared, and how many of these.
SAMPLES = 64
SAMPLE_ELEMENTS = 8
_UNKNOWN_ERROR = 999


class WrittenMeanwhileError(Exception):
    """Tensors that only an optimizer's step may write were written while they were copied."""


class WatchedTensors:
    """Tensors that must not be written until they are copied to their places, except after `step_begins`.

    torch counts the writes to a tensor, but not those through `.data`. These are found by a sample: the last
    elements of some tensors, up to the one that is copied last, are compared with what arrived. A write to
    all tensors is missed only if the sampled ones had their old values while they were copied.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to watch; `pairs` are places and tensors, in the order in which they will be copied. Reads
        the tensors on the current stream."""
        self._tensors = [tensor for _, tensor in pairs]
        self._versions = [tensor._version for tensor in self._tensors]
        last_first = [pair for pair in reversed(pairs) if pair[1].is_contiguous()]
        every = max(1, len(last_first) // SAMPLES)
        self._sample = [(_tail(place), _tail(tensor).clone()) for place, tensor in last_first[::every]]
        self._stepped = self._written = False

    def step_begins(self) -> None:
        """Note that an optimizer's step begins, which waits for the copies: later writes do no harm."""
        if not self._stepped:
            self._written = self._counted()
            self._stepped = True

    def check(self) -> None:
        """Raise WrittenMeanwhileError if a tensor was written. Call it once all are copied."""
        written = self._written if self._stepped else self._counted()
        if written or not all(_equal_bytes(place, then) for place, then in self._sample):
            raise WrittenMeanwhileError

    def _counted(self) -> bool:
        return any(
            tensor._version != then for tensor, then in zip(self._tensors, self._versions, strict=True)
        )


def _tail(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)[-SAMPLE_ELEMENTS:]


def _equal_bytes(place: torch.Tensor, then: torch.Tensor) -> bool:
    a, b = (ctypes.string_at(one.data_ptr(), one.nbytes) for one in (place, then.cpu()))
    return a == b


class GpuCopies:
    """Makes copies from the GPU that is current when it is created, one image at a time.

    Each thread has its own current GPU, at first the machine's first one: a call of CUDA in another thread
    would take memory there for a context, unless it names this GPU.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)
        # By address; None: CUDA refused. What is unmapped while it is pinned stays pinned: copies to what is
        # mapped there next would go to the old pages. So this keeps it mapped.
        self._pinned: dict[int, torch.Tensor | None] = {}
        self._owned_done: Any = None
        self._watched: WatchedTensors | None = None
        self._trusting = True  # no script has written such tensors elsewhere yet
        self._publisher: threading.Thread | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Unpin everything; no further copies are made."""
        self.wait()
        self._hook.remove()
        for buffer in list(self._pinned.values()):
            if buffer is not None:
                self.unregister(buffer)

    def register(self, buffer: torch.Tensor) -> None:
        """Pin `buffer`, which makes copies faster and asynchronous; they are correct without it."""
        address = buffer.data_ptr()
        if address in self._pinned:
            return
        code = self._call(lambda cuda: cuda.cudaHostRegister(address, buffer.numel(), 0))
        if code:
            log.warning("cannot pin memory for checkpoints (CUDA error %d): saves take longer", code)
        self._pinned[address] = None if code else buffer

    def unregister(self, buffer: torch.Tensor) -> None:
        """Undo `register`."""
        self.wait()
        address = buffer.data_ptr()
        if self._pinned.pop(address, None) is not None:
            self._call(lambda cuda: cuda.cudaHostUnregister(address))

    def _call(self, call: Callable[[Any], Any]) -> int:
        """Call CUDA's library; return its code. In a thread of its own, because CUDA keeps the error of a
        thread's call until the next kernel that this thread starts, in which torch would raise it."""
        codes = [_UNKNOWN_ERROR]

        def run() -> None:
            with torch.cuda.device(self._device):
                codes.append(int(call(torch.cuda.cudart())))

        thread = threading.Thread(target=run, name="jurymast-pin")
        thread.start()
        thread.join()
        return codes[-1]

    def start(
        self,
        places: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        objects: Iterable[Any],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Copy each tensor to its place, and call `done` from another thread when all are copied.

        `objects` are the user's: what the optimizers among them own changes only in their steps. Tensors that
        are not on this GPU are copied before this returns. `done` gets the error, or None.
        """
        self.wait()
        pairs = list(zip(places, tensors, strict=True))
        owned = owned_by_optimizers(objects) if self._trusting else set[int]()
        training = torch.cuda.current_stream(self._device)
        later = [pair for pair in pairs if self._is_here(pair[1]) and pair[1].data_ptr() in owned]
        with torch.no_grad(), torch.cuda.stream(training):
            watched = self._watched = WatchedTensors(later)
        self._stream.wait_stream(training)
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                for place, tensor in pairs:
                    if not self._is_here(tensor):
                        place.copy_(tensor)
                    elif tensor.data_ptr() not in owned:
                        place.copy_(tensor, non_blocking=True)
                training.wait_event(self._stream.record_event())
                for place, tensor in later:
                    place.copy_(tensor, non_blocking=True)
                self._owned_done = self._stream.record_event()
        except BaseException:
            self._stream.synchronize()  # no copy may continue, because its place will be written again
            raise
        # The thread keeps references to the tensors, so that their memory is not reused meanwhile.
        self._publisher = threading.Thread(
            target=self._publish, args=(self._owned_done, watched, pairs, done), name="jurymast-publish"
        )
        self._publisher.start()

    def wait(self) -> None:
        """Wait until no copy is under way and what was copied is published."""
        if self._publisher is not None and self._publisher is not threading.current_thread():
            self._publisher.join()
            self._publisher = None

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self._device

    def _publish(
        self, event: Any, watched: WatchedTensors, _held: Any, done: Callable[[BaseException | None], None]
    ) -> None:
        try:
            # On the training's stream the check would wait for all that the script has begun there meanwhile.
            with torch.cuda.stream(self._stream):
                event.synchronize()
                watched.check()
        except WrittenMeanwhileError as error:
            self._trusting = False
            log.warning(
                "a checkpoint in memory was dropped: parameters or optimizer state were written outside of "
                "the optimizer's step while they were copied. From now on, the training waits for copies"
            )
            done(error)
        except Exception as error:
            log.warning("copies from the GPU failed", exc_info=error)
            done(error)
        else:
            done(None)

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._watched is not None:
            self._watched.step_begins()
        event, self._owned_done = self._owned_done, None
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def owned_by_optimizers(objects: Iterable[Any]) -> set[int]:
    """Return the addresses of the optimizers' parameters and state. Optimizers that may run inside a CUDA
    graph are left out, because their steps call no hook."""
    owned: set[int] = set()
    for optimizer in objects:
        if not isinstance(optimizer, Optimizer):
            continue
        if any(group.get("capturable") for group in optimizer.param_groups):
            continue
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                owned.add(local.data_ptr())
    return owned - {0}
