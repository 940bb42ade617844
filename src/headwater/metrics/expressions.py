"""Assertions on metrics, such as `max(data["train/token_mult_prob_error"]) < 1.05`.

An expression is parsed into Python's syntax tree and then built, node by node, from the few forms listed here;
it is never evaluated as Python. Every form is either a number, a series or a truth value, and is built as such, so
that a text compared with a number or a truth value that is added is refused before any metric is looked at.

All parts of an expression are computed, whatever `and` and `or` would skip: no part hides a missing tag or a NaN.
"""

from __future__ import annotations

import ast
import math
import operator
import statistics
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from headwater.errors import UserError
from headwater.metrics.numbers import from_json

Data = Mapping[str, Mapping[str, float]]
_Number = Callable[[Data], float]
_Series = Callable[[Data], list[float]]

MAX_LENGTH = 10_000
"""Longest expression, in characters."""
MAX_DEPTH = 100
"""Deepest nesting of an expression; also the most terms that a sum can have."""

_SERIES_FUNCTIONS: dict[str, Callable[[list[float]], float]] = {
    "len": len,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
_FUNCTIONS = sorted([*_SERIES_FUNCTIONS, "ratio_above"])
_COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[float, float], bool]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
# No power: of all arithmetic it alone makes a huge number from a short text.
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CheckResult(NamedTuple):
    """The verdict on one expression."""

    holds: bool
    reason: str
    """The numbers that were compared, or why there are none."""


class _NoValue(Exception):
    """A well-formed expression has no value in this data."""


class _Verdict(NamedTuple):
    holds: bool
    text: str


_Truth = Callable[[Data], _Verdict]


def check(expression: str, data: Data) -> CheckResult:
    """Whether `expression` holds for `data` (tag to step, as text, to value).

    Known are comparisons (chained too), and/or/not, + - * / // %, `min max mean median len` of `data["tag"]`,
    `ratio_above(data["tag"], x)` (the share of points strictly above x), and one step of a tag, `data["tag"]["3"]`.
    A missing tag or step, an empty series, and NaN or infinity in a value that is used or in a result do not hold,
    negated or not. Raises UserError, naming the part, if the expression is malformed or uses anything else.
    """
    truth = _Builder(expression).build()
    try:
        verdict = truth(data)
    except _NoValue as error:
        return CheckResult(False, str(error))
    return CheckResult(verdict.holds, verdict.text)


class _Builder:
    """Builds a function of the data from an expression, or refuses it."""

    def __init__(self, expression: str) -> None:
        self.source = expression.strip()

    def build(self) -> _Truth:
        if not self.source:
            raise UserError("the expression is empty")
        if len(self.source) > MAX_LENGTH:
            raise UserError(f"the expression is longer than {MAX_LENGTH} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                body = ast.parse(self.source, mode="eval").body
        except SyntaxError as error:
            near = (error.text or self.source)[max((error.offset or 1) - 1, 0) :].strip()
            near = f" near {_short(near)!r}" if near else ""
            raise UserError(f"the expression is malformed{near}: {error.msg}") from None
        except ValueError as error:
            raise UserError(f"the expression is malformed: {error}") from None
        except (RecursionError, MemoryError):
            raise UserError("the expression is nested too deeply") from None
        self._limit_depth(body)
        return self.truth(body)

    def truth(self, node: ast.expr) -> _Truth:
        match node:
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp(op=op, values=values):
                return _all_of(values, isinstance(op, ast.And), [self.truth(value) for value in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand)

                def negated(data: Data) -> _Verdict:
                    verdict = inner(data)
                    return _Verdict(not verdict.holds, f"not ({verdict.text})")

                return negated
        self.number(node)
        raise UserError(f"{self._part(node)} is a number: compare it, such as {self._segment(node)} < 1")

    def number(self, node: ast.expr) -> _Number:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.number(operand)
                return lambda data: -inner(data)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.number(operand)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                tag, step = self._reference(node)
                if step is None:
                    text = _quote(tag)
                    raise UserError(f'{text} is a series: take max({text}) or one step of it, such as {text}["1"]')
                return lambda data: _values(data, tag, step)[0]
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                raise UserError(f"{self._part(node)} is a comparison, where a number is needed")
            case ast.Name(id="data"):
                raise UserError('data needs a tag, such as data["train/loss"]')
        raise UserError(f"{self._part(node)} is not allowed")

    def series(self, node: ast.expr) -> _Series:
        if not isinstance(node, ast.Subscript):
            raise UserError(f'{self._part(node)} is not data["tag"]')
        tag, step = self._reference(node)
        return lambda data: _values(data, tag, step)

    def _compare(self, node: ast.Compare) -> _Truth:
        operators = []
        for op in node.ops:
            if type(op) not in _COMPARISONS:
                raise UserError(f"{self._part(node)} is not allowed: compare with < <= > >= == !=")
            operators.append(_COMPARISONS[type(op)])
        operands = [self.number(operand) for operand in (node.left, *node.comparators)]

        def compared(data: Data) -> _Verdict:
            values = [operand(data) for operand in operands]
            texts = _texts(values)
            holds = all(compare(a, b) for (_, compare), a, b in zip(operators, values[:-1], values[1:], strict=True))
            tail = "".join(f" {symbol} {text}" for (symbol, _), text in zip(operators, texts[1:], strict=True))
            return _Verdict(holds, texts[0] + tail)

        return compared

    def _constant(self, node: ast.Constant) -> _Number:
        if type(node.value) not in (int, float):
            raise UserError(f"{self._part(node)} is not a number")
        try:
            value = float(node.value)  # pyright: ignore[reportArgumentType]
        except OverflowError:
            value = math.inf
        if math.isinf(value):
            raise UserError(f"{self._part(node)} is too large")
        return lambda data: value

    def _arithmetic(self, node: ast.BinOp) -> _Number:
        compute = _ARITHMETIC.get(type(node.op))
        if compute is None:
            raise UserError(f"{self._part(node)} is not allowed: compute with + - * / // %")
        left, right, part = self.number(node.left), self.number(node.right), self._part(node)
        return lambda data: _finite(part, compute, left(data), right(data))

    def _call(self, node: ast.Call) -> _Number:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in _FUNCTIONS:
            raise UserError(f"{self._part(node.func)} is not allowed: call one of {' '.join(_FUNCTIONS)}")
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise UserError(f"{self._part(node)} has named or starred arguments, which {name} does not take")
        if len(node.args) != (2 if name == "ratio_above" else 1):
            form = 'ratio_above(data["tag"], x)' if name == "ratio_above" else f'{name}(data["tag"])'
            raise UserError(f"{self._part(node)} takes other arguments: write {form}")
        series, part = self.series(node.args[0]), self._part(node)
        if name == "ratio_above":
            bound = self.number(node.args[1])
            return lambda data: _ratio_above(series(data), bound(data))
        compute = _SERIES_FUNCTIONS[name]
        return lambda data: _finite(part, compute, series(data))

    def _reference(self, node: ast.Subscript) -> tuple[str, str | None]:
        """Tag and step of data["tag"]["3"]; the step of data["tag"] is None."""
        match node:
            case ast.Subscript(value=ast.Name(id="data"), slice=ast.Constant(value=str(tag))):
                return tag, None
            case ast.Subscript(
                value=ast.Subscript(value=ast.Name(id="data"), slice=ast.Constant(value=str(tag))),
                slice=ast.Constant(value=str(step)),
            ):
                return tag, step
        raise UserError(f'{self._part(node)} is not allowed: write data["tag"], or data["tag"]["3"] for its step 3')

    def _limit_depth(self, body: ast.expr) -> None:
        level: list[ast.AST] = [body]
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
            if not level:
                return
        raise UserError(f"the expression is nested more than {MAX_DEPTH} levels deep")

    def _segment(self, node: ast.AST) -> str:
        return _short(ast.get_source_segment(self.source, node) or type(node).__name__)

    def _part(self, node: ast.AST) -> str:
        return f"'{self._segment(node)}'"


def _all_of(nodes: list[ast.expr], conjunction: bool, parts: list[_Truth]) -> _Truth:
    """`and`, or `or`, of parts that are all computed first."""

    def joined(data: Data) -> _Verdict:
        verdicts = [part(data) for part in parts]
        texts = [
            f"({verdict.text})" if isinstance(node, ast.BoolOp) else verdict.text
            for node, verdict in zip(nodes, verdicts, strict=True)
        ]
        holds = all if conjunction else any
        return _Verdict(holds([v.holds for v in verdicts]), (" and " if conjunction else " or ").join(texts))

    return joined


def _values(data: Data, tag: str, step: str | None) -> list[float]:
    """The values of a series, or the one of a step, each of them finite."""
    if tag not in data:
        near = get_close_matches(tag, data, n=1)
        hint = f"; the nearest is {_quote(near[0])}" if near else ""
        raise _NoValue(f"no tag {_quote(tag)}{hint}" if data else f"no tag {_quote(tag)}: there are no metrics at all")
    points = data[tag]
    if not points:
        raise _NoValue(f"{_quote(tag)} is empty")
    if step is not None and step not in points:
        steps = list(points)
        raise _NoValue(f"{_quote(tag)} has no step {step}; it has {len(steps)}, from {steps[0]} to {steps[-1]}")
    chosen = points if step is None else {step: points[step]}
    values = []
    for at, raw in chosen.items():
        try:
            value = from_json(raw)
        except ValueError as error:
            raise _NoValue(f"{_quote(tag)} at step {at}: {error}") from None
        if not math.isfinite(value):
            raise _NoValue(f"{_quote(tag)} is {_name(value)} at step {at}")
        values.append(value)
    return values


def _finite(part: str, compute: Callable[..., float], *args: object) -> float:
    """The result of a computation, which must be a finite number too."""
    try:
        value = float(compute(*args))
    except ZeroDivisionError:
        raise _NoValue(f"{part} divides by zero") from None
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise _NoValue(f"{part} is {_name(value)}")
    return value


def _ratio_above(values: list[float], bound: float) -> float:
    return sum(value > bound for value in values) / len(values)


def _texts(values: list[float]) -> list[str]:
    """Short numbers, unless rounding would make different ones look the same."""
    short = [f"{value:.6g}" for value in values]
    return short if len(set(short)) == len(set(values)) else [repr(value) for value in values]


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"


def _quote(tag: str) -> str:
    return f'data["{_short(tag, 120)}"]'


def _short(text: str, most: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
