"""The Jinja environment of chat templates: the sandbox, in which nothing is called, joined or added unless the budget
allows what comes of it. Knows nothing about conversations."""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagemill.tokenizers.template_budget import ITEM, MAX_INTEGER_BITS, TooMuchError, budget
from pagemill.tokenizers.template_limits import FILTERS, METHODS, check_format, is_iterator

_CONTAINERS: Final = (list, tuple, dict)
_MADE_NODES: Final = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Compare, nodes.Getitem)
MAX_INDENT: Final = 16
_DATE: Final = re.compile(r"%[^a-zA-Z%]")
MAX_DATE_CHARS: Final = 200


class _Code(CodeGenerator):
    """The environment's own functions are called as they are, not by `ChatEnvironment.call`."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """Jinja's, but for calls that `_calling` made."""
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")
        for number, argument in enumerate(node.args):
            if number:
                self.write(", ")
            self.visit(argument, frame)
        self.write(")")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Every loop, macro, call, comparison, operator, filter, test, list, dict, slice and joining of texts asks the
    budget of the rendering at hand."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlocks],
            optimized=False,  # constants would be computed while the template is compiled
            finalize=_written,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.tests = {name: _guarded(name, function, is_filter=False) for name, function in self.tests.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["lipsum"] = _lipsum
        # Attributes, which no variable of a template can stand in for.
        self.turn = _turn
        self.made = _made
        self.joined = _joined

    def concat(self, pieces: Iterable[str]) -> str:
        """Pieces of output, as one text: of macros, blocks and what is set to a block."""
        items = pieces if isinstance(pieces, list) else budget().listed(pieces)
        budget().spend(sum(map(len, items)))
        return "".join(items)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Jinja's, of a result that is allowed."""
        limits = budget()
        if operator == "+" and type(left) is str and type(right) is str:
            limits.spend(len(left) + len(right))
            return left + right
        limits.turn()
        total = None
        if operator == "%" and isinstance(left, (str, bytes)):
            check_format(limits, left, right if isinstance(right, tuple) else (right,), {})
        elif operator == "+" and isinstance(left, (str, bytes, *_CONTAINERS)):
            total = limits.size(left) + limits.size(right)
            limits.spend(total if isinstance(left, (str, bytes)) else ITEM * (len(left) + _length(right)))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            value, count = (right, left) if isinstance(left, int) else (left, right)
            limits.spend(limits.size(value) * count if isinstance(count, int) else ITEM)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        if total is not None:
            limits.check(total)
        return limits.made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Jinja's, of a result that is allowed."""
        limits = budget()
        limits.turn()
        args = tuple(limits.listed(value) if is_iterator(value) else value for value in args)
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            limit = METHODS.get(getattr(method, "__name__", ""))
            if limit is not None:
                limits.look_at_clock()
                limit(limits, owner, args, kwargs)
        return limits.made(super().call(context, function, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
        ]
        for loop in [*loops, *tree.find_all(nodes.CallBlock)]:
            loop.body.insert(0, nodes.ExprStmt(_calling("turn", []), lineno=loop.lineno))
        _with_guards(tree)
        tree.set_environment(self)
        return tree


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def environment() -> ChatEnvironment:
    """The one that all templates share."""
    return ChatEnvironment()


def _calling(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _with_guards(node: nodes.Node) -> None:
    """What joins texts, or makes a value without a call, becomes a call."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _guard(value))
        elif isinstance(value, list):
            value[:] = [_guard(item) if isinstance(item, nodes.Node) else item for item in value]


def _guard(node: nodes.Node) -> nodes.Node:
    _with_guards(node)
    if isinstance(node, nodes.Concat):
        return _calling("joined", list(node.nodes))
    makes = isinstance(node, _MADE_NODES) and getattr(node, "ctx", "load") == "load"
    if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
        makes = False
    if isinstance(node, nodes.Compare) and _is_quick(node):
        makes = False
    return _calling("made", [node]) if makes and isinstance(node, nodes.Expr) else node


def _is_quick(node: nodes.Compare) -> bool:
    """Whether one value is compared with one constant, which takes no longer than that is long."""
    (operand,) = node.ops[:1]
    constant = isinstance(node.expr, nodes.Const) or isinstance(operand.expr, nodes.Const)
    return constant and len(node.ops) == 1 and operand.op not in ("in", "notin")


def _guarded(name: str, function: Any, *, is_filter: bool = True) -> Callable[..., Any]:
    """A filter or test that asks before it works. What comes one by one comes as a list."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    limit = FILTERS.get(name) if is_filter else None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        limits = budget()
        limits.turn()
        if len(args) > first and is_iterator(args[first]):
            args = (*args[:first], limits.listed(args[first]), *args[first + 1 :])
        if limit is not None and len(args) > first:
            limits.look_at_clock()
            limit(limits, args[first], args[first + 1 :], kwargs)
        return limits.made(function(*args, **kwargs))

    return run


@jinja2.pass_context
def _written(context: Any, value: Any) -> Any:
    """What is going to be written as text."""
    if type(value) is not str and not isinstance(value, str):
        budget().spend(4 * budget().size(value))
    return value


def _turn() -> None:
    budget().turn()


def _made(value: Any) -> Any:
    return budget().made(value)


def _joined(*values: Any) -> str:
    """The operator `~`."""
    limits = budget()
    limits.spend(sum(len(value) if isinstance(value, str) else 4 * limits.size(value) for value in values))
    return "".join(map(str, values))


def _check_bits(count: int) -> None:
    if count > MAX_INTEGER_BITS:
        raise TooMuchError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, _CONTAINERS) else 1


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_CHARS or _DATE.search(form):
        raise TooMuchError(f"it formats a date by more than {MAX_DATE_CHARS} characters, or to a width")
    return datetime.datetime.now().strftime(form)


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    raise TooMuchError("it asks for text at random")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    limits = budget()
    limits.spend(limits.size(value))
    spaces = len(indent) if isinstance(indent, str) else indent or 0
    if max(spaces, *map(len, separators or ("",))) > MAX_INDENT:
        raise TooMuchError(f"it indents by more than {MAX_INDENT}, or separates by as much")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    pieces = []
    total = 0
    for piece in encoder.iterencode(value):
        total += len(piece)
        limits.check(total)
        limits.turn()
        pieces.append(piece)
    return "".join(pieces)
