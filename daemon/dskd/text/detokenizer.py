"""The text of an answer, token by token."""

from __future__ import annotations

import codecs

from dskd.text.tokenizer import TextCodec

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text that comes in whole characters.

    All that `push` and `flush` return, put together, is `tokenizer.decode` of all the tokens. A token costs the same
    whatever came before it.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._pieces = codec.pieces
        self._characters = codecs.getincrementaldecoder("utf-8")("replace") if self._pieces.byte_level else _ByteRun()
        self._strips_space = self._pieces.strips_space

    def push(self, token_id: int) -> str:
        """The text this token completes; empty within a character and for special tokens."""
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            return self._strip(self._characters.decode(piece))
        return self._strip(self._characters.decode(b"", final=True) + piece)

    def flush(self) -> str:
        """What is left at the end of the answer: U+FFFD for a character that stayed incomplete."""
        return self._strip(self._characters.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        """SentencePiece puts a space before a text; it is no part of the answer."""
        if not self._strips_space or not text:
            return text
        self._strips_space = False
        return text.removeprefix(" ")


class _ByteRun(codecs.IncrementalDecoder):
    """Byte tokens of SentencePiece in a row. The run is UTF-8 as a whole, or every byte of it is U+FFFD.

    Whether it is, is known at its end only; that is how the `ByteFallback` decoder of `tokenizers` reads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run = bytearray()

    def decode(self, data: bytes, final: bool = False) -> str:  # type: ignore[override]
        self._run += data
        if not final:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)
