"""Parameter sets of a real model swapped in a real daemon: what changes, what does not, and that no answer suffers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.changed_sets import Scales, changed_set, scaled
from tests.daemon_process import MODEL, Client, DaemonProcess, asynchronous, connected, daemon_process

from dskapi.v1 import control_pb2
from dskquant.store import DEFAULT_PARAMETER_SET

STREAMS = 8
NEW = 48
ENDLESS = 4000
"""Tokens of an answer that is open for longer than any build takes."""

AFTER = 16
"""Tokens that each open answer must get from the new generation."""
PROMPT = "Question: What is the capital of France?\nAnswer:"
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
    with daemon_process({MODEL: {"path": str(smollm2_store), "kv_cache_bytes": "512MiB"}}) as process:
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
        answers = [OpenAnswer(client.stream(f"{PROMPT} {index}", ENDLESS)) for index in range(STREAMS)]
        await asyncio.gather(*(answer.read() for answer in answers))
        reading = [asyncio.create_task(answer.read_past(before, AFTER)) for answer in answers]
        response = await apply(client, sets["a layer"])
        await asyncio.gather(*reading)
    assert (response.from_generation, response.done) == (before, True)
    assert {phase for phase, spent in response.phases_ms.items() if spent > 0} == {
        "validate",
        "build",
        "prove",
        "commit",
    }
    for answer in answers:
        assert [made_by for made_by, _ in itertools.groupby(answer.generations)] == [before, response.to_generation]


class OpenAnswer:
    """An answer that is read as it comes, and the generations of its tokens."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.generations: list[int] = []

    async def read(self) -> None:
        """The next response; fails if the answer fails or ends."""
        response = await self._call.read()
        assert response is not grpc.aio.EOF
        self.generations += [token.generation for token in response.tokens]

    async def read_past(self, generation: int, tokens: int) -> None:
        """Until there are `tokens` that `generation` has not made."""
        while len(self.generations) - self.generations.count(generation) < tokens:
            await self.read()
