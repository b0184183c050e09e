"""The parts of clients/examples/demo.py that need no model: its configuration, its store check, its plan."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from dskapi.v1.control_pb2 import SwitchPrecisionResponse
from dskapi.v1.inference_pb2 import GeneratedToken, GenerateResponse
from dskctl.words import MODES, mode_word
from dskd.config import load_config
from dskquant.modes import PrecisionMode
from dskquant.store import IR_BIN, StoreManifest, file_sha256

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "clients" / "examples" / "demo.py"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo as a module, with its folder in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER.mkdir()
    return module


def test_the_daemon_understands_the_configuration_of_the_demo(demo: ModuleType) -> None:
    demo.write_config("unix:///tmp/d.sock")
    config = load_config(demo.CONFIG)
    assert [str(address) for address in config.server.listen] == ["unix:///tmp/d.sock"]
    assert config.models["smollm2"].default_mode is PrecisionMode.INT4
    assert config.models["smollm2"].path == demo.STORE.absolute()
    assert config.server.state_dir == demo.STATE.absolute()


def test_a_socket_path_that_is_too_long_moves_to_a_temporary_folder(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FOLDER", Path("/short"))
    with demo.socket_path() as path:
        assert path == Path("/short/dskd.sock")
    monkeypatch.setattr(demo, "FOLDER", tmp_path / ("x" * 100))
    with demo.socket_path() as path:
        assert len(bytes(path)) <= 107
        assert path.parent.is_dir()
    assert not path.parent.exists()


@pytest.fixture
def answering_socket(demo: ModuleType) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{demo.FOLDER}/{demo.SOCKET_NAME}")
        listener.listen()
        yield


@pytest.mark.usefixtures("answering_socket")
def test_a_daemon_that_answers_already_ends_the_demo_before_it_touches_anything(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo.py", "--gguf", "none.gguf"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    demo.STATE.mkdir()
    demo.LOG.write_text("of the other one")
    assert demo.main() == 1
    assert demo.STATE.is_dir()
    assert demo.LOG.read_text() == "of the other one"
    assert not demo.STORE.exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"demo: a daemon already answers on {demo.FOLDER.absolute()}/dskd.sock; stop it first (make serve?)\n"


def test_a_socket_that_nobody_listens_on_is_no_obstacle(demo: ModuleType) -> None:
    path = demo.FOLDER / demo.SOCKET_NAME
    assert not demo.somebody_answers(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert not demo.somebody_answers(path)


@pytest.mark.parametrize(("serve", "kept"), [(True, True), (False, False)])
def test_only_the_demo_itself_forgets_the_committed_state(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, serve: bool, kept: bool
) -> None:
    def no_daemon() -> None:
        raise demo.DemoError("not here")

    write_store(demo.STORE)
    demo.STATE.mkdir()
    monkeypatch.setattr(demo, "running_daemon", no_daemon)
    with pytest.raises(demo.DemoError, match="not here"):
        demo.run(Path("none.gguf"), "unix:///tmp/d.sock", serve)
    assert demo.STATE.exists() == kept


def test_a_daemon_that_dies_while_another_one_serves_is_noticed(demo: ModuleType, tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(f"unix://{tmp_path}/other.sock")
    server.start()
    dead = subprocess.Popen(["false"])
    dead.wait()
    try:
        with (
            grpc.insecure_channel(f"unix://{tmp_path}/other.sock") as channel,
            pytest.raises(demo.DemoError, match="it ended"),
        ):
            demo.wait_until_serving(dead, channel)
    finally:
        server.stop(None).wait()


def test_programs_are_named_by_a_path_that_works_from_here(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ".venv" / "bin" / "dskctl"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo.path_of("dskctl") == ".venv/bin/dskctl"
    monkeypatch.chdir("/")
    assert demo.path_of("dskctl") == str(program).removeprefix("/")
    with pytest.raises(demo.DemoError, match=r"pip install '\.\[daemon\]'"):
        demo.path_of("dskquant")


def write_store(store: Path) -> None:
    store.mkdir(parents=True)
    (store / IR_BIN).write_bytes(b"weights")
    sizes = dict.fromkeys(
        ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"), 1
    )
    digests = {IR_BIN: file_sha256(store / IR_BIN)}
    StoreManifest(
        model_id="m",
        architecture="llama",
        dtype="f16",
        **sizes,
        context_length=8,
        parameters=1,
        bos_token_id=None,
        end_token_ids=(),
        sha256=digests,
    ).write(store)


def test_only_a_store_whose_files_have_their_digests_is_whole(demo: ModuleType) -> None:
    assert not demo.is_whole(demo.STORE)
    write_store(demo.STORE)
    assert demo.is_whole(demo.STORE)
    (demo.STORE / IR_BIN).write_bytes(b"damaged")
    assert not demo.is_whole(demo.STORE)
    (demo.STORE / IR_BIN).unlink()
    assert not demo.is_whole(demo.STORE)


def test_the_conversion_is_skipped_when_the_store_is_whole(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(demo.STORE)
    demo.convert(Path("does-not-exist.gguf"))
    assert (demo.STORE / IR_BIN).exists()


def tokens(mode: str, count: int) -> GenerateResponse:
    made: Any = MODES[mode]
    return GenerateResponse(tokens=[GeneratedToken(precision=made)] * count)


class InstantThread(ThreadPoolExecutor):
    """Runs what it is given before `submit` returns."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(function, *args, **kwargs)
        future.exception()
        return future


def test_the_plan_asks_for_the_next_mode_after_a_stretch_of_the_one_at_hand(demo: ModuleType) -> None:
    asked: list[str] = []

    def switch(request: Any) -> SwitchPrecisionResponse:
        asked.append(mode_word(request.mode))
        return SwitchPrecisionResponse(done=True)

    stretch = demo.STRETCH_TOKENS
    with InstantThread(1) as thread:
        plan = demo.SwitchPlan(SimpleNamespace(switch_precision=switch), thread)
        plan.follow(tokens("int4", stretch - 1))
        assert asked == []
        plan.follow(tokens("int4", 1))
        assert asked == ["int8"]
        plan.follow(tokens("int4", stretch))  # made before the switch took effect
        assert asked == ["int8"]
        plan.follow(tokens("int8", stretch))
        plan.follow(tokens("fp32", stretch))
        assert asked == ["int8", "fp32", "int4"]
        assert not plan.is_done
        plan.follow(tokens("int4", stretch))
    assert plan.is_done
    assert len(plan.reports) == 3


def test_a_refused_switch_ends_the_plan_with_its_error(demo: ModuleType) -> None:
    def refuse(_: Any) -> SwitchPrecisionResponse:
        raise RuntimeError("no memory")

    with InstantThread(1) as thread:
        plan = demo.SwitchPlan(SimpleNamespace(switch_precision=refuse), thread)
        plan.follow(tokens("int4", demo.STRETCH_TOKENS))
        with pytest.raises(RuntimeError, match="no memory"):
            plan.follow(tokens("int4", 1))


SIGNALLED = """\
#!{python}
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
print(sys.argv[1:], flush=True)
told = signal.sigtimedwait({{signal.SIGTERM}}, 20)
print("told to end" if told else "never told to end", flush=True)
"""


@pytest.fixture
def fake_installation(tmp_path: Path) -> list[str]:
    """The variables of the Makefile for an environment whose python tells its arguments and waits for SIGTERM."""
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(SIGNALLED.format(python=sys.executable))
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "installed", "model.gguf"):
        (tmp_path / name).touch()
    return ["VENV=env", "INSTALLED=installed", "SMOLLM=model.gguf"]


@pytest.mark.parametrize(("target", "options"), [("demo", []), ("serve", ["--serve"])])
def test_sigterm_to_make_reaches_the_demo(
    tmp_path: Path, fake_installation: list[str], target: str, options: list[str]
) -> None:
    command = ["make", "-s", "-f", ROOT / "Makefile", target, *fake_installation]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as make:
        assert make.stdout is not None
        arguments = ["clients/examples/demo.py", "--gguf", "model.gguf", *options]
        assert make.stdout.readline() == f"{arguments}\n"
        make.send_signal(signal.SIGTERM)
        assert make.stdout.readline() == "told to end\n"
