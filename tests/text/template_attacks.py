"""Templates that ask for gigabytes, or never end, by every way that is known."""

# ruff: noqa: E501, UP031, templates are read as they stand

_BEGIN = "{% set ns = namespace(s='abcdefgh', l=[1], n=2, t=(1,), d={}) %}"
_LOOP = _BEGIN + "{% for i in range(100) %}"
_END = "{% endfor %}"
ATTACKS = {
    "replace": "{{ ('a'*1000000).replace('a','b'*1000000)|length }}",
    "replace filter": "{{ ('a'*1000000)|replace('a','b'*1000000)|length }}",
    "replace empty": "{{ ('a'*1000000).replace('','b'*1000000)|length }}",
    "join": "{{ ('a'*1000000).join('b'*1000000)|length }}",
    "join filter": "{{ ('b'*1000000)|join('a'*1000000)|length }}",
    "join filter gen": "{{ range(100000)|join('a'*1000000)|length }}",
    "expandtabs": "{{ ('\t'*1000000).expandtabs(1000000)|length }}",
    "expandtabs kw": "{{ ('\t'*1000000).expandtabs(tabsize=1000000)|length }}",
    "widths": "{{ ('{:999999}'*100000).format(*range(100000))|length }}",
    "widths2": "{{ '{0:999999}{0:999999}{0:999999}{0:999999}{0:999999}{0:999999}{0:999999}{0:999999}{0:999999}{0:999999}'.format(1)*100000 }}",
    "percent widths": "{{ (('%999999d'*100000) % ((1,)*100000))|length }}",
    "percent dict": "{{ (('%(a)s'*100000) % {'a':'x'*1000000})|length }}",
    "format dict": "{{ ('{a}'*100000).format(a='x'*1000000)|length }}",
    "format_map": "{{ ('{a}'*100000).format_map({'a':'x'*1000000})|length }}",
    "format filter": "{{ ('%s'*100000)|format(*(['x'*1000000]*100000))|length }}",
    "tilde chain": "{% set a = 'x'*1000000 %}"
    + "".join("{% set a = a ~ a %}" for _ in range(20))
    + "{{ a|length }}",
    "plus chain": "{% set a = 'x'*1000000 %}"
    + "".join("{% set a = a + a %}" for _ in range(20))
    + "{{ a|length }}",
    "plus wide": "{% set a = 'x'*1000000 %}"
    + "".join("{% set a = a + a %}" for _ in range(6))
    + "{% set b = "
    + " + ".join(["a"] * 5000)
    + " %}{{ b|length }}",
    "plus wide out": "{% set a = 'x'*1000000 %}"
    + "".join("{% set a = a + a %}" for _ in range(6))
    + "{{ "
    + " + ".join(["a"] * 500)
    + " }}",
    "tilde wide": "{% set a = 'x'*1000000 %}"
    + "".join("{% set a = a ~ a %}" for _ in range(6))
    + "{{ ("
    + " ~ ".join(["a"] * 5000)
    + ")|length }}",
    "doubling ns": _LOOP + "{% set ns.s = ns.s ~ ns.s %}" + _END + "{{ ns.s|length }}",
    "doubling ns +": _LOOP + "{% set ns.s = ns.s + ns.s %}" + _END + "{{ ns.s|length }}",
    "doubling list": _LOOP + "{% set ns.l = ns.l + ns.l %}" + _END + "{{ ns.l|length }}",
    "doubling list *": _LOOP + "{% set ns.l = ns.l * 2 %}" + _END + "{{ ns.l|length }}",
    "dag str": _LOOP + "{% set ns.l = [ns.l, ns.l] %}" + _END + "{{ ns.l }}",
    "dag json": _LOOP + "{% set ns.l = [ns.l, ns.l] %}" + _END + "{{ ns.l|tojson }}",
    "dag dict": _LOOP + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}" + _END + "{{ ns.l|tojson }}",
    "dag dict()": _LOOP + "{% set ns.l = dict(a=ns.l, b=ns.l) %}" + _END + "{{ ns.l }}",
    "dag eq": _LOOP
    + "{% set ns.l = [ns.l, ns.l] %}{% set ns.d = [ns.d, ns.d] %}"
    + _END
    + "{{ ns.l == ns.d }}",
    "dag tuple": _LOOP + "{% set ns.t = (ns.t, ns.t) %}" + _END + "{{ {ns.t: 1} }}",
    "dag fan": _BEGIN + "{% set a = [1]*1000000 %}{% set b = [a]*1000000 %}{{ b|tojson }}",
    "dag fromkeys": _LOOP + "{% set ns.d = {}.fromkeys(range(10), ns.d) %}" + _END + "{{ ns.d }}",
    "dag cycler": _LOOP + "{% set ns.l = cycler(ns.l, ns.l).items %}" + _END + "{{ ns.l }}",
    "dag varargs": "{% macro f(n) %}{% if n %}{{ f(n-1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}{{ f(60, 1, 1) }}",
    "dag kwargs": "{% macro f(n) %}{% if n %}{{ f(n-1, a=kwargs, b=kwargs) }}{% else %}{{ kwargs }}{% endif %}{% endmacro %}{{ f(60, a=1) }}",
    "dag map default": _LOOP
    + "{% set ns.l = range(10)|map(attribute='zz', default=ns.l)|list %}"
    + _END
    + "{{ ns.l }}",
    "dag map default2": _LOOP
    + "{% set ns.l = [none]*10|map('default', ns.l, true)|list %}"
    + _END
    + "{{ ns.l }}",
    "dag map default3": _LOOP
    + "{% set ns.l = [none,none]|map('d', ns.l, true)|list %}"
    + _END
    + "{{ ns.l }}",
    "dag map default4": _LOOP
    + "{% set ns.l = [none,none]|map('default', default_value=ns.l, boolean=true)|list %}"
    + _END
    + "{{ ns.l }}",
    "dag batch": _LOOP + "{% set ns.l = [1]|batch(10, ns.l)|list %}" + _END + "{{ ns.l }}",
    "dag slice": _LOOP + "{% set ns.l = [1]|slice(10, ns.l)|list %}" + _END + "{{ ns.l }}",
    "dag items": _LOOP + "{% set ns.d = {'a': ns.d, 'b': ns.d} %}" + _END + "{{ ns.d|dictsort }}",
    "dag sum": _LOOP + "{% set ns.l = [ns.l, ns.l]|sum(start=[]) %}" + _END + "{{ ns.l }}",
    "dag ns": _LOOP + "{% set ns.a = namespace(a=ns.a, b=ns.a) %}" + _END + "{{ ns.a }}",
    "dag groupby": _LOOP
    + "{% set ns.l = [{'a': ns.l},{'a': ns.l}]|groupby('a')|list %}"
    + _END
    + "{{ ns.l }}",
    "dag loop cycle": _LOOP + "{% set ns.l = [loop.cycle(ns.l), loop.cycle(ns.l)] %}" + _END + "{{ ns.l }}",
    "dag loop changed": _LOOP + "{{ loop.changed(ns.l) }}{% set ns.l = [ns.l, ns.l] %}" + _END,
    "dag set tuple": _BEGIN
    + "{% for i in range(100) %}{% set ns.a, ns.b = (ns.a, ns.b), (ns.a, ns.b) %}{% endfor %}{{ ns.a }}",
    "map center": "{{ range(100000)|map('center', 1000000)|list|length }}",
    "map center str": "{{ ('a'*1000000)|map('center', 1000000)|list|length }}",
    "map sort": "{{ range(100000)|map('center', 1000000)|sort|length }}",
    "map unique": "{{ range(100000)|map('center', 1000000)|unique|list|length }}",
    "map join": "{{ range(100000)|map('center', 1000000)|join|length }}",
    "map loop length": "{% for x in range(100000)|map('center', 1000000) %}{{ loop.length }}{% endfor %}",
    "ljust loop": _BEGIN
    + "{% for i in range(100000) %}{% set ns.l = [ns.l, 'a'.ljust(1000000)] %}{% endfor %}",
    "ljust nested list": _BEGIN
    + "{% for i in range(100000) %}{% set ns.l = [[ns.l], 'ab'.ljust(3000)] %}{% endfor %}",
    "small retained": _BEGIN
    + "{% for j in range(100000) %}{% for i in range(100000) %}{% set ns.l = {'a': ns.l, 'b': i ~ 'y'} %}{% endfor %}{% endfor %}",
    "small retained2": _BEGIN
    + "{% for j in range(100000) %}{% for i in range(100000) %}{% set ns.d = {i ~ j: ns.d} %}{% if i % 50 == 0 %}{% set ns.l = ns.l + [ns.d] %}{% set ns.d = {} %}{% endif %}{% endfor %}{% endfor %}",
    "indent": "{{ ('\n'*1000000)|indent(1000000, true, true)|length }}",
    "indent str": "{{ ('\n'*1000000)|indent('x'*1000000, true, true)|length }}",
    "wordwrap": "{{ ('a '*1000000)|wordwrap(1, true, 'x'*1000000)|length }}",
    "wordwrap break": "{{ ('-'*1000000)|wordwrap(10)|length }}",
    "tojson indent": "{{ [[1]*1000]*1000|tojson(indent=1000000) }}",
    "tojson indent str": "{{ [[1]*1000,[1]*1000]|tojson(indent='x'*1000000) }}",
    "tojson separators": "{{ ([1]*1000000)|tojson(separators=('x'*1000000,'y')) }}",
    "tojson tojson": "{% set ns = namespace(s='\"') %}{% for i in range(60) %}{% set ns.s = ns.s|tojson %}{% endfor %}",
    "pprint pprint": "{% set ns = namespace(s='\"') %}{% for i in range(60) %}{% set ns.s = ns.s|pprint %}{% endfor %}",
    "repr": "{% set ns = namespace(s='\\\\') %}{% for i in range(60) %}{% set ns.s = '%r' % ns.s %}{% endfor %}",
    "repr list": "{% set ns = namespace(s='\\\\') %}{% for i in range(60) %}{% set ns.s = [ns.s]|string %}{% endfor %}",
    "range": "{{ range(10**12) }}",
    "range list": "{{ range(99999)|list|length }}",
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested3": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% set x = a %}{% endfor %}{% endfor %}{% endfor %}",
    "gen nested": "{{ range(99999)|map('string')|map('upper')|select|list|length }}{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "macro rec": "{% macro f(n) %}{{ f(n+1) }}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
    "macro rec2": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "macro double": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}"
    + _LOOP
    + "{% set ns.s = f(ns.s) %}"
    + _END
    + "{{ ns.s|length }}",
    "call double": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + _LOOP
    + "{% set ns.s %}{% call f() %}{{ ns.s }}{% endcall %}{% endset %}"
    + _END
    + "{{ ns.s|length }}",
    "set block": _LOOP
    + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"
    + _END
    + "{{ ns.s|length }}",
    "filter block": _LOOP
    + "{% set x %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = x %}"
    + _END
    + "{{ ns.s|length }}",
    "loop rec": "{% for x in [1,2] recursive %}{{ loop([1,2]) }}{% endfor %}",
    "block rec": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "sort": "{{ ('ab'*1000000)|sort|length }}",
    "sort range": "{% for i in range(9999) %}{{ (range(99999)|map('string')|sort)[0] }}{% endfor %}",
    "unique": "{{ ('ab'*1000000)|unique|list|length }}",
    "list str": "{% set a='ab'*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}{{ a|list|length }}",
    "split": "{% set a='ab'*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}{{ a.split('b')|length }}",
    "split ws": "{% set a='a '*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}{{ a.split()|length }}",
    "splitlines": "{% set a='a\v'*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}{{ a.splitlines()|length }}",
    "big pow": "{{ 2**2**30 }}",
    "big pow2": "{{ (2**1000000)*(2**1000000) }}",
    "big pow float": "{{ 10.0**400 }}",
    "big int loop": _BEGIN
    + "{% for i in range(99999) %}{% set ns.n = (ns.n ** 2) % (2**1000000+1) %}{% endfor %}",
    "big int div": "{% set a = 2**1000000-1 %}{% set b = 2**500000-1 %}{% for i in range(99999) %}{% set x = a // b %}{% endfor %}",
    "int str": "{{ (2**1000000)|string }}",
    "int str2": "{{ '%d' % 2**1000000 }}",
    "round": "{{ 1.5|round(1000000000) }}",
    "round2": "{{ 1.5|round(100000000, 'floor') }}",
    "center filter": "{{ 'a'|center(10**9) }}",
    "center ok chain": "{{ " + "~".join(["('a'|center(1000000))"] * 500) + " }}",
    "const fold": "{{ " + "~".join(["('a'|center(1000000))"] * 3000) + " }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "rjust kw": "{{ '1'.rjust(width=10**10) }}",
    "batch": "{{ [1]|batch(10**9, 1)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "translate": "{{ ('a'*1000000).translate({97: 'b'*1000000})|length }}",
    "maketrans": "{{ ('a'*1000000).translate(''.maketrans({'a': 'b'*1000000}))|length }}",
    "bytes": "{{ ('a'*1000000).encode().replace('a'.encode(), ('b'*1000000).encode())|length }}",
    "bytes join": "{{ ('a'*1000000).encode().join([('b'*10).encode()]*1000000)|length }}",
    "bytes *": "{{ ('a').encode()*10**10 }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "bytes %": "{{ ('%999999d'*100000).encode() % ((1,)*100000) }}",
    "safe replace": "{{ (('a'*1000000)|safe).replace('a','b'*1000000)|length }}",
    "safe join": "{{ (('a'*1000000)|safe).join(['b']*1000000)|length }}",
    "safe format": "{{ ((('{a}')|safe)*100000).format(a='x'*1000000)|length }}",
    "safe percent": "{{ ((('%s'*100000)|safe) % (('x'*1000000,)*100000))|length }}",
    "safe *": "{{ ('a'|safe)*10**10 }}",
    "safe expand": "{{ (('\t'*1000000)|safe).expandtabs(1000000)|length }}",
    "autoescape": "{% autoescape true %}{% set a = 'x'*1000000 %}"
    + "".join("{% set a = a ~ a %}" for _ in range(20))
    + "{{ a|length }}{% endautoescape %}",
    "urlize": "{{ ('@'*1000000)|urlize|length }}",
    "urlize2": "{{ ('www.a.'*3000)|urlize|length }}",
    "striptags": "{{ ('<!--'*1000000)|striptags|length }}",
    "striptags2": "{{ ('<'*3000000)|striptags|length }}",
    "title": "{{ ('a-'*1000000)|title|length }}",
    "xmlattr": "{{ {'a': '&'*1000000}|xmlattr|length }}",
    "truncate": "{{ 'abc'|truncate(1, true, 'x'*1000000)|length }}",
    "urlencode": "{{ ('é'*1000000)|urlencode|length }}",
    "wordcount": "{{ ('a '*1000000)|wordcount }}",
    "strftime": "{{ strftime_now('%Y'*1000000)|length }}",
    "strftime2": "{{ strftime_now('%1000000000Y')|length }}",
    "joiner": "{% set j = joiner('x'*1000000) %}{% for i in range(100000) %}{{ j() }}{% endfor %}",
    "output loop": "{% set a = 'x'*1000000 %}{% for i in range(100000) %}{{ a }}{% endfor %}",
    "output emoji": "{% set a = '😀'*1000000 %}{% for i in range(100000) %}{{ a }}{% endfor %}",
    "attr sum": "{{ ([[1]*1000]*1000)|sum(start=[])|length }}",
    "sum quad": "{{ ([[1]]*1000000)|sum(start=[])|length }}",
    "sum quad tuple": "{{ ([(1,)]*1000000)|sum(start=())|length }}",
    "sum bigint": "{{ ([2**1000000]*1000000)|sum > 1 }}",
    "in list": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% if -1 in l %}{% endif %}{% endfor %}",
    "find": "{% set a = ('a'*1000000) %}{% for i in range(99999) %}{% if 'ab' in a %}{% endif %}{% endfor %}",
    "deep tuple hash": _BEGIN
    + "{% for i in range(99999) %}{% set ns.t = (ns.t, 1) %}{% endfor %}{{ {ns.t: 1}|length }}",
    "deep list": _BEGIN + "{% for i in range(99999) %}{% set ns.t = [ns.t] %}{% endfor %}{{ ns.t }}",
    "deep ns": _BEGIN + "{% for i in range(99999) %}{% set ns.t = namespace(a=ns.t) %}{% endfor %}{{ ns.t }}",
    "deep dict": _BEGIN + "{% for i in range(99999) %}{% set ns.t = dict(a=ns.t) %}{% endfor %}{{ ns.t }}",
    "slices": "{% set a='ab'*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}"
    + "".join("{%% set b%d = a[%d:] %%}" % (i, i) for i in range(1, 3000)),
    "slices2": "{% set l = [1]*1000000 %}"
    + "".join("{%% set b%d = l[%d:] %%}" % (i, i) for i in range(1, 3000)),
    "uppers": "{% set a='ab'*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}"
    + "".join("{%% set b%d = a.upper() %%}" % (i) for i in range(1, 3000)),
    "trims": "{% set a='ab'*500000 %}{% set a = a~a~a~a~a~a~a~a~a~a~a~a~a~a~a~a %}"
    + "".join("{%% set b%d = a|upper %%}" % (i) for i in range(1, 3000)),
    "deep expr": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "long if": "".join("{% if a %}" for _ in range(150)),
    "groupby": "{{ range(99999)|groupby('real')|list|length }}",
    "dictsort": "{{ {}.fromkeys(range(99999), 'x')|dictsort|length }}",
    "random": "{{ range(99999)|random > -1 }}",
    "cycle": "{% set c = cycler('x'*1000000, 'y') %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "batch huge lists": _BEGIN
    + "{% for i in range(99999) %}{% set ns.l = [ns.l, range(99999)|batch(1)|list] %}{% endfor %}",
    "range lists": _BEGIN
    + "{% for i in range(99999) %}{% set ns.l = [ns.l, range(99999)|list] %}{% endfor %}",
    "range strings": _BEGIN
    + "{% for i in range(99999) %}{% set ns['x' ~ i] = range(99999)|map('string')|list %}{% endfor %}",
    "macro args keep": "{% macro f(n, l) %}{% if n %}{{ f(n-1, range(99999)|map('string')|list) }}{% endif %}{% endmacro %}{{ f(900, 1) }}",
    "macro args keep2": "{% macro f(n, l) %}{% if n %}{{ f(n-1, ('a'*900000)|upper) }}{% endif %}{% endmacro %}{{ f(900, 1) }}",
}

HARMLESS = (
    "dag ns",
    "range list",
    "big pow",
    "strftime2",
    "xmlattr",
    "urlencode",
    "attr sum",
    "sum quad",
    "sum quad tuple",
    "dictsort",
    "random",
)
"""What ends by itself, and takes little."""
