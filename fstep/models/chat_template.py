"""Chat templates: Jinja programs that come with a checkpoint, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, cast

from fstep.state import CheckpointError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, object]  #: "role" and "content", and what else the template knows


class _RefusedError(Exception):
    """A template's own complaint about the messages."""


def compile_template(source: str) -> Template:
    """A template with the names that checkpoints expect: `raise_exception`, `strftime_now`, and a `tojson` for models.

    Raises `CheckpointError` if it isn't a Jinja template.
    """
    import jinja2  # not before it is used: the extra "hf" brings it, and it takes 0.1 s
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"chat template: isn't a Jinja template: {error}") from None


def render(template: Template, messages: Sequence[Message], names: Mapping[str, object]) -> str:
    """The text of a conversation.

    Raises `RequestError` for messages that aren't mappings with a role, or that the template refuses, and
    `CheckpointError` if the template itself fails.
    """
    checked = [_checked(index, message) for index, message in enumerate(_listed(messages))]
    try:
        return template.render(messages=checked, tools=None, documents=None, **names)
    except _RefusedError as error:
        raise RequestError("messages", checked, f"the chat template refuses them: {error}") from None
    except Exception as error:
        raise CheckpointError(f"chat template: fails with {type(error).__name__}: {error}") from error


def _listed(messages: object) -> Sequence[object]:
    listed = cast("Sequence[object]", messages) if isinstance(messages, Sequence) else ()
    if not listed or isinstance(messages, str | bytes):
        raise RequestError("messages", cast("object", messages), "must be a list of at least one message")
    return listed


def _checked(index: int, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}]", message, "must be a mapping with role and content")
    fields = dict(cast("Message", message))
    if not isinstance(fields.get("role"), str):
        raise RequestError(f"messages[{index}].role", fields.get("role"), "must be a string")
    return fields


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter would write HTML entities and \\u escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
