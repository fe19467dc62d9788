"""Mutants of a module: each is one small fault in one function, of a kind that batching code really has.

A mutant's name says where it is and what it changes, not the line, so it stays the same while other code moves.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from attrs import frozen


@frozen
class Mutant:
    """One fault in one function."""

    module: str
    function: str  #: its qualified name within the module
    operator: str
    change: str  #: the source of the smallest changed part, before and after
    code: CodeType  #: what the function's `__code__` becomes

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}: {self.change}"


class Change(NamedTuple):
    """Another node in place of one, and how to show it."""

    operator: str
    new: ast.AST
    shown: tuple[str, str]


class Place(NamedTuple):
    """Where a node hangs in its parent."""

    parent: ast.AST
    field: str
    index: int | None

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The functions and methods of a module, those inside another one counting as part of it."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, Function))


def mutants(source: str, module: str) -> Iterator[Mutant]:
    """Every mutant of every function of a module."""
    tree = ast.parse(source)
    originals = codes(compile(tree, module, "exec"))
    for function, node in functions(tree):
        seen: Counter[str] = Counter()
        for place, old in list(nodes(node)):
            for change in changes(old, place):
                place.put(ast.fix_missing_locations(ast.copy_location(change.new, old)))
                try:
                    code = codes(compile(tree, module, "exec"))[function]
                except SyntaxError:
                    continue
                finally:
                    place.put(old)
                if code == originals[function]:
                    continue
                shown = " → ".join(change.shown)
                seen[shown] += 1
                number = f" ({seen[shown]})" if seen[shown] > 1 else ""
                yield Mutant(module, function, change.operator, shown + number, code)


def codes(code: CodeType) -> dict[str, CodeType]:
    """The code of each function of a module, by qualified name."""
    found: dict[str, CodeType] = {}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found[const.co_qualname] = const
            found |= codes(const)
    return found


def nodes(function: Function) -> Iterator[tuple[Place, ast.AST]]:
    """The nodes of a function's body, with their places; no docstrings, types or messages of exceptions."""
    stack: list[tuple[Place, ast.AST]] = [
        (Place(function, "body", index), each) for index, each in enumerate(function.body)
    ]
    while stack:
        place, node = stack.pop()
        if is_docstring(node):
            continue
        yield place, node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment", "decorator_list", "exc"):
                continue
            for index, each in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(each, ast.AST):
                    stack.append((Place(node, field, index), each))


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def changes(node: ast.AST, place: Place) -> Iterator[Change]:
    """All that the operators make of one node."""
    for name, operator in OPERATORS.items():
        for new in operator(node, place):
            yield Change(name, new, (text(node), text(new)))


def text(node: ast.AST) -> str:
    """A node as source; the head alone of one that has a body."""
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}:"
    return " ".join(ast.unparse(node).split())


# The operators. Each yields what may stand in a node's place. ---------------------------------------------------------


def off_by_one(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """n + 1 and n - 1 for n; an index is left to `index_shifted`, and 0 to `zero_to_minus_one`."""
    if is_int(node) and not isinstance(place.parent, ast.Subscript | ast.Slice):
        yield ast.Constant(node.value + 1)
        if node.value:
            yield ast.Constant(node.value - 1)


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
UFUNCS = {"less": "less_equal", "less_equal": "less", "greater": "greater_equal", "greater_equal": "greater"}
UFUNCS |= {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "any": "all", "all": "any"}


def comparison(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """`<` for `<=`, `min` for `max`, `any` for `all` and the like."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            ops = [*node.ops[:index], COMPARISONS[type(op)](), *node.ops[index + 1 :]]
            yield ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UFUNCS:
        yield ast.Call(ast.Attribute(node.func.value, UFUNCS[node.func.attr], ast.Load()), node.args, node.keywords)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UFUNCS:
        yield ast.Call(ast.Name(UFUNCS[node.func.id], ast.Load()), node.args, node.keywords)


def mask_dropped(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """One side of a condition alone, or neither branch's condition looked at."""
    match node:
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr(), right):
            yield left
            yield right
        case ast.UnaryOp(ast.Invert() | ast.Not(), operand):
            yield operand
        case ast.BoolOp(op, values):
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.Call(ast.Attribute(attr="where"), [_, yes, no]):
            yield yes
            yield no
        case ast.IfExp(_, yes, no):
            yield yes
            yield no
        case ast.If(_, body, orelse):
            if not ends_in_raise(body):
                yield ast.If(ast.Constant(True), body, orelse)
            yield ast.If(ast.Constant(False), body, orelse)
        case ast.comprehension(target, iterable, [*_, _], is_async):
            yield ast.comprehension(target, iterable, node.ifs[1:], is_async)
        case _:
            pass


def ends_in_raise(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise)


COMMUTATIVE = ("min", "max", "minimum", "maximum", "array_equal", "logical_and", "logical_or")  #: functions
NOT_COMMUTATIVE = ast.Sub | ast.FloorDiv | ast.Div | ast.Mod | ast.LShift | ast.RShift


def swapped(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """Two arguments, two fields or two operands in each other's place."""
    match node:
        case ast.Call(func, args, keywords) if last_name(func) not in COMMUTATIVE:
            for index in range(len(args) - 1):
                pair = args[index : index + 2]
                if not any(isinstance(each, ast.Starred) for each in pair):
                    yield ast.Call(func, exchanged(args, index), keywords)
            for index in range(len(keywords) - 1):
                one, two = keywords[index : index + 2]
                if one.arg and two.arg:
                    pair = [ast.keyword(one.arg, two.value), ast.keyword(two.arg, one.value)]
                    yield ast.Call(func, args, [*keywords[:index], *pair, *keywords[index + 2 :]])
        case ast.Tuple(elts, ast.Load()):
            for index in range(len(elts) - 1):
                yield ast.Tuple(exchanged(elts, index), ast.Load())
        case ast.BinOp(left, op, right) if isinstance(op, NOT_COMMUTATIVE):
            yield ast.BinOp(right, op, left)
        case _:
            pass


def last_name(function: ast.AST) -> str:
    """`minimum` of `np.minimum`."""
    return getattr(function, "attr", getattr(function, "id", ""))


def exchanged(values: list[Any], index: int) -> list[Any]:
    return [*values[:index], values[index + 1], values[index], *values[index + 2 :]]


def term_dropped(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """One operand alone."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield node.left
        if not isinstance(node.op, NOT_COMMUTATIVE):
            yield node.right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def copy_skipped(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """The array itself in place of its copy, its read-only view or its conversion."""
    match node:
        case ast.Call(ast.Attribute(value, "copy" | "astype" | "clone")):
            yield value
        case ast.Call(ast.Name("frozen_array"), [value]):
            yield value
        case _:
            pass


def stale(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """A field, a column, a variable or an object that keeps the value it had."""
    match node:
        case ast.Call(ast.Name("evolve"), args, keywords):
            for index in range(len(keywords)):
                yield ast.Call(node.func, args, [*keywords[:index], *keywords[index + 1 :]])
        case ast.Call(ast.Name("put"), [column, _, _]):
            yield column
        case ast.Assign([target], value) if names(target) & names(value):
            yield ast.Pass()
        case ast.AugAssign() | ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Assign([ast.Subscript()]):
            yield ast.Pass()
        case _:
            pass


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def zero_to_minus_one(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """-1 for 0."""
    if is_int(node) and node.value == 0 and not isinstance(place.parent, ast.Subscript | ast.Slice):
        yield ast.Constant(-1)


def index_shifted(node: ast.AST, _place: Place) -> Iterator[ast.AST]:
    """The item before or behind, and a slice that begins or ends one further on."""
    match node:
        case ast.Subscript(value, ast.Slice(lower, upper, step), context):
            yield ast.Subscript(value, ast.Slice(shifted(lower or ast.Constant(0), 1), upper, step), context)
            if upper:
                yield ast.Subscript(value, ast.Slice(lower, shifted(upper, -1), step), context)
                yield ast.Subscript(value, ast.Slice(lower, shifted(upper, 1), step), context)
            if lower:
                yield ast.Subscript(value, ast.Slice(shifted(lower, -1), upper, step), context)
        case ast.Subscript(value, index, context) if not isinstance(index, ast.Tuple):
            yield ast.Subscript(value, shifted(index, 1), context)
            yield ast.Subscript(value, shifted(index, -1), context)
        case _:
            pass


def shifted(node: ast.AST, by: int) -> ast.AST:
    if is_int(node):
        return ast.Constant(node.value + by)
    return ast.BinOp(node, ast.Add() if by > 0 else ast.Sub(), ast.Constant(1))


def is_int(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


OPERATORS: dict[str, Callable[[Any, Place], Iterator[ast.AST]]] = {
    "off by one": off_by_one,
    "comparison": comparison,
    "mask dropped": mask_dropped,
    "swapped": swapped,
    "term dropped": term_dropped,
    "copy skipped": copy_skipped,
    "stale": stale,
    "-1 for 0": zero_to_minus_one,
    "index shifted": index_shifted,
}
