"""The one seam between verbs and the terminal: a verb shows messages, the printer decides on tables or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dskctl.answer import AnswerView, JsonAnswer, MarkedAnswer, RawAnswer
from dskctl.jsonform import to_json
from dskctl.words import printable

M = TypeVar("M", bound=Message)

Tell = Callable[[str], None]
"""Shows a line in place of the one before."""

UNLIMITED_WIDTH = 10_000
"""Columns when the output is no terminal: nothing is cut or wrapped for a reader that is a program."""


class PlainConsole(Console):
    """A rich console that takes text literally and leaves a broken pipe to its caller."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else UNLIMITED_WIDTH
        super().__init__(markup=False, emoji=False, highlight=False, width=width)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


class Printer(Protocol):
    """Shows what the daemon says; `as_text` renders a message for people."""

    def show(self, message: M, as_text: Callable[[M], RenderableType]) -> None:
        """A message that is a whole answer."""

    def show_item(self, message: M, as_text: Callable[[M], RenderableType]) -> None:
        """One message of a stream."""

    def answer(self, raw: bool = False) -> AnswerView:
        """A view for the next generated answer; `raw` is its text alone."""

    def renewing(
        self, as_view: Callable[[M], RenderableType], as_lines: Callable[[M], RenderableType]
    ) -> AbstractContextManager[Callable[[M], None]]:
        """Shows messages while the context is open, each in place of the one before; without a screen as lines."""

    def note(self, line: str) -> None:
        """A line for people alone."""

    def waiting(self, line: str) -> AbstractContextManager[Tell | None]:
        """Shows that something takes its time, while the context is open; None where nobody would see it."""


class TextPrinter:
    """Tables and lines for people."""

    def __init__(self) -> None:
        self._console = PlainConsole()
        self._answers = 0

    def show(self, message: M, as_text: Callable[[M], RenderableType]) -> None:
        self._console.print(as_text(message))

    show_item = show

    def answer(self, raw: bool = False) -> AnswerView:
        self._answers += 1
        return RawAnswer() if raw else MarkedAnswer(self._console, with_legend=self._answers == 1)

    @contextmanager
    def renewing(
        self, as_view: Callable[[M], RenderableType], as_lines: Callable[[M], RenderableType]
    ) -> Iterator[Callable[[M], None]]:
        if not self._console.is_terminal:
            yield lambda message: self.show_item(message, as_lines)
            return
        with Live(console=self._console, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda message: live.update(as_view(message), refresh=True)

    def note(self, line: str) -> None:
        self._console.print(line)

    def waiting(self, line: str) -> AbstractContextManager[Tell | None]:
        return self._spinning(line) if self._console.is_terminal else nullcontext()

    @contextmanager
    def _spinning(self, line: str) -> Iterator[Tell]:
        with self._console.status(Text(printable(line))) as status:
            yield lambda line: status.update(Text(printable(line)))


class JsonPrinter:
    """JSON for programs: one document, or one line for each message of a stream."""

    def show(self, message: M, as_text: Callable[[M], RenderableType]) -> None:
        print(json.dumps(to_json(message), indent=2, ensure_ascii=False), flush=True)

    def show_item(self, message: M, as_text: Callable[[M], RenderableType]) -> None:
        print(json.dumps(to_json(message), ensure_ascii=False), flush=True)

    def answer(self, raw: bool = False) -> AnswerView:
        return JsonAnswer()

    def renewing(
        self, as_view: Callable[[M], RenderableType], as_lines: Callable[[M], RenderableType]
    ) -> AbstractContextManager[Callable[[M], None]]:
        return nullcontext(lambda message: self.show_item(message, as_lines))

    def note(self, line: str) -> None:
        """Nobody reads it."""

    def waiting(self, line: str) -> AbstractContextManager[Tell | None]:
        return nullcontext()
