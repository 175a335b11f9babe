"""Templates are programs of strangers: they write text and nothing else, in little memory and time."""

# ruff: noqa: E501, templates are read as they stand

import datetime
import json
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.support.chats import SPECIAL, chat
from tests.support.rarely import mostly
from tests.text.template_attacks import ATTACKS, HARMLESS

from varlen.errors import SettingError, SourceError, VarlenError
from varlen.text import jinja_limits, jinja_sandbox
from varlen.text.chat_template import CHATML, chat_template
from varlen.text.jinja_sandbox import compile_template, to_json

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
        "{{ 'a' * 10**400 }}",
        "{{ messages * 10**400 }}",
        "{{ 1.5 | round(-(10**400)) }}",
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
        ("{{ raise_exception('Only\n two turns.') }}", "refuses this chat: Only two turns$"),
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
        ("{{ raise_exception('a' * 1000) }}", "a …$"),
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


READ = ("messages", "messages[0]", "messages[-1].content", "m.content", "m.role", "m.x.y")
COMPUTED = ("m['content'] | upper", "a * 3", "a | trim", "a | tojson", "a ~ 1", "a + 1", "f(1)", "f", "loop")
FLOW = ("for m in messages", "endfor", "if m", "else", "endif", "break")
BLOCKS = ("generation", "endgeneration", "set a = m", "macro f(a)", "endmacro")
PIECES = st.sampled_from(
    [
        *("{{ " + expression + " }}" for expression in (*READ, *COMPUTED)),
        *("{% " + statement + " %}" for statement in (*FLOW, *BLOCKS)),
        *("{{ '", "}}", "{#", "#}", "\n", "a"),
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


MOST_MB = 900
ODD_TALK = chat("u:Hi", "a:Yes")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
OFTEN = (
    *("replace", "join filter gen", "expandtabs", "widths", "percent dict", "format_map", "plus wide"),
    *("tilde wide", "doubling ns +", "dag json", "dag tuple", "dag varargs", "dag map default"),
    *("dag fromkeys", "macro double", "set block", "indent str", "tojson tojson", "repr list"),
    *("safe replace", "deep tuple hash", "slices", "uppers", "output emoji"),
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_limits, "LONGEST_S", 0.4)
    jinja_limits._overdue.clear()


def megabytes(kind: str) -> float:
    found = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3


def run_with(source: str) -> str:
    return compile_template(source, SPECIAL).run(ODD_TALK, None)


@pytest.mark.parametrize("name", mostly(OFTEN, ATTACKS))
@pytest.mark.filterwarnings("ignore:.*gc_callback:pytest.PytestUnraisableExceptionWarning")
def test_no_template_takes_a_gigabyte_or_never_ends(name):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before, begun = megabytes("VmRSS"), time.process_time()

    if name in HARMLESS:
        with suppress(SourceError):  # on a busy machine it may take longer than it may here
            run_with(ATTACKS[name])
    else:
        with pytest.raises(
            (SourceError, SettingError), match=r"the chat template (fails|was stopped|does not)"
        ):
            run_with(ATTACKS[name])

    assert megabytes("VmHWM") - before < MOST_MB
    assert time.process_time() - begun < 20


def test_what_is_asked_for_and_the_limit_are_said():
    with pytest.raises(SourceError, match=r"'replace' asks for a text of 1e\+12 .*; 134,217,728 at most"):
        run_with(ATTACKS["replace"])
    with pytest.raises(SourceError, match=r"was stopped on this chat: it computes for more than 0 s"):
        run_with(ENDLESS)


def test_a_template_is_stopped_in_every_thread_and_others_go_on():
    program, said, texts = compile_template(ENDLESS, {}), [], []
    quick = compile_template("{% for m in messages %}{{ m.content }}{% endfor %}", {})

    def stopped() -> None:
        with pytest.raises(SourceError) as error:
            program.run(ODD_TALK, None)
        said.append(str(error.value))

    threads = [threading.Thread(target=stopped) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        texts.append(quick.run(ODD_TALK, None))
    assert len(said) == 2
    assert all("it computes for more than" in one for one in said)
    assert set(texts) == {"HiYes"}


def test_a_template_that_never_ends_is_not_tried_for_ever():
    program = compile_template(ENDLESS, {})
    for _ in range(jinja_limits._MOST_OVERDUE):
        with pytest.raises(SourceError, match="was stopped"):
            program.run(ODD_TALK, None)

    begun = time.process_time()
    for _ in range(20):
        with pytest.raises(SourceError, match=r"was stopped 3 times .* and isn't run again"):
            program.run(ODD_TALK, None)
    assert time.process_time() - begun < 0.5


def test_a_template_whose_every_run_is_slow_is_not_run_for_a_minute(monkeypatch):
    monkeypatch.setattr(jinja_limits, "_SLOW_S", 0.02)
    monkeypatch.setattr(jinja_limits, "_MOST_SLOW_S", 0.2)

    def computes(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    said = ""
    for _ in range(20):
        try:
            jinja_limits.watched("always slow", computes, 0.04)
        except jinja_limits.StoppedError as error:
            said = str(error)
    assert re.match(r"[5-9] runs of it took .* and it isn't run again", said), said
    for number in range(400):  # some long chats among others are no fault of the template
        jinja_limits.watched("sometimes slow", computes, 0.0 if number % 20 else 0.04)


def test_an_exception_that_comes_too_late_goes_nowhere(monkeypatch):
    """A program that ends as it is stopped: what was raised in its thread is taken back."""
    ident = threading.get_ident()

    def ends() -> str:
        run_with = jinja_limits.current()
        assert run_with is not None
        run_with.why = "it is late"
        jinja_limits._raise_in(ident, jinja_limits.StoppedError)
        return "text"

    for _ in range(200):
        with suppress(jinja_limits.StoppedError):
            assert jinja_limits.watched("a program", ends) == "text"
        sum(range(50))  # an exception that is left over would come here
    assert not jinja_limits._running


@pytest.mark.parametrize("letter", ["a", "é", "ж", "😀"])
def test_long_documents_pass(monkeypatch, letter):
    monkeypatch.setattr(jinja_limits, "LONGEST_S", 30.0)
    long = [{"role": role, "content": f"{letter * 999}\n" * 1000} for role in ("user", "assistant") * 5]
    source = (
        "{% set ns = namespace(text='', last=none) %}{% macro said(m) %}{{ m.role ~ ': ' + m.content | trim }}{% endmacro %}"
        "{% for m in messages %}{% set content = m.content.split('</think>')[-1].lstrip('\\n').replace('\\r', '') %}"
        "{% set ns.last = [m] + [content] %}{{ said(m) }}{{ content.splitlines() | length }}{% set ns.text = content + '.' %}"
        "{{ {'role': m.role, 'content': content} | tojson }}{% endfor %}{{ messages | map(attribute='content') | join('-') }}"
    )

    text = compile_template(source, {}).run(long, None)

    assert text.count(letter) >= 3 * 10 * 999_000


def test_usual_values_of_every_kind_are_what_jinja_makes_of_them():
    source = (
        "{{ [[1, 2], [3]] | sum(start=[]) }}{{ [1, 2.5] | sum }}{{ [{'a': 2}] | sum('a') }}{{ ((1,), (2,)) | sum(start=()) }}"
        "{{ 'a' ~ 1 ~ none ~ [2] ~ 'b' ~ 3 }}{{ 1 + 2 + 3 }}{{ [1] + [2] + ['a' + 'b'] }}{{ ('a', 'b') + ('c',) }}{{ [1] * 3 }}"
        "{{ 'a\tb'.expandtabs(2) }}{{ '-'.join(['a', 'b']) }}{{ 'abc'.replace('b', 'xx', 1) }}{{ 'a b  c'.split() }}"
        "{{ {}.fromkeys(['a'], 1) }}{{ 'x'.center(5) }}{{ 'abc'.translate({97: 'z'}) }}{{ namespace(a=1) }}{{ cycler(1, 2).next() }}"
        "{{ [3, 1, 2] | sort }}{{ 'abc' | list }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 1] | unique | list }}"
        "{{ {'b': 1, 'a': [2, {'c': none}]} | tojson(indent=2) }}{{ '%s-%05d' % ('x', 3) }}{{ '{:>5}|{a}'.format(1, a=2) }}"
        "{% autoescape true %}{{ '<' ~ 'a' ~ ('<b>' | safe) }}{% endautoescape %}{{ ('<b>' | safe).replace('b', 'i') }}"
        "{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, a=2) }}{{ 'a\nb' | indent(2) }}{{ 'ab' | map('upper') | join }}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = to_json

    assert run_with(source) == plain.from_string(source).render(messages=ODD_TALK)


def test_a_template_of_megabytes_is_refused():
    with pytest.raises(SettingError, match=r"the chat template has 1,048,577 characters; 1,048,576 at most"):
        compile_template("a" * (2**20 + 1), {})


def test_limits_are_asked_at_the_edge():
    assert jinja_limits.within("a" * 5000) == "a" * 5000
    with pytest.raises(jinja_limits.TooLongError, match="makes a text of"):
        jinja_limits.within("a" * jinja_limits.LARGEST_TEXT)
