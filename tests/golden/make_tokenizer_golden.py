"""Makes the golden data of the tokenizer tests: what llama.cpp, transformers and sentencepiece make of tricky texts.

    pip install torch transformers gguf tokenizers sentencepiece xllamacpp
    python tests/golden/make_tokenizer_golden.py [--gguf .cache/SmolLM2-135M-Instruct.Q4_1.gguf]

It writes, beside itself:

- `tokenizer_smollm2.json`: ids of the real vocabulary.
- `tokenizer_byte_level.json`: a small vocabulary whose merges cross every word boundary, so that a difference in the
  splitting of words shows in the ids, and its ids under each pre-tokenizer.
- `tokenizer_sentence_piece.json`: a small SentencePiece model with byte fallback, and its ids.
- `tokenizer_chat.json`: conversations as transformers renders them.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import xllamacpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
TEXTS = [
    "",
    " ",
    "   ",
    "a",
    "Hello, world!",
    " leading space",
    "  two leading spaces",
    "trailing space ",
    "trailing spaces   ",
    "a  b   c    d",
    "tab\tand\t\ttabs\t",
    "line\nline\n\nline\n\n\nline",
    "\n",
    "\n\n \n\t\n",
    "\r\nwindows\r\n\r\nlines\r",
    "  \n  indented\n    more\n",
    "I'm sure he'll say they've seen we'd won't John's 'quoted'",
    "I'M SURE HE'LL SAY THEY'VE SEEN",
    "1 12 123 1234 12345 1234567890",
    "3.14159 1,000,000 0x1F 2nd 10% $99.99 v1.2.3-rc4",
    "½ ² Ⅷ ٣٤٥ ४५६ 一二三 １２３",
    "def f(x):\n    if x == 1:\n        return {'a': [1, 2]}\n    # done\n",
    'for (int i=0;i<10;++i){ printf("%d\\n", i); }',
    "SELECT * FROM t WHERE a >= 3 AND b != 'x';",
    "https://example.com/a/b?c=d&e=f#g user@host.org",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "!!! ??? ... --- === *** ((())) [[]] {{}} <<>> `` ``` ~~ || \\\\ //",
    "naïve café résumé Übergröße ÀÉÎÕÜ ñ ß ƻ ǅ",
    "cafe\u0301 e\u0301\u0323 n\u0303 a\u030a \u1e9b\u0323",
    "Привет, мир! Ёлка и съёмка.",
    "Γειά σου Κόσμε ᾳ ῼ",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया, कैसे हो?",
    "สวัสดีชาวโลก",
    "你好，世界！今天天气很好。",
    "こんにちは、世界。カタカナとひらがな",
    "안녕하세요, 세계! 한국어",
    "中文English混合123文本",
    "😀 👍🏽 🇩🇪 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 ❤️",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒜 𐐀𐐨 🜁",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2003em\u2028line\ufeffbom",
    "control \x00\x01\x1b[0m\x7f bytes",
    "fullwidth！（）：；ａｂｃ “quotes” ‘single’ «guillemets» – — …",
    "∑∫√∞ ≤≥≠ →←↑↓ €£¥₹ ©®™ §¶",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more  <|im_end|>  spaced",
    "almost <|im_end |> <|im_ end|> <|im_end",
    "<think>\nwell\n</think>\n\nyes",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "                                 33 spaces",
    "ΑΒΓ АБВ ABC ḀḂḄ ὖὗ Ω K Å",
]

BYTE_LEVEL_SIZE = 1200
PRE_TOKENIZERS = [
    "default",
    "gpt-2",
    "smollm",
    "llama-bpe",
    "smaug-bpe",
    "qwen2",
    "qwen35",
    "deepseek-r1-qwen",
    "tekken",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
]
TRANSFORMERS_CLASSES = {"qwen2": Qwen2Tokenizer, "deepseek-r1-qwen": Qwen2Tokenizer, "qwen35": Qwen3_5Tokenizer}
TRANSFORMERS_GGUF = ("llama-bpe", "smaug-bpe", "tekken")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ADDED_TOKENS = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
}

CHAT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": " <b>\"1\" & 'ü'</b> "}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
]
CHAT_TEMPLATES = {
    "llama 3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = \
'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "blocks, namespaces, loop controls, optional variables": """
{%- set state = namespace(turns=0) -%}
    {% if tools is not none %}
TOOLS
    {% endif %}
    {% for message in messages %}
        {% if message.role == 'system' %}
            {% continue %}
        {% endif %}
        {% set state.turns = state.turns + 1 %}
[{{ state.turns }}] {{ message.content | tojson }}{{ eos_token }}
        {% generation %}
{{ message | tojson(indent=2) }}
        {% endgeneration %}
    {% endfor %}
    {% if add_generation_prompt and documents is none %}
>
    {% endif %}
""",
}

Vocabulary = dict[str, Any]
"""Values of `tokenizer.ggml.*` keys."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=Path(".cache/SmolLM2-135M-Instruct.Q4_1.gguf"))
    path = parser.parse_args().gguf
    save("smollm2", {"texts": TEXTS, "llama.cpp": ids_of_llama_cpp(path), "transformers": ids_of_transformers(path)})
    save("byte_level", byte_level())
    save("sentence_piece", sentence_piece())
    save("chat", chat(path))


def save(name: str, data: dict[str, Any]) -> None:
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    (HERE / f"tokenizer_{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def chat(path: Path) -> dict[str, Any]:
    model = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).chat_template
    templates = {"smollm2": model, **CHAT_TEMPLATES}
    rendered = {name: render(template) for name, template in templates.items()}
    return {**CHAT_TOKENS, "conversations": CONVERSATIONS, "templates": templates, "transformers": rendered}


def render(template: str) -> list[str]:
    texts, _ = render_jinja_template(
        CONVERSATIONS, chat_template=template, add_generation_prompt=True, tools=None, documents=None, **CHAT_TOKENS
    )
    return list(texts)


def byte_level() -> dict[str, Any]:
    vocabulary = train_byte_level()
    by_llama_cpp, by_transformers = {}, {}
    for pre in PRE_TOKENIZERS:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_model(path, {**vocabulary, "pre": pre})
            by_llama_cpp[pre] = ids_of_llama_cpp(path)
            if pre in TRANSFORMERS_GGUF:
                by_transformers[pre] = ids_of_transformers(path)
        if pre in TRANSFORMERS_CLASSES:
            by_transformers[pre] = ids_of_class(TRANSFORMERS_CLASSES[pre], vocabulary)
    return {"texts": TEXTS, **vocabulary, "llama.cpp": by_llama_cpp, "transformers": by_transformers}


def train_byte_level() -> Vocabulary:
    """Byte-level BPE over whole texts: no word boundary keeps a merge from being learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_LEVEL_SIZE,
        special_tokens=list(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [ADDED_TOKENS.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": tokens.index("<|im_end|>"),
    }


def sentence_piece() -> dict[str, Any]:
    processor, vocabulary = train_sentence_piece()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_model(path, vocabulary)
        by_llama_cpp = ids_of_llama_cpp(path)
    by_sentencepiece = [processor.encode(text, add_bos=True) for text in TEXTS]
    return {"texts": TEXTS, **vocabulary, "llama.cpp": by_llama_cpp, "sentencepiece": by_sentencepiece}


def train_sentence_piece() -> tuple[sentencepiece.SentencePieceProcessor, Vocabulary]:
    """A model as Llama's: BPE, digits split, byte fallback, no normalization, a space before the text.

    It learns from the ASCII texts alone, so that the others need byte tokens.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in TEXTS * 3 if text.strip() and text.isascii()),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        hard_vocab_limit=False,
        split_digits=True,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentencepiece_length=16,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = range(processor.vocab_size())
    return processor, {
        "model": "llama",
        "tokens": [processor.id_to_piece(piece) for piece in pieces],
        "scores": [processor.get_score(piece) for piece in pieces],
        "token_type": [piece_type(processor, piece) for piece in pieces],
        "unknown_token_id": processor.unk_id(),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
    }


def piece_type(processor: sentencepiece.SentencePieceProcessor, piece: int) -> int:
    if processor.is_unknown(piece):
        return UNKNOWN
    if processor.is_control(piece):
        return CONTROL
    return BYTE if processor.is_byte(piece) else NORMAL


def ids_of_llama_cpp(path: Path) -> list[list[int]]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    return each_text(lambda text: ask_for_tokens(server.listening_address, text))


def ask_for_tokens(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        tokens: list[int] = json.load(answer)["tokens"]
        return tokens


def ids_of_transformers(path: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return each_text(lambda text: tokenizer(text).input_ids)


def ids_of_class(tokenizer_class: Any, vocabulary: Vocabulary) -> list[list[int]]:
    ids = {token: token_id for token_id, token in enumerate(vocabulary["tokens"])}
    tokenizer = tokenizer_class(vocab=ids, merges=[tuple(merge.split(" ")) for merge in vocabulary["merges"]])
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [text for text, kind in ADDED_TOKENS.items() if kind == CONTROL]}
    )
    tokenizer.add_tokens([text for text, kind in ADDED_TOKENS.items() if kind == USER_DEFINED])
    return each_text(lambda text: tokenizer(text).input_ids)


def each_text(encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [encode(text) for text in TEXTS]


def write_model(path: Path, vocabulary: Vocabulary) -> None:
    """A Llama of one layer and no sense, which llama.cpp loads for the sake of its vocabulary."""
    width, rows = 32, len(vocabulary["tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    write_vocabulary(writer, vocabulary)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((width, width), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((rows, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    for key, value in vocabulary.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)


if __name__ == "__main__":
    main()
