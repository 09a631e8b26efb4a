"""Modules that are loaded before the script and hidden until it imports them.

A rank is forked from a process that has imported torch already, but its `sys.modules` begins as in a new
interpreter. A hidden module is revealed when the script imports it, if the script's own import would have
given the same: the same file is found under that name, and no variable that the import reads has changed. If
one has, the rank must start with nothing preloaded.

A bundle is everything that the import of one list of modules loaded and changed. Its changes outside modules
(warning filters, entries of `sys.path`, variables) take effect when the script imports the first of torch's
modules in the bundle.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Native libraries read their variables unseen by Python; these are the prefixes of their names.
NATIVE = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_", "C10_",
    "TORCH_", "PYTORCH_", "KINETO_", "CPUINFO_",
)  # fmt: skip
# Exceptions, which are read only when a process group is made, or only by Python code (Lightning sets some).
LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_UCC_", "TORCH_ELASTIC_", "PYTORCH_NVML_")

NANOBINDS_FUNCTION = "nb_func"


@dataclass
class Bundle:
    """What one list of imports loaded and changed. `native`: its native libraries read variables. `read` has
    the variables that Python code looked up meanwhile, found or not; `written` those that it changed."""

    native: bool = False
    read: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    finders: list[Any] = field(default_factory=list)  # of imports: setuptools' for what it brings along
    loggers: list[Any] = field(default_factory=list)
    complains: bool = False  # at the interpreter's end, of what is left of it

    def reads(self, name: str) -> bool:
        """Return whether this bundle's imports depend on this variable."""
        return name in self.read or (self.native and is_native(name))


def is_native(name: str) -> bool:
    """Return whether torch's native libraries may read this variable when they are loaded."""
    return name.startswith(NATIVE) and not name.startswith(LATER)


def _complains(modules: Iterable[ModuleType]) -> bool:
    """Whether one of them was made with nanobind, as triton's are since torch 2.15: it writes a page of lines
    about functions that the interpreter's end has not taken apart."""
    native = (names for names in map(vars, modules) if not str(names.get("__file__")).endswith(".py"))
    return any(type(value).__name__ == NANOBINDS_FUNCTION for names in native for value in names.values())


def load(names: Sequence[str], *, native: bool = False) -> Bundle:
    """Import these modules now, skipping those that do not exist, and undo every other change."""
    bundle = Bundle(native)
    before, modules = dict(os.environ), set(sys.modules)
    filters, path, loggers = list(warnings.filters), list(sys.path), set(_loggers())
    finders: list[Any] = list(sys.meta_path)
    with _recorded(bundle.read):
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                continue  # torch sometimes renames its inner modules; a rank imports what it really needs
    main = sys.modules["__main__"]  # may have a second name; not to be kept, because it ends with the script
    bundle.modules = {
        n: module for n, module in sys.modules.items() if n not in modules and module is not main
    }
    bundle.complains = _complains(bundle.modules.values())
    bundle.loggers = [logger for name, logger in _loggers().items() if name not in loggers]
    bundle.filters = [entry for entry in warnings.filters if entry not in filters]
    bundle.path = [entry for entry in sys.path if entry not in path]
    bundle.finders = [finder for finder in sys.meta_path if finder not in finders]
    bundle.written = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _set_filters(filters)
    sys.path[:] = path
    sys.meta_path[:] = finders
    for name in bundle.written:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return bundle


@contextmanager
def _recorded(read: set[str]) -> Iterator[None]:
    kind: Any = type(os.environ)
    original = kind.__getitem__

    def look_up(environment: Any, name: Any) -> Any:
        read.add(name)
        return original(environment, name)

    kind.__getitem__ = look_up
    try:
        yield
    finally:
        kind.__getitem__ = original


def _loggers() -> dict[str, Any]:
    """Return all loggers by name; {} if `logging` is not loaded."""
    logging = sys.modules.get("logging")
    return {} if logging is None else dict(logging.root.manager.loggerDict)


def _set_filters(filters: list[Any]) -> None:
    present: Any = warnings.filters
    present[:] = filters
    changed = getattr(warnings, "_filters_mutated", None)  # forgets what earlier filters decided
    if changed is not None:
        changed()


# (top-level name, number of the bundle): modules of one package are hidden and revealed together
_Group = tuple[str, int]


class Hidden:
    """An import finder, placed before all others, for preloaded modules.

    `assumed` are the variables with which the bundles were loaded. `stale` is called with the names of those
    that the script changed before it imports torch, or "sys.path" if another torch is found now, and may end
    this process. `torch_loaded` is called once torch is imported, even if it was not preloaded.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        visible: frozenset[str],
        assumed: Mapping[str, str],
        stale: Callable[[list[str]], None],
        torch_loaded: Callable[[], None],
    ) -> None:
        self._bundles, self._assumed = bundles, dict(assumed)
        self._stale, self._torch_loaded = stale, torch_loaded
        self._groups: dict[_Group, dict[str, ModuleType]] = {}
        self._group_of: dict[str, _Group] = {}
        self._detached: dict[_Group, list[tuple[ModuleType, str, ModuleType]]] = {}
        self._begun: set[int] = set()
        for number, bundle in enumerate(bundles):
            for name, module in bundle.modules.items():
                top = name.partition(".")[0]
                if name not in visible and _has_file(top):
                    self._groups.setdefault((top, number), {})[name] = module
                    self._group_of[name] = (top, number)
        self._watch_torch = "torch" not in self._group_of

    def hide(self) -> None:
        """Hide the modules from now on. Packages of Python's standard library keep their submodules as
        attributes, because other standard modules, which do not run again, rely on what they imported."""
        for group, modules in self._groups.items():
            if group[0] in sys.stdlib_module_names:
                continue
            self._detached[group] = [
                (holder, child, module)
                for name, module in modules.items()
                for parent, _, child in [name.rpartition(".")]
                if (holder := self._earlier(group, parent)) is not None and vars(holder).get(child) is module
            ]
        for name in self._group_of:
            del sys.modules[name]
        for children in self._detached.values():
            for holder, child, _ in children:
                delattr(holder, child)
        finders: list[Any] = sys.meta_path
        finders.insert(0, self)

    def _earlier(self, group: _Group, name: str) -> ModuleType | None:
        """Return the module of this name if an earlier bundle loaded it, else None."""
        top, number = group
        found = (self._groups.get((top, before), {}).get(name) for before in range(number))
        return next((module for module in found if module is not None), None)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a hidden module; the import system calls this. Reveals nothing: a script may only ask whether
        torch is installed."""
        if name == "torch" and self._watch_torch:
            return self._watched(name, path, target)
        group = self._group_of.get(name)
        if group is None:
            return None
        module = self._groups[group][name]
        if "." not in name and not self._same_file(module, name, path, target):
            return None
        return _spec_like(module, name, _Revealed(self, group, module))

    def _elsewhere(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in specs if spec is not None), None)

    def _same_file(self, module: ModuleType, name: str, path: Any, target: ModuleType | None) -> bool:
        found = self._elsewhere(name, path, target)
        if found is not None and module.__spec__ is not None and found.origin == module.__spec__.origin:
            return True
        if name == "torch":
            self._stale(["sys.path"])
        return False

    def check(self) -> None:
        """Call `stale` if torch cannot be revealed with the present variables."""
        if "torch" in self._group_of:
            self._check(self._group_of["torch"][1])

    def _check(self, number: int) -> None:
        names = {*os.environ, *self._assumed}
        bundle = self._bundles[number]
        changed = (n for n in names if os.environ.get(n) != self._assumed.get(n) and bundle.reads(n))
        if stale := sorted(changed):
            self._stale(stale)

    def begin(self, group: _Group) -> None:
        """Check a bundle's variables before its first module is revealed, and apply its other changes with
        the first of torch's modules. Native libraries of other packages, such as numpy, read variables as
        well; standard modules need neither."""
        top, number = group
        bundle = self._bundles[number]
        if number in self._begun or top in sys.stdlib_module_names:
            return
        if top == "torch" or bundle.native:
            self._check(number)
        if top != "torch":
            return
        self._begun.add(number)
        if bundle.filters:
            _set_filters([*bundle.filters, *warnings.filters])
        sys.path.extend(entry for entry in bundle.path if entry not in sys.path)
        os.environ.update(bundle.written)
        self._assumed.update(bundle.written)
        for logger in bundle.loggers:  # logging.config disables loggers that exist already
            logger.disabled = False

    def reveal(self, group: _Group) -> None:
        """Make all modules of a group visible."""
        modules = self._groups.pop(group, {})
        for name, module in modules.items():
            del self._group_of[name]
            sys.modules.setdefault(name, module)
        for holder, child, module in self._detached.pop(group, ()):
            setattr(holder, child, module)
        top, number = group
        own = [one for one in self._bundles[number].finders if one.__module__.partition(".")[0] == top]
        sys.meta_path.extend(finder for finder in own if finder not in sys.meta_path)
        if "torch" in modules:
            self._torch_loaded()

    def end(self) -> None:
        """Let the interpreter take apart at its end what was loaded ahead, if some of it complains otherwise.
        It takes as long as without us, where nothing is frozen or hidden."""
        if not any(bundle.complains for bundle in self._bundles):
            return
        for modules in self._groups.values():
            for name, module in modules.items():
                sys.modules.setdefault(name, module)
        gc.unfreeze()

    def _watched(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        """Find torch in the ordinary way, and have `torch_loaded` called once it is loaded."""
        spec = self._elsewhere(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            self._watch_torch = False
            loader.exec_module(module)
            self._torch_loaded()

        loader.exec_module = exec_module
        return spec


class _Revealed(Loader):
    """A loader that returns a preloaded module unchanged."""

    def __init__(self, hidden: Hidden, group: _Group, module: ModuleType) -> None:
        self._hidden, self._group, self._module = hidden, group, module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._hidden.begin(self._group)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        try:
            module.__spec__ = self._spec
        except AttributeError:
            pass  # some of torch's modules allow no assignments, so this one was not changed before either
        self._hidden.reveal(self._group)


def _spec_like(module: ModuleType, name: str, loader: Loader) -> ModuleSpec:
    true = module.__spec__
    if true is None:
        return ModuleSpec(name, loader)
    spec = ModuleSpec(name, loader, origin=true.origin, loader_state=true.loader_state)
    spec.submodule_search_locations = true.submodule_search_locations
    return spec


def _has_file(top: str) -> bool:
    """Return False for a name that an extension module put into sys.modules and that cannot be imported."""
    return getattr(sys.modules.get(top), "__spec__", None) is not None
