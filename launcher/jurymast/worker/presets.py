"""Reads from a script's text which variables it sets before it imports torch.

    os.environ["OMP_NUM_THREADS"] = "4"
    import torch

A process that preloads torch for such a script sets these first. Only plain settings count: constants, at the
top of the script, outside of any condition. Others are found when the script runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

# Prefixes of variables that torch's compiler reads when the script first uses it, or an optimizer: a script
# that names one may set it after it has imported torch.
COMPILER = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "AOTINDUCTOR_", "AOT_INDUCTOR_")


def presets(source: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the script has set when it imports torch; {} if the text is not Python."""
    found: dict[str, str] = {}
    for name, value, default_only in _settings(source):
        if value is None:
            found.pop(name, None)
        elif not default_only or name not in {**environment, **found}:
            found[name] = value
    return found


def computed(source: str) -> set[str]:
    """Return the variables that the script sets before then to values that only running it can tell."""
    return {name for name, value, _ in _settings(source) if value is None}


def names_compiler(source: str) -> bool:
    """Return whether the script names variables of torch's compiler."""
    return any(prefix in source for prefix in COMPILER)


_Setting = tuple[str, "str | None", bool]


def _settings(source: str) -> Iterator[_Setting]:
    """Yield (name, value, whether only if it is not set yet) for each unconditional setting before torch is
    imported; the value is None if the text does not tell it."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in body:
        if _imports_torch(node):
            return
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _pair(target.slice, node.value, default_only=False)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _called(node.value)


def _called(call: ast.Call) -> Iterator[_Setting]:
    function = call.func
    if not isinstance(function, ast.Attribute) or not _is_environ(function.value):
        return
    if function.attr == "setdefault" and len(call.args) == 2:
        yield from _pair(call.args[0], call.args[1], default_only=True)
    elif function.attr == "update":
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                for key, value in zip(argument.keys, argument.values, strict=True):
                    if key is not None:
                        yield from _pair(key, value, default_only=False)
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield from _pair(ast.Constant(keyword.arg), keyword.value, default_only=False)


def _pair(name: ast.expr, value: ast.expr, *, default_only: bool) -> Iterator[_Setting]:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        plain = isinstance(value, ast.Constant) and isinstance(value.value, str)
        yield name.value, value.value if plain else None, default_only  # type: ignore[attr-defined]


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _imports_torch(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"
