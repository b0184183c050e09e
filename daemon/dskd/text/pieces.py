"""What each token adds to a text: the decoder of a tokenizer.json, taken apart so that each token stands by itself.

Two kinds of decoder are known, those of every model we convert: byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek), where
a token is some bytes, and SentencePiece (Llama 2, Mistral), where it is some text or one byte of a character.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from dskquant.errors import StoreError

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
BYTE_LEVEL = ["ByteLevel"]
SENTENCE_PIECE = ["Replace", "ByteFallback", "Fuse"]
STRIP = "Strip"

NOTHING = b""


class TokenPieces:
    """The piece of each token, worked out when first asked for.

    A piece of `bytes` makes characters together with its neighbours; a piece of `str` is whole by itself. Special
    tokens and ids without a token add nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = _decoder_steps(tokenizer)
        self.byte_level = _names(steps) == BYTE_LEVEL
        self.strips_space = False  # one, at the start of a text
        self._replaced, self._replacement = "", ""
        if not self.byte_level:
            self._read_sentence_piece(steps)
        self._tokenizer = tokenizer
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._pieces: dict[int, bytes | str] = {}

    def __getitem__(self, token_id: int) -> bytes | str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def display(self, token_id: int) -> str:
        """The token by itself, for people: special tokens by their names, broken characters as U+FFFD."""
        if token_id in self._special:
            return self._tokenizer.id_to_token(token_id) or ""
        piece = self[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def _piece(self, token_id: int) -> bytes | str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return NOTHING
        if self.byte_level:
            return _bytes_of(token)
        text = token.replace(self._replaced, self._replacement)
        byte = BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text

    def _read_sentence_piece(self, steps: list[dict[str, Any]]) -> None:
        if _names(steps) not in (SENTENCE_PIECE, [*SENTENCE_PIECE, STRIP]) or "String" not in steps[0]["pattern"]:
            raise _unknown(steps)
        replace, strip = steps[0], steps[-1]
        self._replaced, self._replacement = replace["pattern"]["String"], replace["content"]
        self.strips_space = strip["type"] == STRIP
        if self.strips_space and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
            raise _unknown(steps)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _names(steps: list[dict[str, Any]]) -> list[str]:
    return [step["type"] for step in steps]


def _unknown(steps: list[dict[str, Any]]) -> StoreError:
    return StoreError(f"the decoder {' + '.join(_names(steps))} of the tokenizer is not supported")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (bytes_to_unicode of GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """A token with any character outside the alphabet is an added one and stands for its own text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()
