"""A daemon on a real model from start to end: signals, crashes, restarts, models that come, go and are broken."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.daemon_process import (
    MODEL,
    NOT_SERVING,
    SERVING,
    Client,
    DaemonProcess,
    asynchronous,
    connected,
    daemon_process,
    read,
    refusal,
)

from dskapi.v1 import control_pb2, inference_pb2
from dskapi.v1.common_pb2 import PRECISION_MODE_FP16, PRECISION_MODE_FP32
from dskquant.store import IR_BIN, IR_XML, MANIFEST, TOKENIZER

LENGTH = inference_pb2.FINISH_REASON_LENGTH
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
REFUSED = grpc.StatusCode.FAILED_PRECONDITION


def model_table(store: Path) -> dict[str, Any]:
    """FP16 alone is resident: of all modes it starts fastest."""
    return {"path": str(store), "resident": ["fp16"], "default_mode": "fp16", "kv_cache_bytes": "64MiB"}


@pytest.fixture
def daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    """Not started yet."""
    with daemon_process({MODEL: model_table(smollm2_store)}) as process:
        yield process


@pytest.fixture(scope="module")
def lasting_daemon(smollm2_store: Path) -> Iterator[DaemonProcess]:
    """One that serves all tests of models that come and go."""
    with daemon_process({MODEL: model_table(smollm2_store)}, allow_load_from_path=True) as process:
        yield process.start()
        assert process.stop() == 0


async def until_health(client: Client, wanted: int, service: str = "") -> None:
    watch = client.health.Watch(health_pb2.HealthCheckRequest(service=service))
    while (await watch.read()).status != wanted:
        pass
    watch.cancel()


# Signals


@asynchronous
async def test_at_sigterm_open_answers_are_finished_and_new_ones_refused(daemon: DaemonProcess) -> None:
    async with connected(daemon.start()) as client:
        call = client.stream(new=100)
        first = await call.read()
        daemon.terminate()
        await until_health(client, NOT_SERVING)
        assert (await refusal(client.stream()))[:2] == (UNAVAILABLE, "the daemon is shutting down")
        answer = await read(call)
        assert len(first.tokens) + len(answer.tokens) == 100
        assert answer.last.finish_reason == LENGTH
    assert daemon.wait() == 0
    assert not daemon.socket.exists()


@asynchronous
async def test_a_second_sigterm_ends_at_once(daemon: DaemonProcess) -> None:
    async with connected(daemon.start()) as client:
        call = client.stream(new=4_000)
        await call.read()
        daemon.terminate()
        await until_health(client, NOT_SERVING)
        daemon.terminate()
        assert (await refusal(call))[0] is UNAVAILABLE
    assert daemon.wait() == 1
    assert daemon.log("stopped")[-1]["forced"] is True


@asynchronous
async def test_sigterm_while_a_model_is_loading_ends_in_order(daemon: DaemonProcess) -> None:
    async with connected(daemon.start(wait=False)) as client:
        status = await client.health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert status.status == NOT_SERVING
        daemon.terminate()
        assert daemon.wait() == 0
    assert not daemon.socket.exists()


# Crashes


@asynchronous
async def test_after_kill_9_the_last_committed_mode_serves(daemon: DaemonProcess) -> None:
    """And the socket that the killed one has left is replaced."""
    async with connected(daemon.start()) as client:
        assert (await client.switch(PRECISION_MODE_FP32)).done
        await client.stream(new=1_000).read()
        daemon.kill()
    assert daemon.socket.is_socket()
    async with connected(daemon.start()) as client:
        assert (await client.model()).mode == PRECISION_MODE_FP32
        assert set((await client.answer()).modes) == {PRECISION_MODE_FP32}
    assert daemon.stop() == 0


@asynchronous
async def test_kill_9_in_the_middle_of_a_switch_leaves_the_mode_before(daemon: DaemonProcess) -> None:
    async with connected(daemon.start()) as client, client.watching() as events:
        await client.switch(PRECISION_MODE_FP32, wait=False)
        assert (await anext(aiter(events))).kind == "mode.preparing"
        daemon.kill()
    async with connected(daemon.start()) as client:
        assert set((await client.answer()).modes) == {PRECISION_MODE_FP16}


@asynchronous
async def test_with_a_damaged_state_file_the_default_mode_serves_and_the_log_says_so(daemon: DaemonProcess) -> None:
    path = daemon.state_dir / "models" / MODEL / "state.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"mode": "fp3')
    async with connected(daemon.start()) as client:
        assert set((await client.answer()).modes) == {PRECISION_MODE_FP16}
    (line,) = daemon.log("committed state cannot be read")
    assert (line["level"], line["path"]) == ("error", str(path))


# Models that come and go


@asynccontextmanager
async def connected_and_loaded(daemon: DaemonProcess) -> AsyncIterator[Client]:
    """A client of a daemon whose model serves, whatever the test before has left."""
    async with connected(daemon) as client:
        if not (await client.status()).models:
            await load(client)
        yield client


def load(client: Client, name: str = MODEL, path: str = "") -> Any:
    return client.control.LoadModel(control_pb2.LoadModelRequest(model=name, path=path))


def unload(client: Client, name: str = MODEL) -> Any:
    return client.control.UnloadModel(control_pb2.UnloadModelRequest(model=name))


@asynchronous
async def test_an_unloaded_model_gives_its_memory_back_and_answers_the_same_when_it_is_back(
    lasting_daemon: DaemonProcess,
) -> None:
    async with connected_and_loaded(lasting_daemon) as client:
        before = await client.answer(new=16)
        loaded, unloaded = [], []
        for _ in range(6):
            loaded.append((await client.status()).rss_bytes >> 20)
            assert (await unload(client)).aborted_requests == 0
            unloaded.append((await client.status()).rss_bytes >> 20)
            await until_health(client, NOT_SERVING)
            code, message, _ = await refusal(client.stream(model=MODEL))
            assert (code, message) == (REFUSED, f"model '{MODEL}' is unloaded; load it first")
            assert (await load(client)).model.state == control_pb2.MODEL_STATE_SERVING
            await until_health(client, SERVING)
            assert (await client.answer(new=16)).ids == before.ids
        history = await client.control.GetHistory(control_pb2.GetHistoryRequest(limit=12))
    assert [entry.kind for entry in history.entries] == ["load", "unload"] * 6
    print(f"RSS loaded {loaded} MiB, unloaded {unloaded} MiB")
    weights = 256  # MiB: 135 million of 16 bits
    assert all(low < high - weights for low, high in zip(unloaded, loaded, strict=True))
    assert min(unloaded[3:]) < 1.1 * min(unloaded[:3])  # what the allocator keeps varies by a tenth each time


@asynchronous
async def test_an_open_answer_is_finished_before_its_model_is_unloaded(lasting_daemon: DaemonProcess) -> None:
    async with connected_and_loaded(lasting_daemon) as client:
        call = client.stream(new=50)
        await call.read()
        going = unload(client)
        await until_health(client, NOT_SERVING, MODEL)
        assert (await refusal(client.stream(model=MODEL)))[0] is UNAVAILABLE
        assert len((await read(call)).tokens) == 49
        assert (await going).aborted_requests == 0
        await load(client)


@asynchronous
async def test_who_waits_for_a_switch_is_told_when_the_model_is_unloaded(lasting_daemon: DaemonProcess) -> None:
    async with connected_and_loaded(lasting_daemon) as client, client.watching() as events:
        switch = asyncio.create_task(client.switch(PRECISION_MODE_FP32))
        assert (await anext(aiter(events))).kind == "mode.preparing"
        await unload(client)
        with pytest.raises(grpc.aio.AioRpcError, match="the model is being unloaded") as caught:
            await switch
        assert caught.value.code() is UNAVAILABLE
        await load(client)
        assert set((await client.answer()).modes) == {PRECISION_MODE_FP16}


# Models that are broken


def without_manifest(store: Path) -> None:
    (store / MANIFEST).unlink()


def cut_manifest(store: Path) -> None:
    replace(store / MANIFEST, (store / MANIFEST).read_bytes()[:100])


def without_weights(store: Path) -> None:
    (store / IR_BIN).unlink()


def cut_weights(store: Path) -> None:
    replace(store / IR_BIN, b"\0" * 1_000)


def cut_graph(store: Path) -> None:
    replace(store / IR_XML, (store / IR_XML).read_bytes()[:10_000])


def without_tokenizer(store: Path) -> None:
    (store / TOKENIZER).unlink()


def cut_tokenizer(store: Path) -> None:
    replace(store / TOKENIZER, (store / TOKENIZER).read_bytes()[:1_000])


def without_parameters(store: Path) -> None:
    shutil.rmtree(store / "parameter_sets")


def replace(path: Path, content: bytes) -> None:
    """What `path` was a link to stays as it is."""
    path.unlink()
    path.write_bytes(content)


BROKEN: tuple[tuple[Callable[[Path], None], str], ...] = (
    (without_manifest, f"no {MANIFEST}"),
    (cut_manifest, MANIFEST),
    (without_weights, f"{IR_BIN}: missing"),
    (cut_weights, "Incorrect weights in bin file"),
    (cut_graph, f"{IR_XML}: damaged"),
    (without_tokenizer, f"{TOKENIZER} is missing"),
    (cut_tokenizer, TOKENIZER),
    (without_parameters, "parameter_sets/default"),
)


@pytest.mark.parametrize(("damage", "reason"), BROKEN)
@asynchronous
async def test_a_broken_store_is_refused_with_the_reason_and_the_others_serve_on(
    lasting_daemon: DaemonProcess, smollm2_store: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(smollm2_store, store, copy_function=lambda source, copy: Path(copy).symlink_to(source))
    damage(store)
    name = damage.__name__
    async with connected_and_loaded(lasting_daemon) as client:
        code, message, _ = await refusal(load(client, name, str(store)))
        assert code is REFUSED
        assert str(store) in message
        assert reason in message
        (newest,) = (await client.control.GetHistory(control_pb2.GetHistoryRequest(limit=1))).entries
        assert (newest.model, newest.outcome, newest.reason) == (name, "rejected", message)
        forgotten, _, _ = await refusal(client.control.GetStatus(control_pb2.GetStatusRequest(model=name)))
        assert forgotten is grpc.StatusCode.NOT_FOUND
        assert (await client.answer(model=MODEL)).last.finish_reason == LENGTH


@asynchronous
async def test_a_store_that_does_not_exist_is_refused(lasting_daemon: DaemonProcess, tmp_path: Path) -> None:
    async with connected_and_loaded(lasting_daemon) as client:
        code, message, _ = await refusal(load(client, "nowhere", str(tmp_path / "nowhere")))
        assert code is REFUSED
        assert message.startswith(f"{tmp_path / 'nowhere'} is not a model store")
        assert (await client.answer(model=MODEL)).last.finish_reason == LENGTH
