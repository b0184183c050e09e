"""Text in and out of a model: codec, incremental detokenizer, stop strings, chat templates."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from dskd.errors import FailedPreconditionError, InvalidArgumentError
from dskd.text import chat
from dskd.text.detokenizer import IncrementalDetokenizer
from dskd.text.stop import StopMatcher
from dskd.text.tokenizer import TextCodec
from dskquant.errors import StoreError
from dskquant.store import CHAT_TEMPLATE, TOKENIZER, StoreManifest
from dskquant.tokenizer import tokenizer_from_gguf

ROOT = Path(__file__).parents[1]
SMOLLM = ROOT / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "tokenizer_chat.json").read_text(encoding="utf-8"))
REPLACEMENT = "\ufffd"

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT))


def manifest(vocab_size: int, bos: int | None = None, ends: tuple[int, ...] = ()) -> StoreManifest:
    return StoreManifest(
        model_id="m",
        architecture="llama",
        dtype="f16",
        num_layers=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=vocab_size,
        context_length=64,
        parameters=1,
        bos_token_id=bos,
        end_token_ids=ends,
    )


def save(tokenizer: Tokenizer, store: Path, chat_template: str | None = None, **tokens: Any) -> Path:
    """A store with the files a codec reads."""
    store.mkdir(exist_ok=True)
    manifest(tokenizer.get_vocab_size() + 3, **tokens).write(store)
    tokenizer.save(str(store / TOKENIZER))
    if chat_template is not None:
        (store / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    return store


# "€" is the bytes E2 82 AC, "é" is C3 A9, "🇩" is F0 9F 87 A9.
SPECIAL = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "\u2581\u2581", "a", "b", "\u2581a", "é", "ab", "<0x4>"]
SENTENCE_PIECE_IDS = {token: token_id for token_id, token in enumerate([*SPECIAL, *BYTES, *PIECES])}


def sentence_piece_tokenizer() -> Tokenizer:
    """Byte fallback and a space before the text, as Llama 2 has them; `<think>` is a token and part of the text."""
    merges = [("\u2581", "\u2581"), ("\u2581", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(SENTENCE_PIECE_IDS, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reader = gguf.GGUFReader(SMOLLM)
    template = CHAT["templates"]["smollm2"]
    return save(tokenizer_from_gguf(reader), tmp_path_factory.mktemp("store"), template, bos=1, ends=(2,))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(sentence_piece_tokenizer(), tmp_path_factory.mktemp("store"), bos=0, ends=(1,))


@pytest.fixture(scope="module", params=["smollm", "llama"])
def store(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def codec(store: Path) -> TextCodec:
    return TextCodec.load(store)


@pytest.fixture(scope="module")
def tokenizer(store: Path) -> Tokenizer:
    return Tokenizer.from_file(str(store / TOKENIZER))


@pytest.fixture(scope="module")
def smollm_codec(smollm: Path) -> TextCodec:
    return TextCodec.load(smollm)


@pytest.fixture(scope="module")
def llama_codec(llama: Path) -> TextCodec:
    return TextCodec.load(llama)


def stream(codec: TextCodec, ids: list[int]) -> list[str]:
    """What each token adds, and what the end adds."""
    detokenizer = IncrementalDetokenizer(codec)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def ids_of(tokens: str) -> list[int]:
    """Ids of the tokens of `sentence_piece_tokenizer`, separated by spaces."""
    return [SENTENCE_PIECE_IDS[token] for token in tokens.split()]


# Detokenizer


@settings(deadline=None)
@given(data=st.data())
def test_the_stream_is_the_decoded_answer_whatever_the_tokens(
    codec: TextCodec, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    size = tokenizer.get_vocab_size()
    rare = list(range(min(size, 300)))  # special tokens, and those of single bytes
    ids = data.draw(st.lists(st.sampled_from(rare) | st.integers(0, size + 2)))
    assert "".join(stream(codec, ids)) == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=TEXTS)
def test_the_stream_grows_by_whole_characters(codec: TextCodec, tokenizer: Tokenizer, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids)
    pieces = stream(codec, ids)
    assert "".join(pieces) == decoded
    if REPLACEMENT not in decoded:  # SmolLM2 has no tokens for some bytes of rare characters
        assert all(REPLACEMENT not in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(smollm_codec: TextCodec) -> None:
    ids = smollm_codec.encode("👩🏽")
    assert len(ids) > 2
    pieces = stream(smollm_codec, ids)
    assert [piece for piece in pieces if piece] == ["👩", "🏽"]


def test_an_incomplete_character_is_told_at_the_end(smollm_codec: TextCodec) -> None:
    ids = smollm_codec.encode("a👩")[:-1]
    pieces = stream(smollm_codec, ids)
    assert pieces[:2] == ["a", ""]
    assert pieces[-1] == REPLACEMENT


def test_special_tokens_are_no_text(smollm_codec: TextCodec) -> None:
    ids = smollm_codec.encode("a<|im_end|>b<|im_start|>")
    assert 2 in ids
    assert "".join(stream(smollm_codec, ids)) == "ab"


def test_a_special_token_within_a_character_does_not_break_it(llama_codec: TextCodec) -> None:
    assert "".join(stream(llama_codec, ids_of("a <0xC3> </s> <0xA9> b"))) == "aéb"


def test_an_added_token_of_a_byte_level_vocabulary_stands_for_its_own_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġ": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("1 €", special=False, normalized=False)])
    codec = TextCodec.load(save(tokenizer, tmp_path / "store"))
    assert stream(codec, [0, 2, 1, 0]) == ["a", "1 €", " ", "a", ""]
    assert tokenizer.decode([0, 2, 1, 0]) == "a1 € a"


def test_only_the_space_before_the_text_is_stripped(llama_codec: TextCodec) -> None:
    assert stream(llama_codec, ids_of("\u2581a \u2581a")) == ["a", " a", ""]
    assert stream(llama_codec, ids_of("\u2581\u2581 \u2581 a")) == [" ", " ", "a", ""]
    assert stream(llama_codec, ids_of("\u2581 </s> \u2581 a")) == ["", "", " ", "a", ""]


def test_byte_tokens_come_when_their_run_ends(llama_codec: TextCodec) -> None:
    assert stream(llama_codec, ids_of("<0xE2> <0x82> <0xAC> a")) == ["", "", "", "€a", ""]
    assert stream(llama_codec, ids_of("a <0xE2> <0x82> <0xAC>")) == ["a", "", "", "", "€"]


def test_a_run_of_bytes_that_is_no_text_is_a_replacement_for_each(llama_codec: TextCodec) -> None:
    assert stream(llama_codec, ids_of("<0xE2> <0x82> a")) == ["", "", REPLACEMENT * 2 + "a", ""]


def test_streams_of_one_codec_do_not_disturb_each_other(llama_codec: TextCodec) -> None:
    first, second = IncrementalDetokenizer(llama_codec), IncrementalDetokenizer(llama_codec)
    euro, e_acute = ids_of("<0xE2> <0x82> <0xAC> a"), ids_of("<0xC3> <0xA9> \u2581 b")
    pushed = [(first.push(one), second.push(other)) for one, other in zip(euro, e_acute, strict=True)]
    assert "".join(one for one, _ in pushed) == "€a"
    assert "".join(other for _, other in pushed) == "é b"


# Stop strings


def first_stop(text: str, stops: list[str]) -> str | None:
    """The text before the first stop string by trying every end, None without any."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


def longest_possible_start(text: str, stops: list[str]) -> int:
    """How much of the end of `text` may still become a stop string."""
    starts = {stop[:length] for stop in stops for length in range(len(stop))}
    return max((len(start) for start in starts if text.endswith(start)), default=0)


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3),
)
def test_all_text_before_the_first_stop_is_passed_on_and_no_more_held_back_than_needed(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = emitted = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        seen, emitted = seen + piece, emitted + text
        before = first_stop(seen, stops)
        assert stopped == (before is not None)
        assert emitted == (seen[: len(seen) - longest_possible_start(seen, stops)] if before is None else before)
    expected = first_stop(seen, stops)
    assert emitted + matcher.flush() == (seen if expected is None else expected)


def test_a_stop_string_over_several_pieces_never_shows() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello.\n") == ("Hello.", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("er: more") == ("", True)
    assert matcher.push("anything") == ("", True)
    assert matcher.flush() == ""


def test_a_stop_string_may_begin_within_a_false_start() -> None:
    assert StopMatcher(["aab"]).push("xaaab") == ("xa", True)
    assert StopMatcher(["abababc"]).push("ababababc") == ("ab", True)


def test_the_longest_of_the_stop_strings_complete_at_once_counts() -> None:
    assert StopMatcher(["d", "cd", "bcd"]).push("abcde") == ("a", True)


def test_text_that_did_not_become_a_stop_string_is_passed_on() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("ST") == ("", False)
    assert matcher.push("ART ST") == ("START ", False)
    assert matcher.flush() == "ST"


def test_without_stop_strings_text_passes_as_it_is() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == ("abc", False)
    assert matcher.flush() == ""


# Chat


@pytest.mark.parametrize("name", CHAT["templates"])
def test_conversations_are_rendered_as_by_transformers(tmp_path: Path, name: str) -> None:
    store = save(sentence_piece_tokenizer(), tmp_path / "store", CHAT["templates"][name], bos=0, ends=(1,))
    codec = TextCodec.load(store)
    assert [codec.render_chat(messages) for messages in CHAT["conversations"]] == CHAT["transformers"][name]


def test_a_conversation_becomes_the_tokens_the_model_was_taught(smollm_codec: TextCodec) -> None:
    text = smollm_codec.render_chat([{"role": "user", "content": "Hi"}])
    ids = smollm_codec.encode(text, add_special_tokens=False)
    marks = [token_id for token_id in ids if token_id in (1, 2)]
    assert marks == [1, 2, 1, 2, 1]  # system, user, and the begin of the answer


def rendering(tmp_path: Path, template: str | None) -> TextCodec:
    return TextCodec.load(save(sentence_piece_tokenizer(), tmp_path / "store", template))


HELLO = [{"role": "user", "content": "hello"}]


def test_a_template_can_tell_the_date(tmp_path: Path) -> None:
    rendered = rendering(tmp_path, "{{ strftime_now('%Y') }}").render_chat(HELLO)
    assert abs(int(rendered) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
    ],
)
def test_what_a_template_refuses_is_a_mistake_of_the_messages(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(reason)) as refusal:
        rendering(tmp_path, template).render_chat(HELLO)
    assert refusal.value.field == "chat.messages"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(10001) %}x{% endfor %}", "a range of 10001 numbers; at most 10000"),
        (
            "{% for i in range(10000) %}{% for i in range(10000) %}{% set x = i %}{% endfor %}{% endfor %}",
            "more than 0.05 s",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "more than 0.05 s",
        ),
    ],
)
def test_a_template_that_asks_too_much_is_given_up(
    tmp_path: Path, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "RENDER_S", 0.05)
    with pytest.raises(FailedPreconditionError, match=re.escape(reason)) as refusal:
        rendering(tmp_path, template).render_chat(HELLO)
    assert refusal.value.subject == "chat template"


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="no chat template: send a prompt"):
        rendering(tmp_path, None).render_chat(HELLO)


def test_a_broken_template_leaves_prompts_usable(tmp_path: Path) -> None:
    codec = rendering(tmp_path, "{% if %}")
    assert codec.encode("ab") == [0, *ids_of("\u2581a b")]
    with pytest.raises(FailedPreconditionError, match="chat template of the model is broken"):
        codec.render_chat(HELLO)


# Codec


def test_special_tokens_are_added_on_demand(llama_codec: TextCodec) -> None:
    assert llama_codec.encode("a") == ids_of("<s> \u2581a")
    assert llama_codec.encode("a", add_special_tokens=False) == ids_of("\u2581a")
    assert llama_codec.encode("") == ids_of("<s>")


def test_a_token_is_shown_by_itself(llama_codec: TextCodec, smollm_codec: TextCodec) -> None:
    shown = [llama_codec.decode_token(token_id) for token_id in ids_of("\u2581a </s> <0xE2> <0x41>")]
    assert shown == [" a", "</s>", REPLACEMENT, "A"]
    assert smollm_codec.decode_token(2) == "<|im_end|>"
    assert smollm_codec.decode_token(smollm_codec.encode("x world")[-1]) == " world"
    assert smollm_codec.decode_token(smollm_codec.vocab_size - 1) == ""  # a row of the embedding without a token


@pytest.mark.parametrize("wrong", [-1, 49155, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused_by_position(smollm_codec: TextCodec, wrong: int) -> None:
    smollm_codec.check_ids([0, 49154])
    with pytest.raises(InvalidArgumentError, match=f"{wrong} at position 2: ids are 0 to 49154") as refusal:
        smollm_codec.check_ids([0, 1, wrong, -7])
    assert refusal.value.field == "tokens.ids"


def test_limits_saved_with_the_tokenizer_do_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = sentence_piece_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    codec = TextCodec.load(save(tokenizer, tmp_path / "store"))
    assert codec.encode("b" * 20) == ids_of("<s> \u2581" + " b" * 20)


def test_a_store_without_tokenizer_is_refused(tmp_path: Path) -> None:
    store = save(sentence_piece_tokenizer(), tmp_path / "store")
    (store / TOKENIZER).unlink()
    with pytest.raises(StoreError, match=r"tokenizer\.json is missing"):
        TextCodec.load(store)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    store = save(sentence_piece_tokenizer(), tmp_path / "store")
    (store / TOKENIZER).write_bytes(content)
    with pytest.raises(StoreError, match=r"tokenizer\.json: cannot be read"):
        TextCodec.load(store)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "none"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([]), ""),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), r"Replace \+ Fuse"),
        (
            decoders.Sequence(
                [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]
            ),
            r"Replace \+ ByteFallback \+ Fuse \+ Strip",
        ),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused(tmp_path: Path, decoder: Any, name: str) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(StoreError, match=f"decoder {name} of the tokenizer is not supported"):
        TextCodec.load(save(tokenizer, tmp_path / "store"))
