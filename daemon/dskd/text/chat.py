"""Chat templates, rendered as transformers does (its utils/chat_template_utils.py): in a sandbox, with its helpers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dskd.errors import FailedPreconditionError, InvalidArgumentError

SUBJECT = "chat template"
FIELD = "chat.messages"
MAX_RANGE = 10_000
RENDER_S = 5.0
"""A template that loops for longer is given up."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The Jinja template of one model. A model without one, or with a broken one, still continues plain prompts."""

    def __init__(self, source: str | None, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template: jinja2.Template | None = None
        self._unusable = "the model has no chat template: send a prompt instead"
        if source is not None:
            self._compile(source)

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the answer begins.

        Raises FailedPreconditionError without a usable template, or for one that takes too much time or memory;
        InvalidArgumentError for messages it does not take.
        """
        if self._template is None:
            raise FailedPreconditionError(SUBJECT, self._unusable)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
                **{_CHECK: _deadline()},
            )
        except (MemoryError, OverflowError, TimeoutError) as error:
            reason = str(error) or "out of memory"
            raise FailedPreconditionError(SUBJECT, f"the chat template of the model asks too much: {reason}") from error
        # A template is a program of the model's author: besides its own refusals, operations on values it did not
        # expect may raise any of these.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidArgumentError(FIELD, f"not accepted by the chat template of the model: {error}") from error

    def _compile(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            self._unusable = f"the chat template of the model is broken: {error}"


_CHECK = f"check_{secrets.token_hex(8)}"
"""Name of the check in each turn of a loop and call of a macro; no template can set a variable it does not know."""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops can be ended."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        check = nodes.ExprStmt(nodes.Call(nodes.Name(_CHECK, "load"), [], [], None, None))
        repeated: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for node in repeated:
            node.body.insert(0, check)
        return template


def _deadline() -> Callable[[], None]:
    end = time.monotonic() + RENDER_S

    def check() -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {RENDER_S:g} s")

    return check


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks answers for training: here its content and nothing else."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "range": _short_range,
    }
    environment.globals.update(helpers)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike the filter of jinja2, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _short_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise OverflowError(f"a range of {len(numbers)} numbers; at most {MAX_RANGE} are allowed")
    return numbers


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
