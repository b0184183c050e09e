"""What NVIDIA's client, as it comes from PyPI, gets from a daemon: `python triton_session.py ADDRESS MODEL PROMPT`.

It is a program of its own because the client registers the messages of the protocol under the same names as the daemon
does. Prints one JSON document.
"""

from __future__ import annotations

import json
import queue
import sys
from base64 import b64encode
from typing import Any

import numpy as np
from tritonclient import grpc as triton
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

LIMIT_S = 120
NEW_TOKENS = 12
GREEDY = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}


def session(client: triton.InferenceServerClient, model: str, prompt: str) -> dict[str, Any]:
    """The answers to one call of each kind."""
    inputs = text(prompt)
    return {
        "files": [b64encode(module.DESCRIPTOR.serialized_pb).decode() for module in (service_pb2, model_config_pb2)],
        "health": [
            client.is_server_live(),
            client.is_server_ready(),
            client.is_model_ready(model),
            client.is_model_ready("nobody"),
        ],
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True),
        "whole": answer(client.infer(model, inputs, request_id="whole", parameters=GREEDY)),
        "int8": answer(client.infer(model, inputs, parameters={**GREEDY, "precision": "int8"})),
        "asynchronous": answer(asynchronous(client, model, inputs)),
        "pieces": pieces(client, model, inputs),
        "refusal": refusal(client, model, inputs),
        "statistics": client.get_inference_statistics(model, as_json=True),
        "repository": reloaded(client, model),
    }


def text(prompt: str) -> list[triton.InferInput]:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    return [tensor]


def answer(result: triton.InferResult) -> dict[str, Any]:
    parameters = result.get_response(as_json=True)["parameters"]
    return {
        "id": result.get_response().id,
        "text": result.as_numpy("text_output")[0].decode(),
        "parameters": {name: next(iter(value.values())) for name, value in parameters.items()},
    }


def asynchronous(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput]) -> Any:
    results: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, inputs, lambda result, error: results.put(error or result), parameters=GREEDY)
    return results.get(timeout=LIMIT_S)


def pieces(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput]) -> list[dict[str, Any]]:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    client.async_stream_infer(model, inputs, request_id="streamed", parameters=GREEDY, enable_empty_final_response=True)
    told = [answer(results.get(timeout=LIMIT_S))]
    while not told[-1]["parameters"]["triton_final_response"]:
        told.append(answer(results.get(timeout=LIMIT_S)))
    client.stop_stream()
    return told


def refusal(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput]) -> str:
    try:
        client.infer(model, inputs, parameters={"max_tokens": 0})
    except InferenceServerException as error:
        return str(error)
    return "answered"


def reloaded(client: triton.InferenceServerClient, model: str) -> list[Any]:
    client.unload_model(model)
    unloaded = client.get_model_repository_index(as_json=True)
    client.load_model(model)
    return [unloaded, client.get_model_repository_index(as_json=True)]


if __name__ == "__main__":
    address, *asked = sys.argv[1:]
    with triton.InferenceServerClient(address) as client:
        print(json.dumps(session(client, *asked)))
