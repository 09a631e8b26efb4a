"""What a script does before it imports torch, as far as its text tells.

A rank that is forked with torch loaded must give the script what its own import would: native libraries read
variables when they are loaded. Constants that the script sets first are set ahead. If it sets a variable to
what only running it tells, or may do so, the rank starts cold, before its first line: nothing runs twice.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jurymast.worker.preload import LATER, NATIVE

# Packages that import torch when they are imported.
WITH_TORCH = {
    "torch", "accelerate", "deepspeed", "fairscale", "lightning", "pytorch_lightning", "timm", "torchaudio",
    "torchdata", "torchtitan", "torchvision",
}  # fmt: skip
# Calls that may run twice in a rank that starts again: they change nothing outside of their process.
HARMLESS = {
    "print", "len", "int", "str", "float", "bool", "list", "dict", "set", "tuple", "range", "max", "min",
    "Path", "getLogger", "basicConfig", "filterwarnings", "simplefilter", "insert", "append", "join",
    "dirname", "abspath", "getenv", "get", "setdefault", "cpu_count", "sched_getaffinity", "resolve",
    "dataclass", "ArgumentParser", "add_argument", "parse_args",
}  # fmt: skip
_NATIVE_NAME = re.compile(rf"\b(?!{'|'.join(LATER)})(?:{'|'.join(NATIVE)})[A-Z0-9_]+\b")
UNKNOWN = "variables whose names only running it tells"
FILES = 100  # of the user's own; more are not read
# What a text has in it that sets a variable.
_SETS = re.compile(r"environ|putenv|unsetenv|setenv|\bexec\b|\beval\b|dotenv")


@dataclass
class Before:
    """What a script does before it imports torch. `settings`: (name, value, whether only if it is not set)
    of plain settings, in order. `computed`: variables that it may set to other values, or `UNKNOWN`.
    `repeatable`: whether it may run twice."""

    settings: list[tuple[str, str, bool]] = field(default_factory=list)
    computed: dict[str, None] = field(default_factory=dict)
    repeatable: bool = True

    def presets(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that it has set, to constants, when it imports torch."""
        found: dict[str, str] = {}
        for name, value, default_only in self.settings:
            if not default_only or name not in {**environment, **found}:
                found[name] = value
        return {name: value for name, value in found.items() if name not in self.computed}


def of_script(script: str, paths: Sequence[str] = ()) -> Before:
    """Read a script, or a folder with a `__main__`, as `python SCRIPT` runs it. `paths`: of its modules."""
    file = Path(script)
    folder = file.parent
    if file.is_dir():
        folder, file = file, file / "__main__.py"
    return _Walk([str(folder), *paths]).read([file])


def of_module(name: str, paths: Sequence[str] = ()) -> Before:
    """Read a module as `python -m NAME` runs it: its packages first, and the `__main__` of a package."""
    reader = _Walk([os.getcwd(), *paths])
    files = reader.files_of(name)
    if files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))
    return reader.read(files)


def of_text(source: str) -> Before:
    reader = _Walk([])
    reader.text(source, package="", certain=True)
    return reader.found


class _Walk:
    def __init__(self, paths: Sequence[str]) -> None:
        self.found = Before()
        # Installed packages are not the user's: what they set is found when the rank runs.
        ours, standard = str(Path(__file__).parents[2]), os.path.dirname(os.__file__)
        installed = re.compile(r"(site|dist)-packages\b|\.zip$")
        self._paths = [
            p for p in paths if p and p != ours and not p.startswith(standard) and not installed.search(p)
        ]
        self._seen: set[Path] = set()

    def read(self, files: list[Path]) -> Before:
        for file in files:
            if self._file(file, certain=True):
                break
        return self.found

    def files_of(self, name: str) -> list[Path]:
        """Return the user's own files that the import of a module runs, in order; [] for other modules."""
        parts = name.split(".")
        for path in self._paths:
            files, place = [], Path(path)
            for part in parts:
                place = place / part
                package = place / "__init__.py"
                file = package if package.is_file() else place.with_suffix(".py")
                if file.is_file():
                    files.append(file)
                elif not place.is_dir():
                    break
            if files:
                return files
        return []

    def _file(self, file: Path, *, certain: bool) -> bool:
        """Read a file that is run now; return whether torch is imported then for sure."""
        if file in self._seen or len(self._seen) >= FILES:
            return False
        self._seen.add(file)
        try:
            source = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return self.text(source, package=self._package(file), certain=certain)

    def _package(self, file: Path) -> str:
        for path in self._paths:
            if file.is_relative_to(path):
                return ".".join(file.relative_to(path).parts[:-1])
        return ""

    def text(self, source: str, *, package: str, certain: bool) -> bool:
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError):
            return False
        sets = bool(_SETS.search(source) or _NATIVE_NAME.search(source))
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                if self._import(node, package, certain=certain):
                    return True
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            elif (settings := _plain(node)) is not None:
                for name, value, default_only in settings:
                    if certain:
                        self.found.settings.append((name, value, default_only))
                        self.found.computed.pop(name, None) if not default_only else None
                    else:
                        self.found.computed[name] = None
            else:
                self._look(node, package, sets=sets)
        return False

    def _import(self, node: ast.Import | ast.ImportFrom, package: str, *, certain: bool) -> bool:
        for name in _imported(node, package):
            if name.partition(".")[0] in WITH_TORCH:
                return True
            for file in self.files_of(name):
                if self._file(file, certain=certain):
                    return True
        return False

    def _look(self, statement: ast.stmt, package: str, *, sets: bool) -> None:
        """Note what a statement may set, wherever in it: a function may be called, a condition may hold.
        `sets`: whether its file has anything that sets a variable."""
        if self.found.repeatable and any(map(_may_not_repeat, _run_at_once(statement))):
            self.found.repeatable = False
        reads = set(_reads(statement)) if sets else set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, package, certain=False)
            elif not sets:
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in reads:
                self.found.computed.update(dict.fromkeys(_NATIVE_NAME.findall(node.value)))
            elif isinstance(node, ast.keyword) and node.arg:
                self.found.computed.update(dict.fromkeys(_NATIVE_NAME.findall(node.arg)))
            for name in _written(node):
                self.found.computed[name] = None


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = package.split(".") if package else []
        parts = parts[: len(parts) - node.level + 1]
        base = ".".join([*parts, base] if base else parts)
    if base:
        yield base
    for alias in node.names:
        yield f"{base}.{alias.name}" if base else alias.name


def _plain(node: ast.stmt) -> list[tuple[str, str, bool]] | None:
    """Return the settings of a statement that does nothing but set variables to constants; else None."""
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    default_only = False
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if not isinstance(target, ast.Subscript) or not _is_environ(target.value):
            return None
        pairs = [(target.slice, node.value)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call, function = node.value, node.value.func
        if not isinstance(function, ast.Attribute) or not _is_environ(function.value):
            return None
        if function.attr == "setdefault" and len(call.args) == 2:
            pairs, default_only = [(call.args[0], call.args[1])], True
        elif function.attr == "update":
            for argument in call.args:
                if not isinstance(argument, ast.Dict):
                    return None
                pairs += zip(argument.keys, argument.values, strict=True)
            pairs += [(ast.Constant(k.arg) if k.arg else None, k.value) for k in call.keywords]
        else:
            return None
    else:
        return None
    found = []
    for name, value in pairs:
        texts = [one.value for one in (name, value) if isinstance(one, ast.Constant)]
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            return None
        found.append((str(texts[0]), str(texts[1]), default_only))
    return found


def _is_environ(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "environ" and _last(node.value) == "os"
    return _last(node) == "environ"


def _last(node: ast.AST) -> str:
    """Return the last part of a dotted name; "" for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_read(function: ast.expr) -> bool:
    if _last(function) == "getenv":
        return True
    return isinstance(function, ast.Attribute) and function.attr == "get" and _is_environ(function.value)


def _reads(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the names of variables that are only read, and texts that stand for themselves."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node.args and _is_read(node.func):
            yield node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and all(map(_is_environ, node.comparators)):
            yield node.left
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _written(node: ast.AST) -> Iterator[str]:
    """Yield the variable that an expression sets or removes, or UNKNOWN."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        yield _name(node.slice)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield UNKNOWN
    elif isinstance(node, ast.Call):
        last = _last(node.func)
        if last in ("exec", "load_dotenv") or (last == "eval" and isinstance(node.func, ast.Name)):
            yield from () if _tells_all(node) else (UNKNOWN,)
        elif last in ("putenv", "unsetenv", "setenv") and node.args:
            yield _name(node.args[0])
        elif isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
            if last in ("setdefault", "pop", "__setitem__", "__delitem__") and node.args:
                yield _name(node.args[0])
            elif last == "update":
                for argument in node.args:
                    keys = argument.keys if isinstance(argument, ast.Dict) else [None]
                    yield from (UNKNOWN if key is None else _name(key) for key in keys)
                yield from (keyword.arg or UNKNOWN for keyword in node.keywords)
            elif last in ("clear", "popitem"):
                yield UNKNOWN


def _tells_all(call: ast.Call) -> bool:
    """Return whether all that a call of exec or eval runs is in the text, without a variable's name."""
    text = call.args[0] if call.args else None
    return isinstance(text, ast.Constant) and isinstance(text.value, str) and "environ" not in text.value


def _name(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else UNKNOWN


def _run_at_once(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield what runs with the statement itself: not the bodies of functions, but their decorators."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += node.decorator_list
        elif not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _may_not_repeat(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        decorators = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        return any(_last(one) not in HARMLESS for one in decorators)
    return isinstance(node, ast.Call) and _last(node.func) not in HARMLESS
