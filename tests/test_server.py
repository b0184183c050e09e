"""The daemon's life: where it listens and who may connect, when it is ready, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from tests.fake_host import FakeHost, Service, asynchronous, output, outputs, serving, tiny_codec

from dskapi.v1 import control_pb2, control_pb2_grpc, inference_pb2
from dskd import server
from dskd.address import Address
from dskd.config import Config, ServerConfig, TlsConfig
from dskd.engine.request import FinishReason
from dskd.errors import ResourceExhaustedError
from dskd.listen import StartupError
from dskd.server import CLEAN, FORCED, Daemon
from dskd.text.tokenizer import TextCodec
from dskquant.errors import StoreError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = inference_pb2.GenerateRequest(prompt="x")
STATUS = control_pb2.GetStatusRequest()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return tiny_codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def host(codec: TextCodec) -> FakeHost:
    return FakeHost(codec, outputs("fine"))


async def health_of(service: Service, name: str = "") -> Any:
    return (await service.health.Check(health_pb2.HealthCheckRequest(service=name))).status


async def until_health(service: Service, name: str, wanted: Any) -> None:
    watch = service.health.Watch(health_pb2.HealthCheckRequest(service=name))
    while (await watch.read()).status != wanted:
        pass
    watch.cancel()


async def code_of(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await call.code()
    return code


@asynccontextmanager
async def listening(*addresses: Address, **server: Any) -> AsyncIterator[Daemon]:
    """A daemon without models on these addresses."""
    daemon = Daemon(Config(server=ServerConfig(listen=addresses, **server)), lambda *_: pytest.fail("no model"))
    await daemon.startup()
    try:
        yield daemon
    finally:
        await daemon.shutdown()


async def status_over(target: str, credentials: grpc.ChannelCredentials | None = None) -> control_pb2.GetStatusResponse:
    channel = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
    async with channel:
        response: control_pb2.GetStatusResponse = await control_pb2_grpc.ControlStub(channel).GetStatus(
            STATUS, timeout=10
        )
        return response


# Readiness


@asynchronous
async def test_nothing_is_ready_before_the_first_model_serves(tmp_path: Path, host: FakeHost) -> None:
    host.load_result = asyncio.Event()
    async with serving(tmp_path, {"m": host}) as service:
        assert await health_of(service) == NOT_SERVING
        assert await health_of(service, "m") == NOT_SERVING
        host.load_result.set()
        await until_health(service, "m", SERVING)
        assert await health_of(service) == SERVING


@asynchronous
async def test_a_daemon_without_models_is_not_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, {}) as service:
        assert await health_of(service) == NOT_SERVING


@asynchronous
async def test_loading_another_model_does_not_take_readiness_away(tmp_path: Path, host: FakeHost) -> None:
    other = FakeHost(host.codec)
    async with serving(tmp_path, {"m": host, "other": other}) as service:
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="other"))
        other.load_result = asyncio.Event()
        watch = service.control.WatchEvents(control_pb2.WatchEventsRequest(model="other"))
        await watch.initial_metadata()
        load = service.control.LoadModel(control_pb2.LoadModelRequest(model="other"))
        assert (await watch.read()).kind == "model.loading"
        assert (await health_of(service), await health_of(service, "m")) == (SERVING, SERVING)
        assert await health_of(service, "other") == NOT_SERVING
        assert [r async for r in service.inference.Generate(inference_pb2.GenerateRequest(model="m", prompt="x"))]
        other.load_result.set()
        await load
        await until_health(service, "other", SERVING)
        watch.cancel()


@asynchronous
async def test_a_failed_load_leaves_the_others_serving(tmp_path: Path, host: FakeHost) -> None:
    broken = FakeHost(host.codec)
    broken.load_result = StoreError("damaged")
    async with serving(tmp_path, {"broken": broken, "m": host}) as service:
        await until_health(service, "m", SERVING)
        assert await health_of(service, "broken") == NOT_SERVING
        assert [r async for r in service.inference.Generate(PROMPT)]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(StoreError("damaged"), True), (ResourceExhaustedError("memory", "too little"), True), (KeyError("x"), False)],
)
@asynchronous
async def test_the_log_has_a_traceback_of_an_unexpected_failure_alone(
    tmp_path: Path, host: FakeHost, failure: Exception, expected: bool
) -> None:
    host.load_result = failure
    with capture_logs() as lines:
        async with serving(tmp_path, {"m": host}):
            pass
    (line,) = (line for line in lines if line["event"] == "model failed")
    assert (line["model"], line["during"], line["reason"]) == ("m", "load", str(failure))
    assert line["exc_info"] is (None if expected else failure)


@asynchronous
async def test_readiness_goes_with_the_last_model(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        await until_health(service, "", SERVING)
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="m"))
        await until_health(service, "", NOT_SERVING)


@asynchronous
async def test_reflection_names_the_services(tmp_path: Path) -> None:
    async with serving(tmp_path, {}) as service:
        channel: Any = service.channel  # the stubs know the synchronous one alone
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {item.name for item in (await call.read()).list_services_response.service}
        call.cancel()
    assert {"dskapi.v1.Inference", "dskapi.v1.Control", "grpc.health.v1.Health"} <= listed


# Ends


@asynchronous
async def test_an_open_answer_is_finished_and_new_ones_are_refused(tmp_path: Path, codec: TextCodec) -> None:
    held = asyncio.Event()
    host = FakeHost(codec, [output(104), held, output(105, finish=FinishReason.LENGTH)])
    async with serving(tmp_path, {"m": host}) as service:
        await until_health(service, "", SERVING)
        call = service.inference.Generate(PROMPT)
        assert (await call.read()).text == "h"
        ending = service.end()
        await until_health(service, "", NOT_SERVING)
        late = service.inference.Generate(PROMPT)
        assert await code_of(late) is grpc.StatusCode.UNAVAILABLE
        assert await late.details() == "the daemon is shutting down"
        load = service.control.LoadModel(control_pb2.LoadModelRequest(model="m"))
        assert await code_of(load) is grpc.StatusCode.UNAVAILABLE
        held.set()
        last = await call.read()
        assert (last.text, last.finish_reason) == ("i", inference_pb2.FINISH_REASON_LENGTH)
        assert await code_of(call) is grpc.StatusCode.OK
        assert await ending == CLEAN
    assert host.graces == [5.0]


@asynchronous
async def test_what_outlasts_the_grace_period_is_told_so(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}, grace_s=0.05) as service:
        call = service.inference.Generate(PROMPT)
        await call.read()
        assert await service.end() == CLEAN
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the model was unloaded before the answer was complete"


@asynchronous
async def test_a_second_stop_forces_the_end(tmp_path: Path, codec: TextCodec) -> None:
    host = FakeHost(codec, [output(104), asyncio.Event()])
    async with serving(tmp_path, {"m": host}, grace_s=1000.0) as service:
        call = service.inference.Generate(PROMPT)
        await call.read()
        ending = service.end()
        await until_health(service, "", NOT_SERVING)
        service.daemon.stop()
        assert await ending == FORCED
        assert await code_of(call) is not grpc.StatusCode.OK
    assert host.graces == [1000.0, 0]


@asynchronous
async def test_a_load_is_given_up_at_the_end(tmp_path: Path, host: FakeHost) -> None:
    host.load_result = asyncio.Event()
    async with serving(tmp_path, {"m": host}) as service:
        assert await service.end() == CLEAN
        assert service.daemon.registry.get("m").state.value == "unloaded"


class StubbornHost(FakeHost):
    """Its load cannot be cancelled at once, as that of a model with a build under way."""

    async def load(self) -> None:
        try:
            await super().load()
        finally:
            await asyncio.Event().wait()


@pytest.mark.parametrize(("stops", "code"), [(1, CLEAN), (2, FORCED)])
@asynchronous
async def test_a_build_is_not_waited_for(
    tmp_path: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, stops: int, code: int
) -> None:
    monkeypatch.setattr(server, "LAST_WORDS_S", 0.05)
    host = StubbornHost(codec)
    host.load_result = asyncio.Event()
    async with serving(tmp_path, {"m": host}, grace_s=0.05 if stops == 1 else 1000.0) as service:
        await asyncio.sleep(0)  # the load begins
        ending = service.end()
        await until_health(service, "", NOT_SERVING)
        for _ in range(stops - 1):
            service.daemon.stop()
        assert await ending == code


@asynchronous
async def test_a_watch_sees_the_end_and_is_ended(tmp_path: Path, host: FakeHost) -> None:
    async with serving(tmp_path, {"m": host}) as service:
        watch = service.control.WatchEvents(control_pb2.WatchEventsRequest())
        await watch.initial_metadata()
        ending = service.end()
        kinds = [(await watch.read()).kind for _ in range(4)]
        assert kinds == ["daemon.stopping", "model.unloading", "model.unloaded", "daemon.stopped"]
        assert await code_of(watch) is grpc.StatusCode.UNAVAILABLE
        assert await ending == CLEAN


@asynchronous
async def test_the_whole_life_returns_the_exit_code(tmp_path: Path) -> None:
    config = Config(server=ServerConfig(listen=(Address(path=tmp_path / "s"),)))
    daemon = Daemon(config, lambda *_: pytest.fail("no model"))
    daemon.stop()
    assert await daemon.run() == CLEAN
    assert not (tmp_path / "s").exists()


@asynchronous
async def test_systemd_is_told_of_readiness_and_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with listening(Address(path=tmp_path / "s")):
            assert manager.recv(100) == b"READY=1"
        assert manager.recv(100) == b"STOPPING=1"


# Unix sockets


@asynchronous
async def test_a_unix_socket_is_for_owner_and_group_in_a_directory_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run" / "dskd.sock"
    async with listening(Address(path=path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
        assert (await status_over(f"unix:{path}")).pid


@asynchronous
async def test_the_mode_of_the_socket_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "dskd.sock"
    async with listening(Address(path=path), socket_mode=0o600):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@asynchronous
async def test_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dskd.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()
    async with listening(Address(path=path)):
        assert (await status_over(f"unix:{path}")).pid


@asynchronous
async def test_a_second_daemon_leaves_the_first_alone(tmp_path: Path) -> None:
    address = Address(path=tmp_path / "dskd.sock")
    async with listening(address):
        second = Daemon(Config(server=ServerConfig(listen=(address,))), lambda *_: pytest.fail("no model"))
        with pytest.raises(StartupError, match="another dskd is running: it answers on unix://"):
            await second.run()
        assert (await status_over(f"unix:{address.path}")).pid


@asynchronous
async def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "dskd.sock"
    path.write_text("precious")
    with pytest.raises(StartupError, match="exists and is not a socket"):
        async with listening(Address(path=path)):
            pass
    assert path.read_text() == "precious"


# TCP


@asynchronous
async def test_plain_tcp_answers_on_loopback_and_a_port_belongs_to_one_daemon(tmp_path: Path) -> None:
    async with listening(Address(host="127.0.0.1", port=0)) as daemon:
        (address,) = daemon.addresses
        assert (await status_over(str(address))).pid
        with pytest.raises(StartupError, match=f"cannot listen on {address}: Address already in use"):
            async with listening(address):
                pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem; server.pem and client.pem signed by it; stranger.pem signed by nobody. Keys beside them."""
    folder = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        openssl("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signer)
    return folder


def client_credentials(folder: Path, name: str | None = None) -> grpc.ChannelCredentials:
    ca = (folder / "ca.pem").read_bytes()
    if name is None:
        return grpc.ssl_channel_credentials(ca)
    key, certificate = ((folder / f"{name}.{kind}").read_bytes() for kind in ("key", "pem"))
    return grpc.ssl_channel_credentials(ca, key, certificate)


def tls(folder: Path, client_ca: str | None = None) -> TlsConfig:
    return TlsConfig(folder / "server.pem", folder / "server.key", folder / client_ca if client_ca else None)


@asynchronous
async def test_with_a_certificate_tcp_speaks_tls_alone(certificates: Path) -> None:
    async with listening(Address(host="127.0.0.1", port=0), tls=tls(certificates)) as daemon:
        (address,) = daemon.addresses
        assert (await status_over(str(address), client_credentials(certificates))).pid
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status_over(str(address))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@asynchronous
async def test_with_a_client_authority_only_its_clients_come_in(certificates: Path) -> None:
    async with listening(Address(host="127.0.0.1", port=0), tls=tls(certificates, "ca.pem")) as daemon:
        (address,) = daemon.addresses
        assert (await status_over(str(address), client_credentials(certificates, "client"))).pid
        for name in (None, "stranger"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status_over(str(address), client_credentials(certificates, name))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@asynchronous
async def test_a_damaged_certificate_stops_the_start(certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    broken = TlsConfig(tmp_path / "bad.pem", certificates / "server.key")
    with pytest.raises(StartupError):
        async with listening(Address(host="127.0.0.1", port=0), tls=broken):
            pass
