"""Tokenizers out of the metadata of GGUF files, for the `tokenizers` library.

Keys and their meaning: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section Tokenizer. The ids are those
of the model's original tokenizer; llama.cpp gives the same but for the few cases told in `dskquant.pre_tokenizers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from dskquant.errors import SourceError
from dskquant.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer

MODEL = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"
MERGES = "tokenizer.ggml.merges"
BOS = "tokenizer.ggml.bos_token_id"
EOS = "tokenizer.ggml.eos_token_id"
UNKNOWN = "tokenizer.ggml.unknown_token_id"
END_KEYS = (EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
ADD_BOS = "tokenizer.ggml.add_bos_token"
ADD_EOS = "tokenizer.ggml.add_eos_token"
ADD_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
CHAT_TEMPLATE = "tokenizer.chat_template"

BYTE_LEVEL = "gpt2"
SENTENCE_PIECE = "llama"
SENTENCE_PIECE_IDS = {UNKNOWN: 0, BOS: 1, EOS: 2}
"""The ids of Llama's own vocabulary, meant by files that do not name theirs."""

END_TEXTS = frozenset(
    {
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|EOT|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Tokens that end an answer whether or not the file says so: many files name only one of a model's end tokens."""

SPACE = "\u2581"

Type = gguf.TokenType
ADDED = {Type.UNKNOWN, Type.CONTROL, Type.USER_DEFINED}
FieldType = gguf.GGUFValueType


def tokenizer_from_gguf(reader: gguf.GGUFReader) -> Tokenizer:
    """The tokenizer of the metadata. Raises SourceError, naming file and key, for damaged or unknown ones."""
    metadata = _Metadata(reader)
    vocabulary = _Vocabulary.read(metadata)
    model = metadata.text(MODEL)
    if model == BYTE_LEVEL:
        pre = _pre_tokenizer(metadata)
        tokenizer = _byte_level(metadata, vocabulary, pre)
        add_bos = pre.add_bos
    elif model == SENTENCE_PIECE:
        tokenizer = _sentence_piece(metadata, vocabulary)
        add_bos = True
    else:
        raise metadata.refusal(MODEL, f"{model!r} is not supported; known: {BYTE_LEVEL}, {SENTENCE_PIECE}")
    _add_tokens(tokenizer, vocabulary)
    _add_ends(tokenizer, metadata, vocabulary, add_bos)
    return tokenizer


def chat_template_from_gguf(reader: gguf.GGUFReader) -> str | None:
    """The Jinja template of conversations, None when the file has none."""
    metadata = _Metadata(reader)
    return metadata.text(CHAT_TEMPLATE) if metadata.has(CHAT_TEMPLATE) else None


def bos_token_id_from_gguf(reader: gguf.GGUFReader) -> int | None:
    """The token that begins a text, None when the file names none."""
    metadata = _Metadata(reader)
    return metadata.token_id(BOS, metadata.count(TOKENS))


def end_token_ids_from_gguf(reader: gguf.GGUFReader) -> tuple[int, ...]:
    """The tokens that end an answer: first those the file names, then its control tokens known to be one."""
    metadata = _Metadata(reader)
    vocabulary = _Vocabulary.read(metadata)
    named = [metadata.token_id(key, len(vocabulary.tokens)) for key in END_KEYS]
    known = [token_id for token_id, text in vocabulary.added() if text in END_TEXTS]
    return tuple(dict.fromkeys([token_id for token_id in named if token_id is not None] + known))


class _Metadata:
    """The keys of a file, checked for presence and type."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self._path = reader.data.filename

    def refusal(self, key: str, message: str) -> SourceError:
        return SourceError(f"{self._path}: {key} {message}")

    def has(self, key: str) -> bool:
        return key in self._fields

    def count(self, key: str) -> int:
        return len(self._field(key, "array").data)

    def text(self, key: str) -> str:
        text: str = self._contents(key, "string", FieldType.STRING)
        return text

    def texts(self, key: str) -> list[str]:
        texts: list[str] = self._contents(key, "array of strings", FieldType.ARRAY, FieldType.STRING)
        return texts

    def numbers(self, key: str, count: int, *types: gguf.GGUFValueType) -> list[Any]:
        """An array of `count` numbers; all zero when absent."""
        if not self.has(key):
            return [0] * count
        if (found := self.count(key)) != count:
            raise self.refusal(key, f"has {found} entries for {count} tokens")
        if self._fields[key].types[-1] not in types:
            raise self.refusal(key, f"must be an array of {' or '.join(kind.name.lower() for kind in types)}")
        numbers: list[Any] = self._fields[key].contents()
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        return self._contents(key, "bool", FieldType.BOOL) if self.has(key) else default

    def token_id(self, key: str, tokens: int) -> int | None:
        """A token id below `tokens`; None when absent."""
        default = SENTENCE_PIECE_IDS.get(key) if self.text(MODEL) == SENTENCE_PIECE else None
        value = self._fields[key].contents() if self.has(key) else default
        if value is not None and (type(value) is not int or not 0 <= value < tokens):
            raise self.refusal(key, f"is {value!r}, but the tokens are 0 to {tokens - 1}")
        return value

    def _contents(self, key: str, kind: str, *types: gguf.GGUFValueType) -> Any:
        field = self._field(key, kind)
        if tuple(field.types) != types:
            raise self.refusal(key, f"must be of type {kind}")
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise self.refusal(key, f"is not UTF-8: {error}") from error

    def _field(self, key: str, kind: str) -> gguf.ReaderField:
        if not self.has(key):
            raise self.refusal(key, f"({kind}) is missing")
        return self._fields[key]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens by id, their ids by text, and their types; all normal where the file gives no types."""

    tokens: list[str]
    ids: dict[str, int]
    types: list[int]

    @classmethod
    def read(cls, metadata: _Metadata) -> _Vocabulary:
        # A dictionary cannot hold several tokens without text: they get the names llama.cpp gives them.
        tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(metadata.texts(TOKENS))]
        ids = {text: token_id for token_id, text in enumerate(tokens)}
        if len(ids) != len(tokens):
            doubled = next(token_id for token_id, text in enumerate(tokens) if ids[text] != token_id)
            text = tokens[doubled]
            raise metadata.refusal(TOKENS, f"has {text!r} twice, as {doubled} and {ids[text]}")
        return cls(tokens, ids, metadata.numbers(TYPES, len(tokens), FieldType.INT32))

    def added(self) -> Iterator[tuple[int, str]]:
        """Tokens found in a text before it is split into words."""
        return (
            (token_id, text)
            for token_id, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in ADDED
        )

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no part of the text; a user-defined token is."""
        return self.types[token_id] != Type.USER_DEFINED


def _pre_tokenizer(metadata: _Metadata) -> PreTokenizer:
    name = metadata.text(PRE) if metadata.has(PRE) else DEFAULT
    if name not in PRE_TOKENIZERS:
        raise metadata.refusal(PRE, f"{name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: _Metadata, vocabulary: _Vocabulary, pre: PreTokenizer) -> Tokenizer:
    """Byte-level BPE: each byte is a printable character, words are merged by the ranks in the file."""
    merges = list(_read_merges(metadata, vocabulary))
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(metadata: _Metadata, vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    for rank, merge in enumerate(metadata.texts(MERGES)):
        left, _, right = merge.partition(" ")
        for part in (left, right, left + right):
            if part not in vocabulary.ids:
                raise metadata.refusal(MERGES, f"number {rank}, {merge!r}, needs {part!r}, which is no token")
        yield left, right


def _sentence_piece(metadata: _Metadata, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: pieces are merged by their scores; characters without a piece become byte tokens."""
    scores = metadata.numbers(SCORES, len(vocabulary.tokens), FieldType.FLOAT32)
    unknown = metadata.token_id(UNKNOWN, len(vocabulary.tokens))
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.flag(ADD_SPACE_PREFIX, default=True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two others, the best score first, as SentencePiece merges them."""
    ids = vocabulary.ids
    found = []
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in ADDED or kind == Type.BYTE:
            continue
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(-scores[token_id], ids[a], ids[b]) for a, b in halves if a in ids and b in ids]
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    for token_id, text in vocabulary.added():
        special = vocabulary.is_special(token_id)
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False, special=special)])


def _add_ends(tokenizer: Tokenizer, metadata: _Metadata, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """Makes the tokenizer put the tokens of begin and end around a text, where the file wants them."""
    template = ["$A"]
    special = []
    for name, key, flag, default in (("bos", BOS, ADD_BOS, add_bos), ("eos", EOS, ADD_EOS, False)):
        if not metadata.flag(flag, default):
            continue
        token_id = metadata.token_id(key, len(vocabulary.tokens))
        if token_id is None:
            raise metadata.refusal(key, f"is missing, but {flag} is true")
        special.append({"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]})
        template = [name, *template] if name == "bos" else [*template, name]
    if special:
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
