"""Compile templates as jinja does, and ask `limits` where a value can be larger than what it is made of."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst

from varlen.source.chats.limits import MOST_UNASKED


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
