"""Expressions of chat templates that could take any memory at once."""

from __future__ import annotations

import pytest

from rft_models.tokenization.template_limits import oversized

USUAL = (
    "{% for message in messages %}{% if loop.index0 % 2 == 0 %}{{ '<|' + message.role + '|>' }}{% endif %}{% endfor %}",
    "{{ tools | tojson(indent=4) }}{{ text | indent(4) }}{{ text | indent(width=2) }}{{ '-' * 40 }}{{ 2 * n }}",
    "{% generation %}{{ messages[0].content.strip() }}{% endgeneration %}{% break %}",
    "{{ '%s: %d' | format(a, 3) }}{{ '%5d' % n }}{{ '{:>10}'.format(x) }}{{ date | replace('a', 'b') }}",
    "no expression at all",
    "{% what is this",
)


@pytest.mark.parametrize("template", USUAL)
def test_what_templates_do_is_taken(template: str) -> None:
    assert oversized(template) == ""


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 10 ** 10 }}", "a power in line 1"),
        ("\n{{ 'a' * 10000000000 }}", "a product without a small factor in line 2"),
        ("{% set n = 100000 * 100000 %}", "a product"),
        ("{{ text * n }}", "a product"),
        ("{{ 'a'.ljust(10000000000) }}", "ljust without a small width"),
        ("{{ 'a'.zfill(n) }}", "zfill"),
        ("{{ 'a' | center(999999) }}", "center"),
        ("{{ 'a' | indent(width=n) }}", "indent"),
        ("{{ '%9999999999d' % 1 }}", "a format with a large width"),
        ("{{ '%-9999999999d' | format(1) }}", "a format"),
        ("{{ '{:>9999999999}'.format(1) }}", "a format"),
    ],
)
def test_what_takes_any_memory_is_named_with_its_line(template: str, said: str) -> None:
    assert said in oversized(template)
