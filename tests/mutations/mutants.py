"""Mutants: a file with one small mistake in it each, as a careless change would make it.

Operators, on the syntax tree of every function:

- `negate` a condition; `guard`: no early return where a condition holds;
- `or` for `and` and the other way round, or one `part` of such a condition left out;
- `bound`: `<` for `<=` and so on; `one` more or less left out;
- `drop` a statement that calls something or changes an object (closes, cancels, syncs, appends, ...);
- `effect`: one left out of a list of them; `swap` two calls, as a write and the reply that follows it.

Left out is what has no effect: texts, logs, reasons of errors, `check()`, assertions, bounds of times (no two
are ever equal), and what a command line accepts; and the assignments of a constructor, without which nothing
works.

A seed orders all mutants, by a hash of their names: a change of the code elsewhere changes nothing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

MOST_OF_A_FILE = 2
TEXT_FILES = ("texts.py", "__main__.py")
TEXT_FUNCTIONS = ("check", "__repr__", "__str__")
TEXT_FIELDS = ("evidence", "reason", "text", "message", "why", "how")
TIME = re.compile(r"(.*_)?(s|at|now|until|since|deadline|last|t)", re.IGNORECASE)
BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}

# (operator, what is replaced, by what)
Change = tuple[str, ast.AST, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """`path`: of the file, below jurymast/; `start` and `end`: of what is replaced in it, in bytes."""

    path: str
    function: str
    operator: str
    before: str
    number: int  # among several alike
    after: str
    line: int
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}:{self.operator}:{self.number}:{' '.join(self.before.split())}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def of_file(root: Path, path: Path) -> Iterator[Mutant]:
    source, seen = path.read_bytes(), Counter[tuple[str, ...]]()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function, (operator, node, after) in _changes(ast.parse(source)):
        first, last = (node.body[0], node.body[-1]) if isinstance(node, ast.Module) else (node, node)
        assert isinstance(first, ast.expr | ast.stmt)
        assert isinstance(last, ast.expr | ast.stmt)
        start = starts[first.lineno - 1] + first.col_offset
        end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
        before = source[start:end].decode()
        seen[function, operator, before] += 1
        yield Mutant(
            str(path.relative_to(root)), function, operator, before, seen[function, operator, before], after,
            first.lineno, start, end,
        )  # fmt: skip


def chosen(
    root: Path, folders: Collection[str], seed: int, count: int, without: Collection[str]
) -> list[Mutant]:
    """The first `count` of these folders' mutants by the seed, but at most two of a file."""
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    mutants = [mutant for path in files if path.name not in TEXT_FILES for mutant in of_file(root, path)]
    mutants.sort(key=lambda mutant: sha256(f"{seed}:{mutant.name}".encode()).digest())
    of = Counter[str]()
    first: list[Mutant] = []
    for mutant in mutants:
        if len(first) < count and of[mutant.path] < MOST_OF_A_FILE and mutant.name not in without:
            of[mutant.path] += 1
            first.append(mutant)
    return first


def _changes(tree: ast.AST, function: str = "") -> Iterator[tuple[str, Change]]:
    """All changes, with the function that each is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | Function):
            if node.name not in TEXT_FUNCTIONS:
                yield from _changes(node, ".".join(filter(None, (function, node.name))))
        elif not _is_text(node):
            if function:
                yield from ((function, change) for change in _of_node(node, function))
            yield from _changes(node, function)
    if function:
        for field in ("body", "orelse", "finalbody"):
            body = getattr(tree, field, ())
            yield from ((function, change) for change in _swaps(body if isinstance(body, list) else []))


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=func):
            called = ast.unparse(func)
            return called.startswith(("log.", "logging.", "warnings.")) or called.endswith("Noted")
        case ast.keyword(arg=arg):
            return arg in TEXT_FIELDS
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert)


def _of_node(node: ast.AST, function: str) -> Iterator[Change]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
            yield "negate", test, f"not ({ast.unparse(test)})"
        case ast.BoolOp(op=op, values=values):
            this, other = (" and ", " or ") if isinstance(op, ast.And) else (" or ", " and ")
            yield "or", node, f"({other.join(map(_in_brackets, values))})"
            for number in range(len(values)):
                kept = values[:number] + values[number + 1 :]
                yield f"part {number + 1}", node, f"({this.join(map(_in_brackets, kept))})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in BOUNDS:
            if not any(map(TIME.fullmatch, _names(node))):
                yield "bound", node, f"({ast.unparse(left)} {BOUNDS[type(op)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            yield "one", node, _in_brackets(left)
        case ast.List(elts=elements):
            for number, element in enumerate(elements):
                if isinstance(element, ast.Call | ast.Starred) and not _is_text(element):
                    kept = elements[:number] + elements[number + 1 :]
                    yield f"effect {number + 1}", node, f"[{', '.join(map(ast.unparse, kept))}]"
    match node:
        case ast.If(body=[ast.Return() | ast.Continue() | ast.Break() as leaves], orelse=[]):
            yield "guard", leaves, "pass"
    constructs = function.endswith("__init__")
    if _called(node) or (_changes_object(node) and not constructs):
        yield "drop", node, "pass"


def _called(node: ast.AST) -> bool:
    """Whether it is a statement that calls something, and nothing else."""
    match node:
        case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
            return not _is_text(call)
    return False


def _changes_object(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
            return True
    return False


def _swaps(body: list[ast.stmt]) -> Iterator[Change]:
    for one, other in zip(body, body[1:], strict=False):
        if _called(one) and _called(other):
            both = f"\n{' ' * one.col_offset}".join((ast.unparse(other), ast.unparse(one)))
            yield "swap", ast.Module([one, other], []), both


def _in_brackets(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name | ast.Attribute):
            yield one.id if isinstance(one, ast.Name) else one.attr
