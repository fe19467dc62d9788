"""Chat templates: what they are given, what they may not do, and how they fail."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fstep.models.chat_template import compile_template, render
from fstep.state import CheckpointError, RequestError

HI = [{"role": "user", "content": "hi"}]


def rendered(source: str, messages: Any = HI, **names: object) -> str:
    return render(compile_template(source), messages, names)


def test_blocks_leave_no_lines_behind() -> None:
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m['content'] }}\n    {% endif %}\n{% endfor %}\n"
    )
    assert rendered(source) == "hi\n"


def test_names_and_loop_controls() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ tools is none }}"
    assert rendered(source, HI * 2, bos_token="<s>") == "<s>hiTrue"


def test_json_is_plain() -> None:
    source = "{{ messages[0].content | tojson }} {{ {'b': 1, 'a': [2]} | tojson(indent=1) }}"
    assert (
        rendered(source, [{"role": "user", "content": "<é & 'x'>"}]) == '"<é & \'x\'>" {\n "b": 1,\n "a": [\n  2\n ]\n}'
    )


def test_the_date() -> None:
    assert re.fullmatch(r"20\d\d-\d\d", rendered("{{ strftime_now('%Y-%m') }}"))


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    with pytest.raises(RequestError, match="system first") as caught:
        rendered(source)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        ([], "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"content": "x"}], "messages[1].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
    ],
)
def test_messages_that_are_none(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered("{{ messages }}", messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].nothing.there }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        rendered(source)


def test_messages_are_unchanged() -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered("{% set x = messages[0].content %}{{ x }}", messages)
    assert messages == HI


def test_what_isnt_a_template() -> None:
    with pytest.raises(CheckpointError, match="isn't a Jinja template"):
        compile_template("{% if %}")
