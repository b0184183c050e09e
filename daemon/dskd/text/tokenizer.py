"""Text to tokens and back, by the files of a model store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dskd.errors import InvalidArgumentError
from dskd.text.chat import ChatTemplate, Message
from dskd.text.pieces import TokenPieces
from dskquant.errors import StoreError
from dskquant.store import CHAT_TEMPLATE, TOKENIZER, StoreManifest


class TextCodec:
    """The tokenizer and the chat template of one model, shared by all its requests; several threads may use it."""

    def __init__(self, tokenizer: Tokenizer, manifest: StoreManifest, chat_template: str | None) -> None:
        # A file may have been saved with limits for training; prompts are never cut or filled up here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.pieces = TokenPieces(tokenizer)
        self.vocab_size = manifest.vocab_size
        self.longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self._tokenizer = tokenizer
        bos, ends = manifest.bos_token_id, manifest.end_token_ids
        self._chat = ChatTemplate(
            chat_template,
            bos_token="" if bos is None else self.decode_token(bos),
            eos_token=self.decode_token(ends[0]) if ends else "",
        )

    @classmethod
    def load(cls, store: Path) -> TextCodec:
        """Reads the files of `store`. Raises StoreError when one is missing or damaged."""
        manifest = StoreManifest.read(store)
        path, template = store / TOKENIZER, store / CHAT_TEMPLATE
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(f"{path} is missing; convert the model again") from None
        except Exception as error:  # the library raises no narrower type for a file it cannot read
            raise StoreError(f"{path}: cannot be read: {error}") from error
        try:
            return cls(tokenizer, manifest, template.read_text(encoding="utf-8") if template.is_file() else None)
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{template}: cannot be read: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens in it are recognised, those of its begin and end are added where wanted."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode_token(self, token_id: int) -> str:
        """One token for people to read: special tokens by name, a part of a character as U+FFFD."""
        return self.pieces.display(token_id)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text that asks the model for the next message, to be encoded without special tokens (it has its own).

        Raises FailedPreconditionError without a chat template, InvalidArgumentError for messages it does not take.
        """
        return self._chat.render(messages)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError for the first id that is not of this vocabulary."""
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidArgumentError(
                    "tokens.ids", f"{token_id} at position {position}: ids are 0 to {self.vocab_size - 1}"
                )
