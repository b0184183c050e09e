"""Parameter sets of a real model swapped in a real daemon: what changes, what does not, and that no answer suffers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.changed_sets import Scales, changed_set, scaled
from tests.daemon_process import MODEL, Answer, Client, DaemonProcess, asynchronous, connected, daemon_process, read

from dskapi.v1 import control_pb2, inference_pb2
from dskquant.store import DEFAULT_PARAMETER_SET

STREAMS = 8
NEW = 48
NEW_UNDER_LOAD = 500
PROMPT = "Question: What is the capital of France?\nAnswer:"
LENGTH = inference_pb2.FINISH_REASON_LENGTH
ONE_SCALE = "model.layers.0.self_attn.v_proj.weight.base.scales"


def one_scale_changed(name: str, scales: Scales) -> Scales:
    """The scale of one group of one row, eight times as large."""
    if name == ONE_SCALE:
        scales = scales.copy()
        scales[0, 0] *= np.float16(8)
    return scales


@pytest.fixture(scope="module")
def sets(smollm2_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The default set of the model, and two that differ from it."""
    folder = tmp_path_factory.mktemp("sets")
    default = smollm2_store / DEFAULT_PARAMETER_SET
    return {
        "default": default,
        "one scale": changed_set(default, folder / "one", one_scale_changed),
        "a layer": changed_set(default, folder / "layer", scaled(".layers.5.", 1.02)),
    }


@pytest.fixture(scope="module")
def daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    with daemon_process({MODEL: {"path": str(smollm2_store), "kv_cache_bytes": "64MiB"}}) as process:
        yield process.start()
        assert process.stop() == 0


async def apply(client: Client, path: Path) -> control_pb2.ChangeResponse:
    config = f'model = "{MODEL}"\n[params]\nfile = "{path}"\n'
    response: control_pb2.ChangeResponse = await client.control.ApplyConfig(
        control_pb2.ApplyConfigRequest(config=config, wait=True)
    )
    return response


async def greedy(client: Client) -> tuple[list[int], list[float]]:
    """Tokens of an answer, and the log-probabilities of each one's nearest rivals."""
    answer = await client.answer(PROMPT, NEW, top_logprobs=3)
    return answer.ids, [found.logprob for token in answer.tokens for found in token.top_logprobs]


@asynchronous
async def test_the_same_set_answers_bit_for_bit_the_same_and_one_other_scale_is_noticed(
    daemon: DaemonProcess, sets: dict[str, Path]
) -> None:
    async with connected(daemon) as client:
        answers = {}
        for name in ("default", "one scale", "default", "a layer", "one scale"):
            await apply(client, sets[name])
            answer = await greedy(client)
            assert answers.setdefault(name, answer) == answer
    for one, other in itertools.combinations(answers.values(), 2):
        assert one[1] != other[1]
    assert answers["default"][0] != answers["one scale"][0]


@asynchronous
async def test_a_swap_under_load_fails_no_answer_and_tokens_name_their_generation(
    daemon: DaemonProcess, sets: dict[str, Path]
) -> None:
    async with connected(daemon) as client:
        await apply(client, sets["default"])
        before = (await client.model()).generation
        calls = [client.stream(f"{PROMPT} {index}", NEW_UNDER_LOAD) for index in range(STREAMS)]
        heads = [await call.read() for call in calls]
        tails = [asyncio.create_task(read(call)) for call in calls]
        response = await apply(client, sets["a layer"])
        answers = await asyncio.gather(*tails)
    assert (response.from_generation, response.done) == (before, True)
    assert {phase for phase, spent in response.phases_ms.items() if spent > 0} == {
        "validate",
        "build",
        "prove",
        "commit",
    }
    for head, answer in zip(heads, answers, strict=True):
        assert_swapped(head, answer, before, response.to_generation)


def assert_swapped(head: inference_pb2.GenerateResponse, answer: Answer, before: int, after: int) -> None:
    """Whole, and made by two generations, one after the other."""
    made_by = [token.generation for token in (*head.tokens, *answer.tokens)]
    assert answer.last.finish_reason == LENGTH
    assert len(made_by) == NEW_UNDER_LOAD
    assert [generation for generation, _ in itertools.groupby(made_by)] == [before, after]
