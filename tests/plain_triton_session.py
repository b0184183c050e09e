"""What NVIDIA's client, as it comes from PyPI, gets from a daemon with plain graphs.

`python plain_triton_session.py ADDRESS INPUTS.npz MODEL...`; arrays are named MODEL/INPUT. A program of its own for the
reason that `triton_session.py` is. Prints a JSON document; arrays in it are lists.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

LIMIT_S = 60
STREAMED = 3


def session(client: triton.InferenceServerClient, model: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """The answers to one call of each kind."""
    inputs = [tensor(name, array) for name, array in arrays.items()]
    return {
        "ready": [client.is_server_ready(), client.is_model_ready(model)],
        "metadata": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True),
        "single": answer(client.infer(model, inputs, request_id="single")),
        "fp32": answer(client.infer(model, inputs, parameters={"precision": "fp32"})),
        "asynchronous": answer(asynchronous(client, model, inputs)),
        "streamed": streamed(client, model, inputs),
        "refusal": refusal(client, model, inputs[:-1]),
        "statistics": client.get_inference_statistics(model, as_json=True),
    }


def tensor(name: str, array: Any) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def answer(result: triton.InferResult) -> dict[str, Any]:
    response = result.get_response(as_json=True)
    return {
        "id": result.get_response().id,
        "parameters": {name: next(iter(value.values())) for name, value in response["parameters"].items()},
        "outputs": {output["name"]: result.as_numpy(output["name"]).tolist() for output in response["outputs"]},
    }


def asynchronous(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput]) -> Any:
    results: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, inputs, lambda result, error: results.put(error or result))
    return results.get(timeout=LIMIT_S)


def streamed(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput]) -> list[dict[str, Any]]:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    for number in range(STREAMED):
        mode = ("int8", "fp32")[number % 2]
        client.async_stream_infer(model, inputs, request_id=str(number), parameters={"precision": mode})
    told = [answer(results.get(timeout=LIMIT_S)) for _ in range(STREAMED)]
    client.stop_stream()
    return told


def refusal(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput]) -> str:
    try:
        client.infer(model, inputs)
    except InferenceServerException as error:
        return str(error)
    return "answered"


if __name__ == "__main__":
    address, path, *models = sys.argv[1:]
    with np.load(path) as file, triton.InferenceServerClient(address) as client:
        told = {}
        for model in models:
            prefix = f"{model}/"
            arrays = {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}
            told[model] = session(client, model, arrays)
        print(json.dumps(told))
