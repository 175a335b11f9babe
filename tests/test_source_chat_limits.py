"""A template can't take a gigabyte or a minute, whatever it does, and one that does usual things isn't held back."""

# ruff: noqa: E501, templates are read as they stand

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from chats import SPECIAL, chat
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rarely import mostly
from template_attacks import ATTACKS, HARMLESS

from varlen.errors import SettingError, SourceError
from varlen.text import jinja_limits
from varlen.text.jinja_sandbox import compile_template, to_json

MOST_MB = 900
TALK = chat("u:Hi", "a:Yes")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
OFTEN = (
    *(
        "replace",
        "join filter gen",
        "expandtabs",
        "widths",
        "percent dict",
        "format_map",
        "plus wide",
        "tilde wide",
    ),
    *(
        "doubling ns +",
        "dag json",
        "dag tuple",
        "dag varargs",
        "dag map default",
        "dag fromkeys",
        "map center",
    ),
    *("macro double", "set block", "indent str", "tojson tojson", "repr list", "const fold", "safe replace"),
    *("nested", "deep tuple hash", "slices", "uppers", "output emoji", "sum quad tuple"),
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_limits, "LONGEST_S", 0.4)
    jinja_limits._overdue.clear()


def megabytes(kind: str) -> float:
    found = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3


def run(source: str) -> str:
    return compile_template(source, SPECIAL).run(TALK, None)


@pytest.mark.parametrize("name", mostly(OFTEN, ATTACKS))
def test_no_template_takes_a_gigabyte_or_never_ends(name: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begun = megabytes("VmRSS"), time.process_time()

    if name in HARMLESS:
        with suppress(SourceError):  # on a busy machine it may take longer than it may here
            run(ATTACKS[name])
    else:
        with pytest.raises(
            (SourceError, SettingError), match=r"the chat template (fails|was stopped|does not)"
        ):
            run(ATTACKS[name])

    assert megabytes("VmHWM") - before < MOST_MB
    assert time.process_time() - begun < 20


def test_what_is_asked_for_and_the_limit_are_said() -> None:
    with pytest.raises(
        SourceError, match=r"'replace' asks for a text of 1e\+12 characters; 134,217,728 bytes at most"
    ):
        run(ATTACKS["replace"])
    with pytest.raises(
        SourceError, match=r"was stopped on this chat: it computes for more than 0 s; 0 s at most"
    ):
        run(ENDLESS)


def test_a_template_is_stopped_in_every_thread_and_others_go_on() -> None:
    program, said, texts = compile_template(ENDLESS, {}), [], []
    quick = compile_template("{% for m in messages %}{{ m.content }}{% endfor %}", {})

    def stopped() -> None:
        with pytest.raises(SourceError) as error:
            program.run(TALK, None)
        said.append(str(error.value))

    threads = [threading.Thread(target=stopped) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        texts.append(quick.run(TALK, None))
    assert len(said) == 2
    assert all("it computes for more than" in one for one in said)
    assert set(texts) == {"HiYes"}


def test_a_template_that_never_ends_is_not_tried_for_ever() -> None:
    program = compile_template(ENDLESS, {})
    for _ in range(jinja_limits._MOST_OVERDUE):
        with pytest.raises(SourceError, match="was stopped"):
            program.run(TALK, None)

    begun = time.process_time()
    for _ in range(20):
        with pytest.raises(SourceError, match=r"was stopped 3 times .* and isn't run again"):
            program.run(TALK, None)
    assert time.process_time() - begun < 0.5


def test_a_template_whose_every_run_is_slow_is_not_run_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_exception_that_comes_too_late_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends as it is stopped: what was raised in its thread is taken back."""
    ident = threading.get_ident()

    def ends() -> str:
        run = jinja_limits.current()
        assert run is not None
        run.why = "it is late"
        jinja_limits._raise_in(ident, jinja_limits.StoppedError)
        return "text"

    for _ in range(200):
        with suppress(jinja_limits.StoppedError):
            assert jinja_limits.watched("a program", ends) == "text"
        sum(range(50))  # an exception that is left over would come here
    assert not jinja_limits._running


@pytest.mark.parametrize("letter", ["a", "é", "ж", "😀"])
def test_long_documents_pass(monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
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


def test_usual_values_of_every_kind_are_what_jinja_makes_of_them() -> None:
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

    assert run(source) == plain.from_string(source).render(messages=TALK)


def test_a_template_of_megabytes_is_refused() -> None:
    with pytest.raises(SettingError, match=r"the chat template has 1,048,577 characters; 1,048,576 at most"):
        compile_template("a" * (2**20 + 1), {})


def test_limits_are_asked_at_the_edge() -> None:
    assert jinja_limits.within("a" * 5000) == "a" * 5000
    with pytest.raises(jinja_limits.TooLongError, match="makes a text of"):
        jinja_limits.within("a" * jinja_limits.LARGEST_TEXT)
