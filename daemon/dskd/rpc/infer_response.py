"""From the responses of an answer to those of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from dskapi.open_inference import infer_pb2
from dskapi.v1 import inference_pb2
from dskd.rpc.convert import FINISH_REASONS, MODES
from dskd.rpc.infer_request import VERSION
from dskd.rpc.text_tensors import write_text

FINAL = "triton_final_response"
"""Parameter of every response in a stream: whether it is the last one to its request."""

Parameters = dict[str, infer_pb2.InferParameter]

_MODE_NAMES: dict[int, str] = {number: mode.value for mode, number in MODES.items()}
_FINISH_NAMES: dict[int, str] = {number: reason.value for reason, number in FINISH_REASONS.items()}


def infer_response(
    request: infer_pb2.ModelInferRequest, responses: Sequence[inference_pb2.GenerateResponse]
) -> infer_pb2.ModelInferResponse:
    """The text of `responses`, at least one, in the kind of contents that `request` has.

    Its parameters tell what made this text; where the answer ends they tell also why, and how many tokens it took.
    """
    last = responses[-1]
    response = infer_pb2.ModelInferResponse(
        model_name=last.model,
        model_version=VERSION,
        id=request.id,
        parameters={**_served([token for response in responses for token in response.tokens]), **_ending(last)},
    )
    write_text(response, "".join(response.text for response in responses), raw=bool(request.raw_input_contents))
    return response


def stream_response(
    request: infer_pb2.ModelInferRequest, responses: Sequence[inference_pb2.GenerateResponse]
) -> infer_pb2.ModelStreamInferResponse:
    """The same for a piece of an answer."""
    piece = infer_response(request, responses)
    piece.parameters[FINAL].bool_param = bool(responses[-1].finish_reason)
    return infer_pb2.ModelStreamInferResponse(infer_response=piece)


def _served(tokens: Sequence[inference_pb2.GeneratedToken]) -> Parameters:
    """What made most of `tokens`; if not all of them, the share of everything that made some, in order."""
    made = Counter((_MODE_NAMES[token.precision], token.generation, token.engine) for token in tokens)
    if not made:
        return {}
    ((mode, generation, engine), _) = made.most_common(1)[0]
    parameters = made_by(mode, generation, engine)
    if len(made) > 1:
        parameters["shares"] = infer_pb2.InferParameter(string_param=json.dumps(list(_shares(made))))
    return parameters


def made_by(mode: str, generation: int, engine: str) -> Parameters:
    """What made an answer, as parameters of the response."""
    return {
        "mode": infer_pb2.InferParameter(string_param=mode),
        "generation": infer_pb2.InferParameter(int64_param=generation),
        "engine": infer_pb2.InferParameter(string_param=engine),
    }


def _shares(made: Counter[tuple[str, int, str]]) -> Iterator[dict[str, str | int | float]]:
    for (mode, generation, engine), count in made.items():
        yield {"mode": mode, "generation": generation, "engine": engine, "share": count / made.total()}


def _ending(last: inference_pb2.GenerateResponse) -> Parameters:
    if not last.finish_reason:
        return {}
    return {
        "finish_reason": infer_pb2.InferParameter(string_param=_FINISH_NAMES[last.finish_reason]),
        "prompt_tokens": infer_pb2.InferParameter(int64_param=last.usage.prompt_tokens),
        "generated_tokens": infer_pb2.InferParameter(int64_param=last.usage.generated_tokens),
    }
