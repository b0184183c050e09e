"""The tokenizer of a GGUF file gives the ids that llama.cpp, transformers and sentencepiece give.

Their ids were recorded by tests/golden/make_tokenizer_golden.py.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dskquant.errors import SourceError
from dskquant.pre_tokenizers import PRE_TOKENIZERS
from dskquant.tokenizer import (
    bos_token_id_from_gguf,
    chat_template_from_gguf,
    end_token_ids_from_gguf,
    tokenizer_from_gguf,
)

TESTS = Path(__file__).parent
SMOLLM = TESTS.parent / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def golden(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((TESTS / "golden" / f"tokenizer_{name}.json").read_text(encoding="utf-8"))
    return data


SMOLLM_IDS = golden("smollm2")
BYTE_LEVEL = golden("byte_level")
SENTENCE_PIECE = golden("sentence_piece")
TEXTS = BYTE_LEVEL["texts"]
TOKENS = BYTE_LEVEL["tokens"]
VOCABULARY_KEYS = (
    *("model", "tokens", "token_type", "merges", "scores"),
    *("bos_token_id", "eos_token_id", "unknown_token_id"),
)

NOT_NFC = "cafe\u0301 e\u0301\u0323 n\u0303 a\u030a \u1e9b\u0323"
HINDI = "नमस्ते दुनिया, कैसे हो?"
THAI = "สวัสดีชาวโลก"
WIDE_SPACES = "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2003em\u2028line\ufeffbom"
LLAMA_CPP_DIFFERS = {
    # It does not normalize.
    "qwen2": {NOT_NFC},
    "qwen35": {NOT_NFC},
    "deepseek-r1-qwen": {NOT_NFC},
    # It takes combining marks for punctuation.
    "tekken": {NOT_NFC, HINDI, THAI},
    # Every wide space is the same to it, so none falls into the range U+0800 to U+4E00 of the pattern.
    "deepseek-llm": {WIDE_SPACES},
    "deepseek-coder": {WIDE_SPACES},
}

new_name = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def smollm() -> gguf.GGUFReader:
    return gguf.GGUFReader(SMOLLM)


@pytest.fixture(scope="module")
def smollm_tokenizer(smollm: gguf.GGUFReader) -> Tokenizer:
    return tokenizer_from_gguf(smollm)


Read = Callable[..., gguf.GGUFReader]


@pytest.fixture(scope="module")
def read(folder: Path) -> Read:
    """Writes a file with the keys of a golden vocabulary, changed as told (None: left out), and opens it."""

    def write_and_read(vocabulary: dict[str, Any], chat_template: str | None = None, **changes: Any) -> gguf.GGUFReader:
        path = folder / f"{next(new_name)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in {**{key: vocabulary[key] for key in VOCABULARY_KEYS if key in vocabulary}, **changes}.items():
            if value is not None:
                writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return gguf.GGUFReader(path)

    return write_and_read


@pytest.fixture(scope="module")
def gpt2_tokenizer(read: Read) -> Tokenizer:
    return tokenizer_from_gguf(read(BYTE_LEVEL, pre="gpt-2"))


def differing(tokenizer: Tokenizer, expected: list[list[int]], add_special_tokens: bool = True) -> set[str]:
    """The golden texts of which the tokenizer makes other ids than expected."""
    return {
        text
        for text, ids in zip(TEXTS, expected, strict=True)
        if tokenizer.encode(text, add_special_tokens=add_special_tokens).ids != ids
    }


# The real vocabulary


def test_smollm2_has_the_ids_of_llama_cpp(smollm_tokenizer: Tokenizer) -> None:
    assert SMOLLM_IDS["texts"] == TEXTS
    assert differing(smollm_tokenizer, SMOLLM_IDS["llama.cpp"]) == set()


def test_smollm2_has_the_ids_of_transformers_but_for_digits(smollm_tokenizer: Tokenizer) -> None:
    """Reading a GGUF file, transformers forgets that SmolLM2 splits digits; the original tokenizer does split them."""
    assert differing(smollm_tokenizer, SMOLLM_IDS["transformers"]) == {"½ ² Ⅷ ٣٤٥ ४५६ 一二三 １２３"}


def test_a_saved_tokenizer_gives_the_same_ids(smollm_tokenizer: Tokenizer, tmp_path: Path) -> None:
    smollm_tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert differing(saved, SMOLLM_IDS["llama.cpp"]) == set()


def test_smollm2_special_tokens_and_template(smollm: gguf.GGUFReader) -> None:
    assert bos_token_id_from_gguf(smollm) == 1
    assert end_token_ids_from_gguf(smollm) == (2, 0)  # <|im_end|> by its key, <|endoftext|> by its name
    assert (chat_template_from_gguf(smollm) or "").startswith("{% for message in messages %}")


# Byte-level BPE


@pytest.mark.parametrize("pre", BYTE_LEVEL["llama.cpp"])
def test_words_are_split_as_llama_cpp_splits_them(read: Read, pre: str) -> None:
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre=pre))
    assert differing(tokenizer, BYTE_LEVEL["llama.cpp"][pre]) == LLAMA_CPP_DIFFERS.get(pre, set())


@pytest.mark.parametrize("pre", BYTE_LEVEL["transformers"])
def test_words_are_split_as_transformers_splits_them(read: Read, pre: str) -> None:
    """Where llama.cpp differs, too. (transformers adds no token of begin unless the file asks for it.)"""
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre=pre))
    assert differing(tokenizer, BYTE_LEVEL["transformers"][pre], add_special_tokens=False) == set()


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_encoding_and_decoding(gpt2_tokenizer: Tokenizer, text: str) -> None:
    assert gpt2_tokenizer.decode(gpt2_tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder"])
def test_wide_spaces_are_characters_of_their_own_to_deepseek(read: Read, pre: str) -> None:
    """They lie in the range U+0800 to U+4E00 of its pattern, which takes them away from the letters beside them."""
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre=pre))
    parts = ["nbsp", "\u3000", "ideographic"]
    apart = [token_id for part in parts for token_id in tokenizer.encode(part).ids]
    assert tokenizer.encode("".join(parts)).ids == apart


@pytest.mark.parametrize("pre", {recipe: name for name, recipe in PRE_TOKENIZERS.items()}.values())
def test_every_pre_tokenizer_loses_nothing(read: Read, pre: str) -> None:
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre=pre))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == (unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text)


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False)])
def test_a_word_that_is_a_token_needs_no_merges_with_some(read: Read, pre: str, whole: bool) -> None:
    """llama.cpp and tokenizer.json call it `ignore_merges`; the vocabularies of Llama 3 and tekken need it."""
    tokens = [*TOKENS, "qzxj"]
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre=pre, tokens=tokens, token_type=None, add_bos_token=False))
    assert (tokenizer.encode("qzxj").ids == [len(TOKENS)]) is whole


def test_a_file_without_pre_tokenizer_has_the_default_one(read: Read) -> None:
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL))
    assert differing(tokenizer, BYTE_LEVEL["llama.cpp"]["default"]) == set()


def test_tokens_of_begin_and_end_are_added_where_the_file_says_so(read: Read) -> None:
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre="gpt-2", add_bos_token=True, add_eos_token=True))
    begin, end = BYTE_LEVEL["bos_token_id"], BYTE_LEVEL["eos_token_id"]
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    assert tokenizer.encode("a").ids == [begin, *inner, end]
    assert tokenizer.encode("").ids == [begin, end]


def test_a_file_can_refuse_the_token_of_begin(read: Read) -> None:
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre="llama-bpe", add_bos_token=False))
    assert differing(tokenizer, BYTE_LEVEL["transformers"]["llama-bpe"]) == set()


def test_control_tokens_are_no_text_and_user_defined_tokens_are(gpt2_tokenizer: Tokenizer) -> None:
    encoding = gpt2_tokenizer.encode("<think>a</think><|im_end|>")
    assert encoding.tokens == ["<think>", "a", "</think>", "<|im_end|>"]
    assert gpt2_tokenizer.decode(encoding.ids) == "<think>a</think>"


def test_tokens_without_text_keep_their_ids(read: Read) -> None:
    tokens = [*TOKENS, "", ""]
    tokenizer = tokenizer_from_gguf(read(BYTE_LEVEL, pre="gpt-2", tokens=tokens, token_type=None))
    assert tokenizer.get_vocab_size() == len(tokens)


# SentencePiece


def test_sentence_piece_has_the_ids_of_sentencepiece_and_llama_cpp(read: Read) -> None:
    tokenizer = tokenizer_from_gguf(read(SENTENCE_PIECE))
    assert differing(tokenizer, SENTENCE_PIECE["sentencepiece"]) == set()
    assert differing(tokenizer, SENTENCE_PIECE["llama.cpp"]) == set()


def test_sentence_piece_texts_survive_encoding_and_decoding(read: Read) -> None:
    tokenizer = tokenizer_from_gguf(read(SENTENCE_PIECE))
    assert [tokenizer.decode(tokenizer.encode(text).ids) for text in TEXTS] == TEXTS


def test_sentence_piece_never_makes_a_byte_token_of_text_that_looks_like_one(read: Read) -> None:
    parts = ["<0", "x0", "A>", "x0A>"]
    changes = {
        "tokens": [*SENTENCE_PIECE["tokens"], *parts],
        "scores": [*SENTENCE_PIECE["scores"], *(1.0 for _ in parts)],
        "token_type": [*SENTENCE_PIECE["token_type"], *(1 for _ in parts)],
    }
    encoding = tokenizer_from_gguf(read(SENTENCE_PIECE, **changes)).encode("<0x0A>", add_special_tokens=False)
    assert encoding.tokens == ["▁", "<0", "x0A>"]


def test_sentence_piece_puts_no_space_before_the_text_where_the_file_forbids_it(read: Read) -> None:
    tokenizer = tokenizer_from_gguf(read(SENTENCE_PIECE, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


def test_sentence_piece_files_that_name_no_special_ids_mean_those_of_llama(read: Read) -> None:
    reader = read(SENTENCE_PIECE, bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    assert differing(tokenizer_from_gguf(reader), SENTENCE_PIECE["sentencepiece"]) == set()
    assert bos_token_id_from_gguf(reader) == 1
    assert end_token_ids_from_gguf(reader) == (2,)


# Ends and templates


def test_ends_are_the_named_ones_then_the_known_ones(read: Read) -> None:
    think = TOKENS.index("<think>")
    reader = read(BYTE_LEVEL, pre="gpt-2", eot_token_id=think)
    assert end_token_ids_from_gguf(reader) == (BYTE_LEVEL["eos_token_id"], think, 0)


def test_a_normal_token_is_no_end_whatever_its_name(read: Read) -> None:
    reader = read(BYTE_LEVEL, pre="gpt-2", token_type=[1] * len(TOKENS))
    assert end_token_ids_from_gguf(reader) == (BYTE_LEVEL["eos_token_id"],)


def test_a_file_may_have_neither_begin_nor_ends_nor_template(read: Read) -> None:
    reader = read(BYTE_LEVEL, bos_token_id=None, eos_token_id=None, token_type=None)
    assert bos_token_id_from_gguf(reader) is None
    assert end_token_ids_from_gguf(reader) == ()
    assert chat_template_from_gguf(reader) is None


def test_the_template_is_taken_as_it_is(read: Read) -> None:
    assert chat_template_from_gguf(read(BYTE_LEVEL, chat_template="{{ 'ü' }}\n")) == "{{ 'ü' }}\n"


# Damaged and unknown metadata

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "tokenizer.ggml.model (string) is missing"),
    "unknown model": ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; known: gpt2, llama"),
    "unknown pre": ({"pre": "martian"}, "tokenizer.ggml.pre 'martian' is not supported; known: default, gpt-2,"),
    "pre no string": ({"pre": 3}, "tokenizer.ggml.pre must be of type string"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens (array of strings) is missing"),
    "tokens no strings": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be of type array of strings"),
    "token not UTF-8": ({"tokens": [*TOKENS[:-1], b"\xff"]}, "tokenizer.ggml.tokens is not UTF-8"),
    "token twice": ({"tokens": [*TOKENS[:-1], TOKENS[7]]}, f"tokenizer.ggml.tokens has {TOKENS[7]!r} twice, as 7 and "),
    "types too few": ({"token_type": [1, 1]}, f"tokenizer.ggml.token_type has 2 entries for {len(TOKENS)} tokens"),
    "types no numbers": ({"token_type": ["x"] * len(TOKENS)}, "tokenizer.ggml.token_type must be an array of int32"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges (array of strings) is missing"),
    "merge of unknown": ({"merges": ["a b", "Q 漢"]}, "tokenizer.ggml.merges number 1, 'Q 漢', needs '漢'"),
    "merge into unknown": ({"merges": ["Q Q"]}, "tokenizer.ggml.merges number 0, 'Q Q', needs 'QQ'"),
    "merge of one": ({"merges": ["ab"]}, "tokenizer.ggml.merges number 0, 'ab', needs"),
    "bos out of range": (
        {"bos_token_id": len(TOKENS), "add_bos_token": True},
        f"tokenizer.ggml.bos_token_id is {len(TOKENS)}, but the tokens are 0 to {len(TOKENS) - 1}",
    ),
    "bos wanted, not named": (
        {"bos_token_id": None, "add_bos_token": True},
        "tokenizer.ggml.bos_token_id is missing, but tokenizer.ggml.add_bos_token is true",
    ),
    "flag no bool": ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be of type bool"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_damaged_metadata_are_refused_by_file_and_key(read: Read, folder: Path, case: str) -> None:
    changes, message = REFUSALS[case]
    reader = read(BYTE_LEVEL, **{"pre": "gpt-2", **changes})
    with pytest.raises(SourceError) as refusal:
        tokenizer_from_gguf(reader)
    assert message in str(refusal.value)
    assert str(folder) in str(refusal.value)


def test_scores_must_be_one_a_token(read: Read) -> None:
    with pytest.raises(SourceError, match=r"tokenizer\.ggml\.scores has 1 entries for \d+ tokens"):
        tokenizer_from_gguf(read(SENTENCE_PIECE, scores=[0.5]))


def test_an_end_out_of_range_is_refused(read: Read) -> None:
    with pytest.raises(SourceError, match=r"tokenizer\.ggml\.eot_token_id is 99999"):
        end_token_ids_from_gguf(read(BYTE_LEVEL, eot_token_id=99999))
