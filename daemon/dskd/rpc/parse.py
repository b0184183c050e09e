"""From the protocol's GenerateRequest to a validated request. Every wrong field is named as the protocol spells it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from dskapi.v1 import inference_pb2
from dskd.engine.request import GenerationRequest, SamplingParams
from dskd.errors import InvalidArgumentError
from dskd.rpc.convert import chosen_mode
from dskd.text.tokenizer import TextCodec
from dskquant.store import StoreManifest

DEFAULT_NEW_TOKENS = 512
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHAT_MESSAGES = 10_000
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed values of a number."""

    low: float
    high: float = math.inf
    above_low: bool = False  # `low` itself is not allowed

    def check(self, field: str, value: float) -> None:
        """Raises InvalidArgumentError unless `value` is inside; NaN never is, infinity neither."""
        inside = self.low < value if self.above_low else self.low <= value
        if not (inside and value <= self.high and math.isfinite(value)):
            raise InvalidArgumentError(field, f"{value:g} is not allowed; allowed: {self}")

    def __str__(self) -> str:
        low = f"{'above' if self.above_low else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low}, at most {self.high:g}"


SAMPLING_RANGES = {
    "temperature": Range(0, 10),
    "top_k": Range(0),
    "top_p": Range(0, 1, above_low=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, above_low=True),
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What the engine is asked for, and where the text has to stop."""

    generation: GenerationRequest
    stops: tuple[str, ...]


def parse_request(
    request: inference_pb2.GenerateRequest, request_id: str, codec: TextCodec, manifest: StoreManifest
) -> ParsedRequest:
    """Validates `request` and encodes its input, which for a long prompt takes time: not on the event loop.

    Raises InvalidArgumentError for the first field that is wrong.
    """
    precision = chosen_mode(request.precision, "precision")
    sampling = _sampling(request.sampling)
    stops = _stops(request)
    Range(0, MAX_TOP_LOGPROBS).check("top_logprobs", request.top_logprobs)
    if request.HasField("max_new_tokens"):
        Range(1).check("max_new_tokens", request.max_new_tokens)
    prompt = _prompt(request, codec, manifest.context_length)
    room = _room(request, len(prompt), manifest.context_length)
    wanted = request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    generation = GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        max_new_tokens=min(wanted, room),
        sampling=sampling,
        end_token_ids=frozenset() if request.ignore_eos else frozenset(manifest.end_token_ids),
        precision=precision,
        top_logprobs=request.top_logprobs,
    )
    return ParsedRequest(generation, stops)


def _sampling(sampling: inference_pb2.Sampling) -> SamplingParams:
    given = {name: getattr(sampling, name) for name in SAMPLING_RANGES if sampling.HasField(name)}
    for name, value in given.items():
        SAMPLING_RANGES[name].check(f"sampling.{name}", value)
    seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(64)
    return SamplingParams(**given, seed=seed)


def _stops(request: inference_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(request.stop) > MAX_STOPS:
        raise InvalidArgumentError("stop", f"{len(request.stop)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(request.stop):
        if not stop:
            raise InvalidArgumentError(f"stop[{index}]", "must not be empty")
        if len(stop) > MAX_STOP_CHARACTERS:
            problem = f"{len(stop)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
            raise InvalidArgumentError(f"stop[{index}]", problem)
    return tuple(request.stop)


def _prompt(request: inference_pb2.GenerateRequest, codec: TextCodec, context_length: int) -> tuple[int, ...]:
    """The tokens to continue; at least one."""
    kind = request.WhichOneof("input")
    if kind == "prompt":
        _check_size("prompt", [request.prompt], codec, context_length)
        prompt = tuple(codec.encode(request.prompt))
    elif kind == "chat":
        prompt = _chat(request.chat, codec, context_length)
    elif kind == "tokens":
        codec.check_ids(request.tokens.ids)
        prompt = tuple(request.tokens.ids)
    else:
        raise InvalidArgumentError("input", "one of prompt, chat and tokens is needed")
    if not prompt:
        raise InvalidArgumentError(kind, "must not be empty")
    return prompt


def _chat(chat: inference_pb2.Chat, codec: TextCodec, context_length: int) -> tuple[int, ...]:
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", "must not be empty")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        problem = f"{len(chat.messages)} messages; at most {MAX_CHAT_MESSAGES} are allowed"
        raise InvalidArgumentError("chat.messages", problem)
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgumentError(f"chat.messages[{index}].role", "must not be empty")
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    _check_size("chat", [text for message in messages for text in message.values()], codec, context_length)
    rendered = codec.render_chat(messages)
    _check_size("chat", [rendered], codec, context_length)
    return tuple(codec.encode(rendered, add_special_tokens=False))


def _check_size(field: str, texts: Iterable[str], codec: TextCodec, context_length: int) -> None:
    """Refuses what cannot fit even if all its tokens were the longest one: to encode it would only cost time."""
    size = sum(len(text.encode()) for text in texts)
    if size > context_length * codec.longest_token_bytes:
        raise InvalidArgumentError(
            field,
            f"{size} bytes; the context of the model holds {context_length} tokens of at most "
            f"{codec.longest_token_bytes} bytes",
        )


def _room(request: inference_pb2.GenerateRequest, prompt_tokens: int, context_length: int) -> int:
    """Tokens the context has left for the answer; at least one."""
    room = context_length - prompt_tokens
    if room < 1:
        raise InvalidArgumentError(
            request.WhichOneof("input") or "input",
            f"{prompt_tokens} tokens; the context of the model holds {context_length}, one of them for the answer",
        )
    return room
