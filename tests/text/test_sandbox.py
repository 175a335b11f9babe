"""Templates are programs of strangers: they can write text and nothing else, and what they break is a sentence."""

import datetime
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chats import SPECIAL, chat

from varlen.errors import SettingError, SourceError, VarlenError
from varlen.text import jinja_sandbox
from varlen.text.chat_template import CHATML, chat_template
from varlen.text.jinja_sandbox import compile_template

TALK = chat("u:Hi", "a:<é>")


def run(source: str, **options: object) -> str:
    return compile_template(source, SPECIAL).run(TALK, None, **options)


def test_a_template_sees_what_transformers_shows_it():
    source = (
        "{{ bos_token }}{{ messages[1].content | tojson }}{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ strftime_now('%Y') }}"
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}"
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ dict(a=1) }}{{ '%s-%d' % ('x', 3) }}"
        "{{ '{}'.format(1) }}{{ '-' * 3 }}{{ 2 ** 3 }}{{ 'a' | center(3) }}"
    )

    written = run(source)

    year = datetime.date.today().year
    assert written == f'<s>"<é>"{json.dumps({"a": [2], "b": 1}, indent=1)}TrueFalse{year}user2' + (
        "{'a': 1}x-31---8 a "
    )


def test_lines_of_statements_alone_leave_no_trace():
    assert run("{% if true %}\n  {% set a = 1 %}\n  b\n{% endif %}\nc") == "  b\nc"


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.mro() }}",
        "{{ self._TemplateReference__context }}",
        "{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
        "{% macro f() %}{{ caller.__class__ }}{% endmacro %}{% call f() %}{% endcall %}",
        "{{ (1).__class__ }}",
        "{{ dict.__globals__ }}",
    ],
)
def test_a_template_that_reaches_into_python_is_stopped(attempt):
    with pytest.raises(SourceError, match="was stopped, since a template may not do this"):
        run(attempt)


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ messages * 10**9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ range(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.center(width=10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ messages | batch(10**9, 'a') | list }}",
        "{{ ['a'] | map('center', 10**9) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{:{w}}'.format_map({'w': 10**9}) }}",
    ],
)
def test_a_template_that_asks_for_gigabytes_is_refused(attempt):
    with pytest.raises(SourceError, match=r"the chat template fails on this chat: .*([Tt]oo|asks for)"):
        run(attempt)


def test_a_template_that_writes_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(jinja_sandbox, "_LONGEST_TEXT", 1000)

    with pytest.raises(SourceError, match="writes more than 1,000 characters"):
        run("{% for i in range(100000) %}{{ 'abcdefgh' }}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Only\n two turns.') }}", "refuses this chat: Only two turns.$"),
        ("{{ raise_exception() }}", "fails on this chat: TypeError"),
        ("{{ 1 / 0 }}", "fails on this chat: ZeroDivisionError: division by zero"),
        ("{{ nobody.name }}", "fails on this chat: 'nobody' is undefined"),
        ("{{ 'a' + 1 }}", "fails on this chat: TypeError"),
        ("{{ messages[0].content | nosuch }}", "does not compile: line 1: No filter named 'nosuch'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'a' %}", "no loader"),
        ("{% import 'a' as a %}", "no loader"),
        ("{% extends 'a' %}", "no loader"),
        ("{{ lipsum(n=1000000) }}", "'lipsum' is undefined"),
        ("{{ raise_exception('a' * 1000) }}", "a…$"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_sentence(source, words):
    with pytest.raises((SourceError, SettingError), match=words):
        run(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% for %}", "line 2: Expected an expression"),
        ("a\n\n{% if true %}", "line 3: Unexpected end"),
        ("{% generation %}", "line 1: Unexpected end"),
        ("{% endgeneration %}", "line 1: Encountered unknown tag 'endgeneration'"),
        (
            "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
            "leave the loop",
        ),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "does not compile"),
        ("{{ " + "-" * 5000 + "1 }}", "does not compile"),
    ],
)
def test_a_template_that_does_not_compile_names_the_line(source, words):
    with pytest.raises(SettingError, match=words):
        chat_template(source)


def test_marks_stand_around_generation_blocks_and_only_when_asked_for():
    source = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %},{% endfor %}"

    assert run(source) == "user,assistant,"
    assert run(source, marks="[]") == "[user],[assistant],"
    assert compile_template(source, {}).has_generation
    assert not compile_template(CHATML, {}).has_generation


PIECES = st.sampled_from(
    [
        *(
            "{{ messages }}",
            "{{ messages[0] }}",
            "{% for m in messages %}",
            "{% endfor %}",
            "{{ m.content }}",
        ),
        *(
            "{% if m %}",
            "{% else %}",
            "{% endif %}",
            "{% generation %}",
            "{% endgeneration %}",
            "{{ m.x.y }}",
        ),
        *(
            "{% set a = m %}",
            "{{ a * 3 }}",
            "{{ a | trim }}",
            "{{ a | tojson }}",
            "{{ a ~ 1 }}",
            "{{ a + 1 }}",
        ),
        *(
            "{% macro f(a) %}",
            "{% endmacro %}",
            "{{ f(1) }}",
            "{{ f }}",
            "{% break %}",
            "{{ '",
            "}}",
            "{#",
            "#}",
        ),
        *(
            "{{ messages[-1].content }}",
            "{{ m.role }}",
            "{{ m['content'] | upper }}",
            "\n",
            "a",
            "{{ loop }}",
        ),
    ]
)


@given(source=st.lists(PIECES, max_size=8).map("".join))
def test_no_template_raises_anything_but_errors_of_ours(source):
    try:
        rendered = chat_template(source).render(TALK)
    except VarlenError:
        return
    assert all(0 <= start < stop <= len(rendered.text) for start, stop in rendered.spans)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro said(value) %}{{ value }}{% endmacro %}{{ said(n) }}",
        "{% macro said(value=1) %}{{ value }}{% endmacro %}{{ said(value=n) }}",
        "{% set ns = namespace(n=n) %}{{ ns.n }}",
        "{{ dict(n=n).n }}",
        "{{ {}.get('a', n) }}",
        "{{ nothing | default(n) }}",
        "{{ [{'id': n}] | selectattr('id', 'equalto', n) | map(attribute='id') | first }}",
    ],
)
def test_a_large_number_of_a_row_is_a_value_and_no_size(source):
    program = compile_template(source, {})

    assert program.run([], None, variables={"n": 1_732_579_200}) == "1732579200"
