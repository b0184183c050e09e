"""NVIDIA's client for Triton, as it comes from PyPI, against a daemon with a real model."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from tests.daemon_process import MODEL, DaemonProcess, daemon_process

from dskapi.open_inference import infer_pb2, model_config_pb2, repository_pb2, service_pb2, statistics_pb2
from dskapi.v1 import common_pb2, inference_pb2, inference_pb2_grpc

SESSION = Path(__file__).with_name("triton_session.py")
NEW_TOKENS = 12  # as there
PROMPT = "Once upon a time, in a village by the sea,"
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    with daemon_process({MODEL: {"path": str(smollm2_store), "kv_cache_bytes": "64MiB"}}) as daemon:
        yield daemon.start()
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def triton(daemon: DaemonProcess) -> dict[str, Any]:
    """What NVIDIA's client got from the daemon, and "generated": the answers of our own protocol."""
    with grpc.insecure_channel(daemon.target) as channel:
        generated = {mode: generate(channel, mode) for mode in ("INT4", "INT8")}
    return {**json.loads(printed_by(str(SESSION), daemon.target, MODEL, PROMPT)), "generated": generated}


def printed_by(*program: str) -> str:
    """What a Python program prints. A process of its own, as two modules in one cannot register the same messages."""
    ended = subprocess.run([sys.executable, *program], capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def generate(channel: grpc.Channel, mode: str) -> str:
    request = inference_pb2.GenerateRequest(
        prompt=PROMPT,
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        precision=common_pb2.PrecisionMode.Value(f"PRECISION_MODE_{mode}"),
    )
    generate: Any = inference_pb2_grpc.InferenceStub(channel).Generate
    return "".join(response.text for response in generate(request))


def test_tritons_client_sees_the_server_and_its_model(triton: dict[str, Any]) -> None:
    assert triton["health"] == [True, True, True, False]
    assert triton["server"]["name"] == "dskd"
    assert triton["metadata"]["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": ["1"]}]
    assert triton["config"]["config"]["model_transaction_policy"] == {"decoupled": True}
    before, after = triton["repository"]
    assert before == {"models": [{"name": MODEL, "version": "1", "state": "UNAVAILABLE"}]}
    assert after == {"models": [{"name": MODEL, "version": "1", "state": "READY"}]}


def test_tritons_client_gets_the_text_that_generate_makes(triton: dict[str, Any]) -> None:
    whole, int8, asynchronous = triton["whole"], triton["int8"], triton["asynchronous"]
    assert whole["text"] == asynchronous["text"] == triton["generated"]["INT4"]
    assert int8["text"] == triton["generated"]["INT8"]
    assert (whole["id"], whole["parameters"]["mode"], int8["parameters"]["mode"]) == ("whole", "int4", "int8")
    assert whole["parameters"]["engine"] == "openvino"
    assert whole["parameters"]["generated_tokens"] == str(NEW_TOKENS)


def test_tritons_client_streams_the_same_text_in_pieces(triton: dict[str, Any]) -> None:
    pieces = triton["pieces"]
    assert len(pieces) > NEW_TOKENS / 2
    assert "".join(piece["text"] for piece in pieces) == triton["generated"]["INT4"]
    assert {piece["id"] for piece in pieces} == {"streamed"}
    final = [piece["parameters"]["triton_final_response"] for piece in pieces]
    assert final == [False] * (len(pieces) - 1) + [True]


def test_tritons_client_gets_errors_and_statistics(triton: dict[str, Any]) -> None:
    assert triton["refusal"] == (
        "[StatusCode.INVALID_ARGUMENT] parameters.max_tokens: 0 is not allowed; allowed: at least 1"
    )
    (statistics,) = triton["statistics"]["model_stats"]
    assert statistics["inference_count"] == "6"  # two of them by `Generate`
    assert statistics["inference_stats"]["fail"]["count"] == "1"
    assert int(statistics["execution_count"]) >= 6 * NEW_TOKENS


Shape = dict[str, Any]


def shapes(files: list[descriptor_pb2.FileDescriptorProto]) -> Shape:
    """All that goes over the wire: fields by message and name, numbers by enum and name, types by method."""
    told: Shape = {}
    for file in files:
        for message in file.message_type:
            told.update(message_shapes(f".{file.package}", message))
        for enum in file.enum_type:
            told.update({f"{enum.name}.{value.name}": value.number for value in enum.value})
        for service in file.service:
            for method in service.method:
                types = (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
                told[f"/{file.package}.{service.name}/{method.name}"] = types
    return told


def message_shapes(scope: str, message: descriptor_pb2.DescriptorProto) -> Shape:
    name = f"{scope}.{message.name}"
    told: Shape = {f"{name}.{f.name}": (f.number, f.label, f.type, f.type_name) for f in message.field}
    for nested in message.nested_type:
        told.update(message_shapes(name, nested))
    return told


def test_our_protocol_is_a_part_of_tritons(triton: dict[str, Any]) -> None:
    theirs = shapes([descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(file)) for file in triton["files"]])
    ours: list[descriptor_pb2.FileDescriptorProto] = []
    for module in (infer_pb2, model_config_pb2, repository_pb2, service_pb2, statistics_pb2):
        ours.append(descriptor_pb2.FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(ours[-1])
    metadata = ".inference.ModelMetadataResponse"
    of_kserve_alone = {f"{metadata}.properties", f"{metadata}.PropertiesEntry.key", f"{metadata}.PropertiesEntry.value"}
    known = {name: shape for name, shape in shapes(ours).items() if name not in of_kserve_alone}
    assert {name: theirs.get(name) for name in known} == known
    assert len(known) > 100


def test_the_example_of_the_readme_runs(daemon: DaemonProcess) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (example,) = (example for example in examples if "tritonclient" in example)
    address = "unix:///run/user/1000/dskd.sock"
    assert address in example
    *text, mode = printed_by("-c", example.replace(address, daemon.target)).splitlines()
    assert len(" ".join(text)) > 32
    assert mode == "int8"
