"""Renders chat messages with the model's own Jinja template, in a sandbox that can neither reach Python nor change its input.

A template that raises (two user turns in a row, a role it does not know) is the client's mistake, not ours, and becomes
InvalidRequest. The environment follows the conventions Hugging Face templates are written for; nothing here knows tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2.ext import loopcontrols

from common.errors import InvalidRequest


class ChatTemplate:
    """A compiled template. Raises jinja2.TemplateSyntaxError for a broken source when built."""

    def __init__(self, source: str, special_tokens: dict[str, str | None]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = {name: text for name, text in special_tokens.items() if text is not None}

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text; contains its own BOS where the model wants one. Raises InvalidRequest when the template refuses."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
