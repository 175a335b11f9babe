"""Run the chat templates of Hugging Face's tokenizers, which are programs of strangers, in a sandbox.

A template comes with a model, so it is held to text: it sees the messages as plain data, reaches no attribute
that begins with an underscore, no file and no other template. Its values can't grow beyond `limits`, and `watch`
stops it where it computes for long or takes much memory all the same. What it does wrong becomes a sentence.
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

from varlen.errors import SettingError, SourceError
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

# Compile templates as jinja does, and ask `limits` where a value can be larger than what it is made of.


class Compiler(CodeGenerator):
    """jinja's compiler; sums, lists and mappings ask how large they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._written: set[int] = set()
        """Expressions that are written at once, and asked there."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802, it is jinja's
        """Note what is written and not kept."""
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
        """Write a sum, with a question unless little is added up and written at once."""
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
        """Write values that become one text; few of them by a sum, which is faster than jinja's way."""
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
        """Write a list."""
        self._made(node, frame, node.items, super().visit_List)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Write a tuple, or what it is assigned to."""
        self._made(node, frame, node.items if node.ctx == "load" else [], super().visit_Tuple)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a mapping."""
        self._made(
            node, frame, [one for pair in node.items for one in (pair.key, pair.value)], super().visit_Dict
        )

    def _made(self, node: nodes.Expr, frame: Frame, items: list[nodes.Expr], visit: Any) -> None:
        is_asked = id(node) not in self._written and any(not isinstance(item, nodes.Const) for item in items)
        self.write("environment.made(" if is_asked else "")
        visit(node, frame)
        self.write(")" if is_asked else "")


_LONGEST_TEXT = 2**26
"""Characters that a template may write in all: beyond any context, below what breaks a machine."""
_LONGEST_SOURCE = 2**20
"""Characters of a template itself."""

_OWN = ("_loop_vars", "_block_vars")
"""Arguments that jinja adds to every call, for its own functions."""
_BEGIN, _END = "varlen_generation_begins", "varlen_generation_ends"
"""Variables that are written before and after each generation block."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_KINDS = (str, list, dict, LoopContext)
"""Types whose attributes may be reached for every object, or for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A compiled template: messages in, text out."""

    template: Template
    source: str
    variables: Mapping[str, Any]
    """What it sees beside the chat: jinja's globals and the special tokens."""
    has_generation: bool
    has_bare_generation: bool = False
    """All its {% generation %} blocks are written as they stand, and none is kept in a variable or filtered."""
    takes_parts: bool = False
    """Contents are given as lists of parts, which templates of models that see pictures may insist on."""

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
            raise SourceError(f"the chat template was stopped on this chat: {_line(error)}") from None
        except _RefusalError as error:
            raise SourceError(f"the chat template refuses this chat: {_line(error)}") from error
        except SecurityError as error:
            raise SourceError(
                f"the chat template was stopped, since a template may not do this: {_line(error)}"
            ) from error
        except Exception as error:  # a template's own mistakes come as any error there is
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise SourceError(f"the chat template fails on this chat: {kind}{_line(error)}") from error

    def _text(self, seen: dict[str, Any]) -> str:
        template, pieces, length = self.template, [], 0
        # `Template.new_context` would merge the globals anew, which takes long beside a short chat.
        context = Context(template.environment, seen, template.name, template.blocks)
        for piece in template.root_render_func(context):
            pieces.append(piece)
            length += len(piece)
            if length > _LONGEST_TEXT:
                raise TooLongError(f"it writes more than {_LONGEST_TEXT:,} characters")
        return "".join(pieces)


def compile_template(source: str, variables: Mapping[str, str]) -> Program:
    """Compile a template, to be run often."""
    if len(source) > _LONGEST_SOURCE:
        raise SettingError(f"the chat template has {len(source):,} characters; {_LONGEST_SOURCE:,} at most")
    environment = _Sandbox()
    try:
        template = watched(source, environment.compiled, source)
    except StoppedError as error:
        raise SettingError(f"the chat template does not compile: {_line(error)}") from None
    except TemplateSyntaxError as error:
        raise SettingError(
            f"the chat template does not compile: line {error.lineno}: {_line(error).rstrip('.')}; "
            "take it as it stands in the tokenizer's chat_template"
        ) from error
    except Exception as error:  # nested too deep, a loop that is left from within a block, and the like
        raise SettingError(
            f"the chat template does not compile: {type(error).__name__}: {_line(error)}"
        ) from error
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
    """Whether generation blocks stand in loops and conditions alone, which write what they hold as it is."""
    for child in node.iter_child_nodes():
        is_plain = isinstance(child, (nodes.For, nodes.If, nodes.Output, nodes.Scope))
        if _is_generation(child):
            continue
        if not is_plain and any(_is_generation(found) for found in child.find_all(nodes.Scope)):
            return False
        if is_plain and not _are_bare(child):
            return False
    return True


def _is_generation(node: nodes.Node) -> bool:
    first = node.body[0] if isinstance(node, nodes.Scope) else None
    written = first.nodes[0] if isinstance(first, nodes.Output) else None
    return isinstance(written, nodes.Name) and written.name == _BEGIN


def _writes(program: Program) -> bool:
    """Return whether a template writes what a user says."""
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


def _line(error: BaseException) -> str:
    """Return an error's words as one line of bounded length."""
    words = " ".join(str(error.args[0] if error.args else "").split()) or type(error).__name__
    return words if len(words) <= 300 else words[:300] + "…"


class _RefusalError(TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which says what of the text the assistant writes."""

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
    """Whether a `break` or `continue` within leaves a loop that stands around it."""
    if isinstance(node, (nodes.Break, nodes.Continue)):
        return True
    inner = node.else_ if isinstance(node, nodes.For) else node.iter_child_nodes()
    return any(map(_leaves_loop, inner))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates of tokenizers expect, within narrower limits than jinja's sandbox."""

    intercepted_binops = frozenset(("*", "**", "%"))
    code_generator_class = Compiler
    within, made, joined = (
        staticmethod(jinja_limits.within),
        staticmethod(jinja_limits.made),
        staticmethod(jinja_limits.joined),
    )
    """What compiled templates ask."""

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
        """Compile a template, and leave what its filters make of constants to its runs."""
        if (run := current()) is not None:
            run.is_compiling = True
        return self.from_string(source)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what a template calls `obj.attribute`; of a dict at once where that is no method of it."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in self._known:
            return getattr(obj, attribute)
        if kind is _Notes and attribute[:1] != "_":  # what it holds was reached by the template before
            held = _held(obj, _HELD)
            return held[attribute] if attribute in held else self.undefined(obj=obj, name=attribute)
        value = super().getattr(obj, attribute)
        if kind in _KINDS and hasattr(kind, attribute) and not attribute.startswith(("_", "format")):
            self._known.add((kind, attribute))  # it may be reached, whatever the object
        return value

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once, where jinja would print nothing."""
        raise SecurityError(f"reach for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Work out a product, power or filled-in text unless it would be very long."""
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
        """Call a function or method with what can't make it write very much."""
        # What a row says, such as a time, is no size for a macro, and for what keeps it.
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
                    return __obj(*args, **kwargs)  # a method that `getattr` let pass
                args = jinja_limits.asked(check, __obj.__self__, args, kwargs)
                return jinja_limits.within(__obj(*args, **kwargs))
        elif __obj is _Notes or __obj is make_dict:
            for own in _OWN:
                kwargs.pop(own, None)
            return __obj(*args, **kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, type)) and (check := METHODS.get(__obj.__name__)) is not None:
            given = {name: value for name, value in kwargs.items() if name not in _OWN}
            args = jinja_limits.asked(check, owner, args, given)
        if not isinstance(owner, dict):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    check_number(value)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Take `str.format` with widths that aren't very large."""
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
    """jinja's namespace, whose names may not begin with an underscore."""

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
        """Write what it holds, which may be another one, twice."""
        return str(jinja_limits.within(super().__repr__()))


_held, _HELD = object.__getattribute__, "_Namespace__attrs"
"""What a namespace holds, past its own `__getattribute__`, which runs in Python for every name."""


def _hidden(name: str) -> SecurityError:
    return SecurityError(f"keep something under the name {name!r} in a namespace")


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(message))


# What chat templates may call beside jinja's own, and what of jinja's own is written anew, within `limits`.

_MOST_CHUNKS = 2**12
_LONGEST_FORM = 1000


def concat(pieces: Iterable[str]) -> str:
    """Return what a macro or block has written."""
    pieces = pieces if isinstance(pieces, list) else list(pieces)
    if (length := sum(map(len, pieces))) > jinja_limits.LARGE:
        check_text(length, "a macro or block")
    return "".join(pieces)


@pass_environment
def sum_up(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Sum up, as jinja does."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    return plain_sum(iterable, start)


def make_cycler(*items: Any) -> Cycler:
    """Return what gives one of its items after the other."""
    return Cycler(*jinja_limits.made(items))


def strftime_now(form: str) -> str:
    """Return the time of day in a form."""
    if len(form) > _LONGEST_FORM:
        raise TooLongError(f"the form of a time has {len(form):,} characters; {_LONGEST_FORM:,} at most")
    return datetime.now().strftime(form)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stand for `dict` without being the class, whose methods a template could reach."""
    made: dict[Any, Any] = jinja_limits.made(dict(*args, **kwargs))
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a reader that is a model: no HTML escapes, every script in its own letters."""
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
