"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string, and holds back only what may still become one.

    The first is the one that is complete first; of several complete at the same character, the longest. So it does not
    matter into which pieces the text is cut. Knuth-Morris-Pratt: a character costs a constant time per stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty."""
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text to pass on, whether a stop string was found). After one was found, nothing is passed on any more."""
        if self._stopped:
            return "", True
        if not self._searches:
            return text, False
        found = self._find(text)
        text = self._held + text
        if found is not None:
            self._stopped = True
            end, length = found
            end += len(self._held)
            self._held = ""
            return text[: end - length], True
        keep = len(text) - max(search.matched for search in self._searches)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The text held back, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """End in `text`, and length, of the first stop string complete in it."""
        for index, character in enumerate(text):
            complete = [search.length for search in self._searches if search.advance(character)]
            if complete:
                return index + 1, max(complete)
        return None


class _Search:
    """How much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.length = len(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Takes one more character; whether the stop string is complete with it."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest shorter prefix that it ends with."""
    borders = [0]
    for character in stop[1:]:
        border = borders[-1]
        while border and stop[border] != character:
            border = borders[border - 1]
        borders.append(border + 1 if stop[border] == character else 0)
    return borders
