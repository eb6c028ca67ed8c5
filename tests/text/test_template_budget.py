"""Templates that would run or grow forever: each ends soon, in little memory."""

import resource
import sys
import time

import pytest

from nano_inference.errors import InvalidRequest
from nano_inference.text import sandbox
from nano_inference.text.budget import MAX_SECONDS, MAX_TEXT
from nano_inference.text.chat import render_chat

DOUBLE = (
    "{% set ns = namespace(x='x', l=[1], t=(1,), u=(1,)) %}{% for i in range(99) %}BODY{% "
    "endfor %}END"
)
SHARED = DOUBLE.replace("BODY", "{% set ns.t = (ns.t, ns.t) %}{% set ns.u = (ns.u, ns.u) %}")
KEPT = """{% set ns = namespace(l=[]) %}{% set b = 'x ' * 4000000 %}
{% for i in range(99999) %}{% set ns.l = ns.l + [BODY] %}{% endfor %}"""

SLOW = [
    "{% set b = 'x' * 8000000 %}{% for i in range(100000) if 'y' in b %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% set l = range(100000) | list %}{{ range(100000) | reject('in', l) | list }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x %}{% for i in range(100000) %}{% for j in range(100000) %}a{% endfor %}{% endfor "
    "%}{% endset %}",
]
ENDLESS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
]
LARGE = [
    *(
        "'x' * 10**9",
        "10**9 * 'x'",
        "[1] * 10**9",
        "messages * 10**9",
        "10 ** (10 ** 8)",
        "2 ** 600 * 2 ** 600",
    ),
    *(
        '"%1000000000d" % 1',
        '"%*d" % (1000000000, 1)',
        '"%.1000000000f" % 1.0',
        '"%(a)1000000000s" % {"a": 1}',
    ),
    *('"%1000000000d" | format(1)', '"{:1000000000}".format(1)', '"{:{}}".format(1, 10**9)'),
    *(
        '"{0:>{1}}".format(1, 10**9)',
        '"{a:1000000000}".format_map({"a": 1})',
        "('{0}' * 1000000).format('x' * 1000000)",
    ),
    *(
        "'x' | center(10**9)",
        "'x'.ljust(10**9)",
        "'x'.center(10**9)",
        "('x' | attr('rjust'))(10**9)",
        "'x'.zfill(10**9)",
    ),
    *(
        "'\\t'.expandtabs(10**9)",
        "('\\t' * 10000).expandtabs(tabsize=10**6)",
        "(1).to_bytes(10**9, 'big')",
    ),
    *(
        "'x'.encode().ljust(10**9)",
        "'aaaa'.replace('', 'x' * 8000000)",
        "'aaaa' | replace('', 'x' * 8000000)",
    ),
    *(
        "'aaaa'.translate({97: 'x' * 8000000})",
        "[1] | batch(10**9, 0) | list",
        "[1] | slice(10**9) | list",
    ),
    *(
        "1.5 | round(10**9, 'ceil')",
        "('f' * 8000000) | int(base=16) // 3",
        "[[1]] | tojson(indent=10**9)",
    ),
    *(
        "('a\\n' * 1000000) | indent(10**6)",
        "([[1] * 1000] * 1000) | sum(start=[])",
        "strftime_now('%Y' * 1000000)",
    ),
    *(
        "['x', 'x'] | map('center', 10**9) | list",
        "('x' * 8000000) ~ ('x' * 8000000)",
        "lipsum(n=100000)",
    ),
    *(
        "['x' * 4000000, 'x' * 4000000, 'x'] | join('x' * 4000000)",
        "'x'.join(['x' * 8000000, 'x' * 8000000])",
    ),
    *("{}.fromkeys('x' * 8000000)", "'x' | wordwrap(1)"),
]
GROWING = [
    *(
        DOUBLE.replace("BODY", body)
        for body in ["{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x + ns.x %}"]
    ),
    *(
        DOUBLE.replace("BODY", body)
        for body in ["{% set ns.x = [ns.x, ns.x] | join %}", "{% set ns.l = ns.l + ns.l %}"]
    ),
    DOUBLE.replace("BODY", "{% set ns.x = ''.join([ns.x, ns.x]) %}"),
    DOUBLE.replace("BODY", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    DOUBLE.replace("BODY", "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    DOUBLE.replace("BODY", "{% set ns.x = ns.x | replace('x', 'xx') %}"),
    DOUBLE.replace("BODY", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"),
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
    + DOUBLE.replace("BODY", "{% set ns.x = m(ns.x) %}"),
    *(
        SHARED.replace("END", f"{{{{ {end} }}}}")
        for end in ["ns.t", "ns.t ~ ''", "ns.t | string", "ns.t | tojson", "'%s' % [ns.t]"]
    ),
    *(
        SHARED.replace("END", f"{{{{ {end} }}}}")
        for end in ["ns.t == ns.u", "ns.t is eq(ns.u)", "[ns.t, ns.u] | sort"]
    ),
    *(
        SHARED.replace("END", f"{{{{ {end} }}}}")
        for end in ["{ns.t: 1}", "{}.get(ns.t)", "{}[ns.t]", "[ns.t].index(ns.u)"]
    ),
    *(
        KEPT.replace("BODY", body)
        for body in ["'x' * 8000000", "b[1:]", "b.upper()", "b | upper", "b.split(' ')"]
    ),
    "{% set b = 'x' * 8000000 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
    "{% set b = 'x' * 8000000 %}{% set y %}{% for i in range(99) %}{{ b }}{% endfor %}{% endset %}",
]


def refused(template: str, seconds: float = MAX_SECONDS) -> str:
    """Return the reason why the template ends."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a template's code raises anything
        sandbox.render(template, {"messages": [{"role": "user", "content": "Hi"}]}, seconds)
    assert time.process_time() - begin < 4
    kilobytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (
        1024 if sys.platform == "darwin" else 1
    )
    assert kilobytes < 200 * 1024
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("template", SLOW)
def test_time_is_limited(template: str) -> None:
    assert "takes longer than 2 s" in refused(template)


@pytest.mark.thorough(
    cases=[
        "template13",
        "template14",
        "template15",
        "template16",
        "template17",
        "template18",
        "template19",
        "template20",
        "template21",
        "template23",
        "{{ ('{0}' * 1000000).format('x' * 1000000) }}",
    ]
)
@pytest.mark.parametrize(
    "template", [*ENDLESS, *GROWING, *("{{ " + expression + " }}" for expression in LARGE)]
)
def test_size_is_limited(template: str) -> None:
    assert "takes longer" not in refused(template, 60.0)


@pytest.mark.thorough
def test_request_fails() -> None:
    with pytest.raises(
        InvalidRequest,
        match="chat template failed on these messages: it makes more than 8,388,608 char",
    ):
        render_chat("{{ 'x' * 10**9 }}", [{"role": "user", "content": "Hi"}], special_tokens={})
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="it takes longer than 2 s"):
        render_chat(SLOW[0], [{"role": "user", "content": "Hi"}], special_tokens={})
    assert time.process_time() - begin < 5  # with a probe of the rendered text


def test_errors_contain_no_addresses_or_paths() -> None:
    for template in (
        "{{ messages[0].get }}",
        "{{ (1).bit_length.x() }}",
        "{% include 'x' %}",
        "{% for %}",
        "{{ raise_exception }}",
    ):
        text = refused(template)
        assert " at 0x" not in text
        assert "/" not in text


def test_conversation_within_limits_is_rendered() -> None:
    def render(template: str) -> str:
        return sandbox.render(
            template, {"messages": [{"role": "user", "content": "a b"}], "n": None}
        )

    assert len(render("{{ 'x' * (8 * 1024 * 1024) }}")) == MAX_TEXT
    assert (
        render("{{ 10 ** 3 + 2 * 3 - 1 // 1 % 7 }} {{ 'a' 'b' * 2 }} {{ [1] + [2] }} {{ 7 / 2 }}")
        == "1005 abab [1, 2] 3.5"
    )
    assert (
        render("{{ '%05.1f|%s' % (2, 'x') }} {{ '%d' | format(3) }} {{ '{{{0:>4}}}'.format(5) }}")
        == "002.0|x 3 {   5}"
    )
    assert (
        render("{{ 'x' | center(3) }}{{ ['a', 1] | join('-') }}{{ 'aXb' | replace('X', n) }}")
        == " x a-1aNoneb"
    )
    assert (
        render(
            "{{ [{'a': 1}, {'a': 2}] | sum('a') }} {{ 2.55 | round(1, 'floor') }} {{ 1.5 | round "
            "| int }}"
        )
        == "3 2.5 2"
    )
    assert (
        render("{{ [1, 2, 3] | batch(2, 0) | list }} {{ 'a\nb' | indent(2) }} {{ [3, 1] | sort }}")
        == "[[1, 2], [3, 0]] a\n  b [1, 3]"
    )
    assert (
        render(
            "{{ messages[::-1][0].content.split(' ') }} {{ messages | map(attribute='role') | "
            "first }}"
        )
        == "['a', 'b'] user"
    )
    assert (
        render("{{ {'b': 1, 'a': [true, n]} | tojson(sort_keys=true, separators=(',', ':')) }}")
        == '{"a":[true,null],"b":1}'
    )
    assert (
        render(
            "{{ {(1, 2): 3}[(1, 2)] }} {{ 'b' in 'abc' and 1 < 2 <= 2 != 3 }} {{ n }} {{ "
            "undefined_name }}|"
        )
        == "3 True None |"
    )
    assert (
        render(
            "{% for m in messages if m.role is in(['user']) %}{{ loop.index }}{% else %}none{% "
            "endfor %}"
        )
        == "1"
    )
    assert (
        render(
            "{% filter upper %}a{{ caller is defined }}{% endfilter %}{{ 'x'.replace('x', 'yy', "
            "1) }}"
        )
        == "AFALSEyy"
    )
    assert render(
        "{{ messages[0] | items | list }} {{ dict(a=1) }} {{ 'Ab'.lower() ~ 1 ~ n }}"
    ) == ("[('role', 'user'), ('content', 'a b')] {'a': 1} ab1None")
