"""An answer as it comes: for people with the mode that made each stretch of it, as bare text, or as JSON lines."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dskapi.v1.inference_pb2 import FINISH_REASON_UNSPECIFIED, GeneratedToken, GenerateResponse
from dskctl.jsonform import to_json
from dskctl.tables import table
from dskctl.words import MODES, NOTHING, finish_word, mode_word, printable

MODE_STYLES = {"int4": "yellow", "int8": "green", "fp16": "cyan", "fp32": "magenta"}


class AnswerView(ABC):
    """Shows one answer as it comes. Leaving its context ends it, be it whole or broken off."""

    @abstractmethod
    def write(self, response: GenerateResponse) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    def __enter__(self) -> AnswerView:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class JsonAnswer(AnswerView):
    """One JSON object a line for each response."""

    def write(self, response: GenerateResponse) -> None:
        print(json.dumps(to_json(response), ensure_ascii=False), flush=True)

    def end(self) -> None:
        """Every line is whole already."""


class RawAnswer(AnswerView):
    """The text of the answer and nothing else; a terminal gets a final line end."""

    def write(self, response: GenerateResponse) -> None:
        shown = printable(response.text) if sys.stdout.isatty() else response.text
        print(shown, end="", flush=True)

    def end(self) -> None:
        if sys.stdout.isatty():
            print()


class MarkedAnswer(AnswerView):
    """Marks the text wherever its mode changes, in colours where the console has them, and sums the answer up."""

    def __init__(self, console: Console, with_legend: bool = True) -> None:
        self._console = console
        self._coloured = console.is_terminal and not console.no_color and console.color_system is not None
        self._with_legend = with_legend and self._coloured
        self._mode = NOTHING
        self._shown_mode = NOTHING
        self._tokens: list[GeneratedToken] = []
        self._last = GenerateResponse()

    @property
    def tokens_by_mode(self) -> Counter[str]:
        """In the order in which the modes first came."""
        return Counter(mode_word(token.precision) for token in self._tokens)

    def write(self, response: GenerateResponse) -> None:
        """Text counts as made by the mode of the last token that came with it or before it."""
        if self._with_legend:
            self._console.print(legend())
            self._with_legend = False
        self._last = response
        self._tokens += response.tokens
        if response.tokens:
            self._mode = mode_word(response.tokens[-1].precision)
        if response.text:
            self._mark_change()
            self._put(response.text, MODE_STYLES.get(self._mode, ""))

    def end(self) -> None:
        """Closes the line of the answer; sums up when it is whole."""
        if self._shown_mode != NOTHING:
            self._console.print()
        if self._last.finish_reason != FINISH_REASON_UNSPECIFIED:
            if self._tokens and self._tokens[0].HasField("logprob"):
                self._console.print(logprob_table(self._tokens))
            self._console.print(Text(summary(self.tokens_by_mode, self._last), style="dim"))

    def _mark_change(self) -> None:
        if self._mode != self._shown_mode:
            self._shown_mode = self._mode
            self._put(marker(self._mode), f"bold {MODE_STYLES.get(self._mode, '')}")

    def _put(self, text: str, style: str) -> None:
        shown = printable(text) if self._console.is_terminal else text
        if self._coloured:
            self._console.print(Text(shown, style=style), end="", soft_wrap=True)
        else:
            self._console.file.write(shown)
            self._console.file.flush()


def marker(mode: str) -> str:
    """What stands in the text where `mode` takes over."""
    return f"⟦{mode}⟧"


def legend() -> Text:
    """The modes in their colours."""
    return Text(" ").join(Text(marker(mode), style=MODE_STYLES.get(mode, "")) for mode in MODES)


def summary(tokens_by_mode: Counter[str], last: GenerateResponse) -> str:
    """One line on a finished answer."""
    timings, usage = last.timings, last.usage
    modes = ", ".join(f"{mode} {count}" for mode, count in tokens_by_mode.items()) or "none"
    parts = [
        f"{usage.generated_tokens} tokens ({modes})",
        f"first token {timings.time_to_first_token_ms:.0f} ms",
        f"{timings.tokens_per_second:.1f} tokens/s",
        finish_word(last.finish_reason),
    ]
    if usage.preemptions:
        parts.append(f"preempted {usage.preemptions} times")
    return " · ".join(parts)


def logprob_table(tokens: list[GeneratedToken]) -> Table:
    """One row for each token: what it is, what made it, how probable it and its rivals were."""
    made = table("TOKEN", "MODE", "LOGPROB", "MOST PROBABLE", right=("TOKEN", "LOGPROB"))
    for token in tokens:
        rivals = "  ".join(f"{rival.text!r} {rival.logprob:.3f}" for rival in token.top_logprobs)
        made.add_row(str(token.id), mode_word(token.precision), f"{token.logprob:.3f}", rivals)
    return made
