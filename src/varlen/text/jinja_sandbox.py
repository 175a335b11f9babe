"""Run chat templates of Hugging Face tokenizers, which are untrusted programs, in a sandbox.

A template can only produce text: it sees the messages as plain data, and can't reach attributes that begin with an
underscore, files or other templates. `jinja_limits` bounds its values, and stops it if it computes for long or takes
much memory. Its errors become a SourceError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from types import BuiltinMethodType, MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace, pass_environment

from varlen.errors import SettingError, SourceError, described
from varlen.text import jinja_limits
from varlen.text.jinja_limits import (
    METHODS,
    MOST_UNASKED,
    StoppedError,
    TooLongError,
    check_number,
    check_text,
    current,
    plain_sum,
    watched,
)

# Compile templates as Jinja does, with checks where a value can be larger than its operands.


class Compiler(CodeGenerator):
    """Jinja's compiler, with size checks for sums, lists and mappings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._written: set[int] = set()  # expressions that are output immediately, and checked there

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802, it is jinja's
        """Record expressions that are output and not stored."""
        for child in node.nodes:
            self._note(child)
        super().visit_Output(node, frame)

    def _note(self, node: nodes.Node | None) -> None:
        if isinstance(node, nodes.CondExpr):
            self._note(node.expr1)
            self._note(node.expr2)
        elif isinstance(node, nodes.Add | nodes.Concat):
            self._written.add(id(node))

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Generate a sum, with a check unless few operands are output immediately."""
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        terms.append(left)
        terms.reverse()
        groups, open_terms = 0, 0
        for term in terms:
            open_terms += not isinstance(term, nodes.Const | nodes.TemplateData)
            if open_terms > MOST_UNASKED:
                groups, open_terms = groups + 1, 1
        is_asked = (open_terms > 1 or groups > 0) and not (id(node) in self._written and groups == 0)
        if is_asked:
            self._written.update(id(term) for term in terms if isinstance(term, nodes.List))
        self.write("environment.within(" * (groups + is_asked) + "(" * len(terms))
        open_terms = 0
        for number, term in enumerate(terms):
            open_terms += not isinstance(term, nodes.Const | nodes.TemplateData)
            if open_terms > MOST_UNASKED:
                open_terms = 1
                self.write(")")
            if number:
                self.write(" + ")
            self.visit(term, frame)
            self.write(")")
        self.write(")" * is_asked)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Generate a concatenation; of few values by `+`, which is faster than Jinja's way."""
        if not frame.eval_ctx.volatile and not frame.eval_ctx.autoescape and len(node.nodes) <= MOST_UNASKED:
            is_asked = id(node) not in self._written
            self.write("(environment.within(" * is_asked + "(" * (not is_asked))
            for number, part in enumerate(node.nodes):
                self.write(" + " if number else "")
                self.write("str(")
                self.visit(part, frame)
                self.write(")")
            self.write("))" if is_asked else ")")
            return
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        else:
            join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(f"), {join})")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """Generate a list."""
        self._made(node, frame, node.items, super().visit_List)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Generate a tuple, or an assignment target."""
        self._made(node, frame, node.items if node.ctx == "load" else [], super().visit_Tuple)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Generate a mapping."""
        self._made(
            node, frame, [expr for pair in node.items for expr in (pair.key, pair.value)], super().visit_Dict
        )

    def _made(self, node: nodes.Expr, frame: Frame, items: list[nodes.Expr], visit: Any) -> None:
        is_asked = id(node) not in self._written and any(not isinstance(item, nodes.Const) for item in items)
        self.write("environment.made(" if is_asked else "")
        visit(node, frame)
        self.write(")" if is_asked else "")


_LONGEST_TEXT = 2**26  # characters of output: beyond any context length, but bounded
_LONGEST_SOURCE = 2**20  # characters of a template

_OWN = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to every call, for its own functions
_BEGIN, _END = "varlen_generation_begins", "varlen_generation_ends"  # output around generation blocks
_DICT_ATTRIBUTES = frozenset(dir(dict))
_KINDS = (str, list, dict, LoopContext)  # attributes are accessible for all objects, or none


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A compiled template: messages in, text out."""

    template: Template
    source: str
    variables: Mapping[str, Any]  # besides the chat: Jinja's globals and the special tokens
    has_generation: bool
    # Whether all {% generation %} blocks are output directly, none is stored in a variable or filtered.
    has_bare_generation: bool = False
    takes_parts: bool = False  # contents must be lists of parts, as some vision models require

    def run(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        prompts: bool = False,
        marks: str = "",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render messages."""
        seen = {
            **self.variables,
            **variables,
            "messages": [_in_parts(message) for message in messages] if self.takes_parts else messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompts,
            _BEGIN: marks[:1],
            _END: marks[1:],
        }
        try:
            return watched(self.source, self._text, seen)
        except StoppedError as error:
            raise SourceError(
                f"the chat template was stopped on this chat: {described(error, whole=True)}"
            ) from None
        except _RefusalError as error:
            raise SourceError(
                f"the chat template refuses this chat: {described(error, whole=True)}"
            ) from error
        except SecurityError as error:
            raise SourceError(
                f"the chat template was stopped, since a template may not do this: {described(error, whole=True)}"
            ) from error
        except Exception as error:  # a template's own mistakes come as any error there is
            words = described(error, kind=not isinstance(error, TemplateError), whole=True)
            raise SourceError(f"the chat template fails on this chat: {words}") from error

    def _text(self, seen: dict[str, Any]) -> str:
        template, pieces, length = self.template, [], 0
        # `Template.new_context` would copy the globals, which is slow compared with a short chat.
        context = Context(template.environment, seen, template.name, template.blocks)
        for piece in template.root_render_func(context):
            pieces.append(piece)
            length += len(piece)
            if length > _LONGEST_TEXT:
                raise TooLongError(f"it writes more than {_LONGEST_TEXT:,} characters")
        return "".join(pieces)


def compile_template(source: str, variables: Mapping[str, str]) -> Program:
    """Compile a template."""
    if len(source) > _LONGEST_SOURCE:
        raise SettingError(
            f"the chat template has {len(source):,} characters; {_LONGEST_SOURCE:,} at most; choose another template"
        )
    environment = _Sandbox()
    try:
        template = watched(source, environment.compiled, source)
    except StoppedError as error:
        raise SettingError(f"the chat template does not compile: {described(error, whole=True)}") from None
    except TemplateSyntaxError as error:
        raise SettingError(
            f"the chat template does not compile: line {error.lineno}: {error.message}; "
            "take it as it stands in the tokenizer's chat_template"
        ) from error
    except Exception as error:  # nested too deep, a loop that is left from within a block, and the like
        raise SettingError(f"the chat template does not compile: {described(error, kind=True)}") from error
    program = Program(
        template=template,
        source=source,
        variables={**template.globals, **variables},
        has_generation=environment.has_generation,
        has_bare_generation=environment.has_generation and _are_bare(environment.parse(source)),
    )
    in_parts = replace(program, takes_parts=True)
    return in_parts if not _writes(program) and _writes(in_parts) else program


def _are_bare(node: nodes.Node) -> bool:
    """Whether generation blocks stand only in loops and conditions, which output their content unchanged."""
    for child in node.iter_child_nodes():
        is_plain = isinstance(child, (nodes.For, nodes.If, nodes.Output, nodes.Scope))
        if _is_generation(child):
            continue
        if not is_plain and any(_is_generation(inner) for inner in child.find_all(nodes.Scope)):
            return False
        if is_plain and not _are_bare(child):
            return False
    return True


def _is_generation(node: nodes.Node) -> bool:
    first = node.body[0] if isinstance(node, nodes.Scope) else None
    written = first.nodes[0] if isinstance(first, nodes.Output) else None
    return isinstance(written, nodes.Name) and written.name == _BEGIN


def _writes(program: Program) -> bool:
    """Whether a template outputs the user's content."""
    try:
        return "\U000f0000" in program.run([{"role": "user", "content": "\U000f0000"}], None)
    except SourceError:
        return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


class _RefusalError(TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the text that the assistant generates."""

    tags = {"generation"}  # noqa: RUF012, it is jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn a block into its body between two marks, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if any(map(_leaves_loop, body)):
            parser.fail("a {% generation %} block may not leave the loop around it", line)
        self.environment.has_generation = True  # type: ignore[attr-defined]
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _leaves_loop(node: nodes.Node) -> bool:
    """Whether a `break` or `continue` leaves an enclosing loop."""
    if isinstance(node, (nodes.Break, nodes.Continue)):
        return True
    inner = node.else_ if isinstance(node, nodes.For) else node.iter_child_nodes()
    return any(map(_leaves_loop, inner))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that tokenizers' templates expect, more restricted than Jinja's sandbox."""

    intercepted_binops = frozenset(("*", "**", "%"))
    code_generator_class = Compiler
    # Called by compiled templates.
    within, made, joined = (
        staticmethod(jinja_limits.within),
        staticmethod(jinja_limits.made),
        staticmethod(jinja_limits.joined),
    )

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
        self.has_generation = False
        self._known: set[tuple[type, str]] = set()
        filters = self.filters | {"tojson": to_json, "sum": sum_up}
        self.filters = {name: jinja_limits.bounded(name, function) for name, function in filters.items()}
        self.concat = concat  # type: ignore[method-assign]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
            "dict": make_dict,
            "namespace": _Notes,
            "cycler": make_cycler,
        }
        del self.globals["lipsum"]

    def compiled(self, source: str) -> Template:
        """Compile a template; calls of filters with constants are left to its runs."""
        if (run := current()) is not None:
            run.is_compiling = True
        return self.from_string(source)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a template's `obj.attribute`; with a fast path for keys of dicts."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in self._known:
            return getattr(obj, attribute)
        if kind is _Notes and attribute[:1] != "_":  # the way below gives the same, slower
            held = _held(obj, _HELD)
            return held[attribute] if attribute in held else self.undefined(obj=obj, name=attribute)
        value = super().getattr(obj, attribute)
        if kind in _KINDS and hasattr(kind, attribute) and not attribute.startswith(("_", "format")):
            self._known.add((kind, attribute))  # accessible for any object of the type
        return value

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise, where Jinja would output nothing."""
        raise SecurityError(f"reach for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate a product, power or `%` unless its result would be very large."""
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, bytes, list, tuple)) and isinstance(times, int):
                    check_number(len(text) * times)
                    return jinja_limits.repeated(
                        super().call_binop(context, operator, left, right), text, times
                    )
            check_number(_bits(left) + _bits(right))
        elif operator == "**":
            check_number(_bits(left) * (right if isinstance(right, int) else 1))
        elif isinstance(left, (str, bytes)):
            jinja_limits.check_percent(left if isinstance(left, str) else left.decode("latin-1"), right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or method, with checked arguments."""
        # A number in the data, such as a time, isn't a size when passed to a macro or stored.
        if type(__obj) is Macro:
            for own in _OWN:
                kwargs.pop(own, None)
            if __obj.catch_varargs or __obj.catch_kwargs:
                jinja_limits.made((*args, *kwargs.values()))
            return __obj(__context.eval_ctx, *args, **kwargs)
        if type(__obj) is BuiltinMethodType:
            check, kind = METHODS.get(__obj.__name__), type(__obj.__self__)
            if kind in _KINDS:
                for own in _OWN:
                    kwargs.pop(own, None)
                if check is None:
                    return __obj(*args, **kwargs)  # a method that `getattr` allowed
                args = jinja_limits.check_call(check, __obj.__self__, args, kwargs)
                return jinja_limits.within(__obj(*args, **kwargs))
        elif __obj is _Notes or __obj is make_dict:
            for own in _OWN:
                kwargs.pop(own, None)
            return __obj(*args, **kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, type)) and (check := METHODS.get(__obj.__name__)) is not None:
            given = {name: value for name, value in kwargs.items() if name not in _OWN}
            args = jinja_limits.check_call(check, owner, args, given)
        if not isinstance(owner, dict):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    check_number(value)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap `str.format` with a check of its widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def asked(*args: Any, **kwargs: Any) -> str:
            values = [*args, *kwargs.values()]
            given = values[0].values() if len(values) == 1 and isinstance(values[0], Mapping) else ()
            jinja_limits.check_braces(value.__self__, [*values, *given])
            return wrapped(*args, **kwargs)

        return asked


class _Notes(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # "self" may be a name in it
        Namespace.__init__(*args, **kwargs)
        for name in _held(args[0], _HELD):
            if str(name)[:1] == "_":
                raise _hidden(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name[:1] == "_":
            raise _hidden(name)
        _held(self, _HELD)[name] = value

    def __repr__(self) -> str:
        """Return the representation, which may contain another namespace twice."""
        return str(jinja_limits.within(super().__repr__()))


# Reads a namespace without its own `__getattribute__`, which runs in Python for every name.
_held, _HELD = object.__getattribute__, "_Namespace__attrs"


def _hidden(name: str) -> SecurityError:
    return SecurityError(f"keep something under the name {name!r} in a namespace")


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(message))


# Functions for templates besides Jinja's, and Jinja's own reimplemented with limits.

_MOST_CHUNKS = 2**12
_LONGEST_FORM = 1000


def concat(pieces: Iterable[str]) -> str:
    """Join the output of a macro or block."""
    pieces = pieces if isinstance(pieces, list) else list(pieces)
    if (length := sum(map(len, pieces))) > jinja_limits.LARGE:
        check_text(length, "a macro or block")
    return "".join(pieces)


@pass_environment
def sum_up(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Sum up, as Jinja does."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    return plain_sum(iterable, start)


def make_cycler(*items: Any) -> Cycler:
    """Return a cycler over some items."""
    return Cycler(*jinja_limits.made(items))


def strftime_now(form: str) -> str:
    """Return the formatted local time."""
    if len(form) > _LONGEST_FORM:
        raise TooLongError(f"the form of a time has {len(form):,} characters; {_LONGEST_FORM:,} at most")
    return datetime.now().strftime(form)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stand in for `dict` without exposing the class, whose methods a template could reach."""
    made: dict[Any, Any] = jinja_limits.made(dict(*args, **kwargs))
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models read it: without HTML escapes, with non-ASCII characters as they are."""
    for option in (indent, *(separators or ())):
        if (len(option) if isinstance(option, str) else option or 0) > _LONGEST_FORM:
            raise TooLongError(
                f"'tojson' asks for an indent or separator of more than {_LONGEST_FORM:,} characters"
            )
    if isinstance(value, str) and len(value) > jinja_limits.LARGEST:
        raise TooLongError(
            f"'tojson' is asked to write {len(value):,} characters; {jinja_limits.LARGEST:,} at most"
        )
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    chunks, pieces, length = encoder.iterencode(value), [], 0
    while some := "".join(islice(chunks, _MOST_CHUNKS)):
        pieces.append(some)
        length += len(some)
        check_text(length, "'tojson'")
    return "".join(pieces)
