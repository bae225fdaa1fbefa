"""Templates that would make gigabytes, or run for minutes: refused at once, in whatever operation it hides."""

# ruff: noqa: E501 - a template in a line each

import time
import tracemalloc

import pytest

from pagemill.errors import RequestError
from pagemill.tokenizers import template_budget
from pagemill.tokenizers.chat_template import render
from pagemill.tokenizers.template_budget import MAX_VALUE, max_value_of

pytestmark = pytest.mark.cases(one_in=4)

USER = {"role": "user", "content": "hello"}
LARGE = {
    "dag eq": "{% set ns=namespace(a=[1],b=[1]) %}{% for i in range(40) %}{% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "dag print": "{% set ns=namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a=[ns.a,ns.a] %}{% endfor %}{{ ns.a }}",
    "dag dict": "{% set ns=namespace(a={}) %}{% for i in range(40) %}{% set ns.a={'a':ns.a,'b':ns.a} %}{% endfor %}{{ ns.a|tojson }}",
    "dag dict()": "{% set ns=namespace(a={}) %}{% for i in range(40) %}{% set ns.a=dict(a=ns.a,b=ns.a) %}{% endfor %}{{ ns.a|tojson }}",
    "ns cycle": "{% set ns=namespace() %}{% set ns.a=ns %}{{ ns }}",
    "macro concat": "{% set y='a'*4000000 %}{% macro f() %}{% for i in range(99999) %}{{ y }}{% endfor %}{% endmacro %}{% set z = f() %}{{ z|length }}",
    "set block": "{% set y='a'*4000000 %}{% set z %}{% for i in range(99999) %}{{ y }}{% endfor %}{% endset %}{{ z|length }}",
    "filter block": "{% set y='a'*4000000 %}{% filter upper %}{% for i in range(99999) %}{{ y }}{% endfor %}{% endfilter %}",
    "call block": "{% set y='a'*4000000 %}{% macro f() %}{% for i in range(9999) %}{{ caller() }}{% endfor %}{% endmacro %}{% call f() %}{{ y }}{% endcall %}",
    "gen join2": "{% set y='a'*4000000 %}{{ ([none]*99999)|map('default', y, true)|join|length }}",
    "format idx": "{% set y='a'*4000000 %}{{ ('{0}'*30000).format(y)|length }}",
    "percent named": "{% set y={'a':'a'*4000000} %}{{ (('%(a)s'*20000) % y)|length }}",
    "percent star": "{{ ('%*d' % (200000000,1))|length }}",
    "format nested": "{{ '{:{}}'.format(1,200000000)|length }}",
    "format_map": "{{ '{a:>200000000}'.format_map({'a':1})|length }}",
    "attr format": "{{ ('{:>200000000}'|attr('format'))(1)|length }}",
    "to_bytes": "{{ (1).to_bytes(2000000000,'big')|length }}",
    "translate": "{{ ('a'*4000000).translate({97:'b'*100000})|length }}",
    "expandtabs": "{{ ('\t'*100000).expandtabs(100000)|length }}",
    "zfill": "{{ 'a'.zfill(2000000000)|length }}",
    "strip": "{{ ('a'*4000000).strip('b'*4000000~'a')|length }}",
    "trim": "{{ ('a'*4000000)|trim('b'*4000000~'a')|length }}",
    "rfind": "{% set p='a'*40000~'b'~'a'*40000 %}{{ ('a'*4000000).rfind(p) }}",
    "rindex": "{% set p='a'*40000~'b'~'a'*40000 %}{{ ('a'*4000000).rindex(p) }}",
    "rsplit": "{% set p='a'*40000~'b'~'a'*40000 %}{{ ('a'*4000000).rsplit(sep=p)|length }}",
    "rpartition": "{% set p='a'*40000~'b'~'a'*40000 %}{{ ('a'*4000000).rpartition(p)|length }}",
    "idna": "{{ ('é'*400000).encode('idna')|length }}",
    "punycode": "{{ ('a-' ~ '9'*400000).encode().decode(encoding='punycode')|length }}",
    "sort": "{{ ('a'*4000000)|sort(attribute='x')|length }}",
    "unique": "{{ ('a'*4000000)|unique|length }}",
    "groupby": "{{ ('a'*4000000)|groupby(0)|length }}",
    "max": "{{ ('a'*4000000)|max }}",
    "round": "{{ 1.5|round(1000000000,'ceil') }}",
    "int base": "{% set ns=namespace(x=('1'*4000000)|int(base=2)) %}{{ ns.x.bit_length() }}",
    "getslice str": "{% set s='a'*4000000 %}{% set ns=namespace(k=[]) %}{% for i in range(99999) %}{% set ns.k = ns.k + [s[i:]] %}{% endfor %}{{ ns.k|length }}",
    "emoji": "{% set s='\U0001f600'*4000000 %}{% set ns=namespace(k=[]) %}{% for i in range(99999) %}{% set ns.k = ns.k + [s[i:]] %}{% endfor %}{{ ns.k|length }}",
    "pprint": "{{ (range(99999)|list)|pprint|length }}",
    "urlize": "{{ ('http://a.b/'*300000)|urlize|length }}",
    "xmlattr": "{{ {'a':'\"'*4000000}|xmlattr|length }}",
    "markup": "{{ (('<'*4000000)|escape|escape|escape|escape|escape)|length }}",
    "markup add": "{% set m='x'|safe %}{% set ns=namespace(x='<'*4000000) %}{% for i in range(30) %}{% set ns.x = m + ns.x %}{% endfor %}{{ ns.x|length }}",
    "split": "{{ ('a'*4000000).split('a')|length }}",
    "wordcount": "{{ ('a '*2000000)|wordcount }}",
    "const fold": "{{ 'a'|center(200000000)|length }}{{ '%200000000d' % 1 }}{{ ['a']|join('x')|indent(99999999) }}",
    "const out": "{{ 'a'|center(200000000) }}",
    "percent format": "{% set x = '%200000000d' % 1 %}{{ x|length }}",
    "str.format": "{% set x = '{:>200000000}'.format(1) %}{{ x|length }}",
    "format filter": "{% set x = '%200000000d'|format(1) %}{{ x|length }}",
    "center filter": "{% set x = 'a'|center(200000000) %}{{ x|length }}",
    "ljust": "{% set x = 'a'.ljust(200000000) %}{{ x|length }}",
    "replace": "{% set y = 'a'*4000 %}{% set x = y.replace('a', y) %}{{ x.replace('a', 'bbbbbbbbbbb')|length }}",
    "join": "{% set y = 'a'*4000000 %}{% set x = [y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y,y]|join %}{{ x|length }}",
    "concat ~": "{% set ns=namespace(x='a'*4000000) %}{% for i in range(5) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "add": "{% set ns=namespace(x='a'*4000000) %}{% for i in range(5) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "nested listcomp via map/product": "{% set l = range(99999)|list %}{{ (l*40)|length }}",
    "batch": "{{ [1]|batch(50000000, 'x')|list|length }}",
    "lipsum": "{{ lipsum(n=30000)|length }}",
    "indent": "{% set x = ('a\n'*1000)|indent(200000) %}{{ x|length }}",
    "big int": "{{ (9**64)**64 }}",
    "big int mul": "{% set ns=namespace(x=9**64) %}{% for i in range(18) %}{% set ns.x = ns.x*ns.x %}{% endfor %}{{ ns.x.bit_length() }}",
    "strftime": "{{ strftime_now('%Y'*1000000)|length }}",
    "tojson indent": "{{ [1]|tojson(indent=200000000)|length }}",
    "wordwrap": "{{ ('a '*1000000)|wordwrap(1)|length }}",
}
SLOW = {
    "a variable as the guard": "{% set turn = 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested namespaces": "{% set ns=namespace(a=namespace()) %}{% for i in range(40) %}{% set n2=namespace(a=ns.a,b=ns.a) %}{% set ns.a=n2 %}{% endfor %}{{ ns.a }}",
    "macro": "{% macro f(n) %}{% if n>0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "cycler": "{% set c=cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}",
    "look-up": "{% set a=range(99999)|list %}{% for i in range(99999) %}{% if -1 in a %}{% endif %}{% endfor %}",
    "select": "{% set a=range(99999)|list %}{{ a|select('in', a)|list|length }}",
    "comparisons": "{% set a='a'*4000000 %}{% set b='a'*4000000 %}" + "{% if a==b %}{% endif %}" * 3000,
}
LARGEST_MIB = 200


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_is_never_made(name):
    tracemalloc.start()
    try:
        with pytest.raises(
            RequestError,
            match=r"makes|formats|gives|asks for|encodes|strips|searches|rounds|sums|sorts|indents|recursion|runs for",
        ):
            render(LARGE[name], [USER])
        assert tracemalloc.get_traced_memory()[1] < LARGEST_MIB << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_is_stopped(monkeypatch, name):
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"runs for more than 0.3 s"):
        render(SLOW[name], [USER])
    assert time.monotonic() - start < 60, "hangs"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s: %s' % ('a', 'b') }}", "a: b"),
        ("{{ '%-6s|%03d|%.2f'|format('a', 7, 1.5) }}", "a     |007|1.50"),
        ("{{ '{}-{name:>4}'.format(1, name='b') }}", "1-   b"),
        ("{{ 'a' ~ 1 ~ none ~ [1] }}", "a1None[1]"),
        ("{{ ['a', 'b']|join(', ') }} {{ ', '.join(['a', 'b']) }}", "a, b a, b"),
        ("{{ [{'n': 'x'}, {'n': 'y'}]|map(attribute='n')|join('+') }}", "x+y"),
        ("{{ range(5)|select('odd')|list }} {{ range(7)|batch(3)|list|length }}", "[1, 3] 3"),
        ("{{ {'a': [1, 'ä']}|tojson }} {{ [1]|tojson(indent=2) }}", '{"a": [1, "ä"]} [\n  1\n]'),
        ("{% set ns = namespace(all=[]) %}{% for i in range(3) %}{% set ns.all = ns.all + [i] %}{% endfor %}{{ ns.all }}", "[0, 1, 2]"),
        ("{% macro f(x, y=2) %}<{{ x * y }}>{% endmacro %}{{ f(3) }}{{ f('ab', y=3) }}", "<6><ababab>"),
        ("{% set x %}a{{ 1 }}b{% endset %}{{ x|upper }}{% filter upper %}q{% endfilter %}", "A1BQ"),
        ("{{ messages[::-1][0].content[1:3] }} {{ 'el' in messages[0].content }}", "el True"),
        ("{{ 'a-b-c'.split('-')[-1].strip('c') ~ 'x'.ljust(3) ~ 'y'.center(3) ~ '|' }}", "x   y |"),
        ("{{ 'abc'|replace('b', 'xx') }} {{ 'a\nb'|indent(2) }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ -7 % 3 }}", "axxc a\n  b 3 1024 2"),
        ("{{ 'a</think>b'.rsplit('</think>', 1)[-1] ~ 'a b c'.rsplit(maxsplit=1)[0] ~ 'xax'|trim('x') ~ 'aba'.rfind('a') }}", "ba ba2"),
        ("{{ 'é'.encode('utf-8')|length }}{{ 'a'.encode().decode('UTF-8') }}", "2a"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{% if messages is iterable and 1 is not none and 'a' is in ['a'] %}yes{% endif %}", "yes"),
    ],
)  # fmt: skip
def test_what_templates_do_stays_as_it_is(source, text):
    assert render(source, [USER], add_generation_prompt=False) == text


def test_a_context_that_holds_more_may_have_larger_values():
    assert (max_value_of(8192), max_value_of(1 << 20)) == (MAX_VALUE, 8 << 20)
    chat = [{"role": "user", "content": "word " * 1_000_000}]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match=r"output exceeds 4194304 characters"):
        render(source, chat)
    assert len(render(source, chat, max_value=max_value_of(1 << 20))) == 5_000_000
    with pytest.raises(RequestError, match=r"more than 8388608 characters"):
        render("{% set x = 'a' * 9000000 %}", [USER], max_value=max_value_of(1 << 20))


def test_what_is_repeated_less_than_never_gives_no_room_for_more(monkeypatch):
    monkeypatch.setattr(template_budget, "MADE_VALUES", 2)
    less = "{% set n = 0 - 4000000 %}{% for i in range(9) %}{% set x = 'ab' * n %}{% endfor %}"
    more = "{% for i in range(9) %}{% set y = 'a' * 4000000 %}{% endfor %}"
    with pytest.raises(RequestError, match="all that it makes exceeds"):
        render(less + more, [USER])
