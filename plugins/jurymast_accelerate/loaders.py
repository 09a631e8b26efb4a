"""The place of Accelerate's loaders, with the random numbers that lead there.

A loader draws numbers when an iteration begins (the order of the samples, a seed for its workers) and for
each batch, of which it is one ahead of the loop. A loader that is restored within an epoch begins the
iteration anew with the numbers of then, fetches the batch that was ahead with those of then, and only then
goes on with those of the restored state. What workers draw they draw anew, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from jurymast.checkpoint import RandomState


class Place:
    """What is saved of a loader that Accelerate has prepared."""

    _is_new = False  # this process has not begun an iteration, and another one has

    def __init__(self, loader: Any) -> None:
        self._loader, self._base = loader, loader.base_dataloader
        self._begin, self._update = self._base.__iter__, loader._update_state_dict
        self._began: dict[str, Any] = {}  # the random numbers at the iteration's beginning
        self._ahead: dict[str, Any] = {}  # and before the batch that is ahead was fetched
        self._seeds_workers = False  # whether a seed for them was drawn then
        self._held: dict[str, Any] | None = None
        self._base.__iter__ = self._iterator
        loader._update_state_dict = self._updated
        if self._base.num_workers:  # what it has begun already has drawn numbers that are not known any more
            self._base.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        if self._held is not None:
            return self._held
        return {
            "loader": self._loader.state_dict(), "began": self._began, "ahead": self._ahead,
            "seeds workers": self._seeds_workers, "now": self._own(), "over": self._is_over(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["over"]:  # the next iteration begins as any other
            self._base.load_state_dict({})
            self._set_own(state["now"])
        else:
            self._loader.load_state_dict(state["loader"])
            self._held = dict(state)
        self._is_new = bool(state["over"] and state["began"])

    # ---- an iteration

    def _is_over(self) -> bool:
        return not self._began or bool(self._loader.end_of_dataloader)

    def _updated(self) -> None:
        self._update()
        self._ahead = self._numbers()

    def _iterator(self) -> Any:
        held, self._held = self._held, None
        if held is None:
            self._began = self._numbers()
            base = self._base
            kept = base.persistent_workers and (base._iterator is not None or self._is_new)
            self._seeds_workers = not (kept or base._initial_iter_for_state_dict)
            self._is_new = False
            return self._begun(seeded=self._seeds_workers)
        return self._resumed(held)

    def _resumed(self, held: Mapping[str, Any]) -> Iterator[Any]:
        now = RandomState().state_dict()
        self._began, self._seeds_workers = held["began"], held["seeds workers"]
        self._set(self._began)
        begun = self._begun(seeded=self._seeds_workers)
        if isinstance(samples := getattr(begun, "_sampler_iter", None), islice):  # it has skipped nothing yet
            begun._sampler_iter = chain(list(islice(samples, 1)), samples)
        if held["ahead"]:
            RandomState().load_state_dict(held["ahead"]["process"])
        first = list(islice(begun, 1))
        RandomState().load_state_dict(now)
        self._set_own(held["now"])
        yield from chain(first, begun)

    def _begun(self, *, seeded: bool) -> Any:
        """Begin the loader's own iteration. If it is not `seeded`, the seed that a new one draws is none of
        the process's numbers."""
        given = self._base.generator
        if not seeded:
            self._base.generator = torch.Generator()
        try:
            return iter(self._begin())
        finally:
            self._base.generator = given

    # ---- random numbers

    def _numbers(self) -> dict[str, Any]:
        return {"process": RandomState().state_dict(), "own": self._own()}

    def _set(self, numbers: Mapping[str, Any]) -> None:
        RandomState().load_state_dict(numbers["process"])
        self._set_own(numbers["own"])

    def _own(self) -> list[torch.Tensor]:
        return [one.get_state() for one in self._generators()]

    def _set_own(self, states: list[torch.Tensor]) -> None:
        for one, state in zip(self._generators(), states, strict=True):
            one.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """The generators that the loader and its samplers were given."""
        owners, found = [self._base], {}
        for owner in owners:
            owners += [getattr(owner, name) for name in ("batch_sampler", "sampler") if hasattr(owner, name)]
            if isinstance(one := getattr(owner, "generator", None), torch.Generator):
                found[id(one)] = one
        return [*found.values()]
