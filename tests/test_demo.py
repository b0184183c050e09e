"""The parts of clients/examples/demo.py that need no model: its configuration, its store check, its plan."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dskapi.v1.control_pb2 import SwitchPrecisionResponse
from dskapi.v1.inference_pb2 import GeneratedToken, GenerateResponse
from dskctl.words import MODES, mode_word
from dskd.config import load_config
from dskquant.modes import PrecisionMode
from dskquant.store import IR_BIN, StoreManifest, file_sha256

DEMO = Path(__file__).parents[1] / "clients" / "examples" / "demo.py"


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
    assert config.models["smollm2"].path == demo.STORE


def test_a_socket_path_that_is_too_long_moves_to_a_temporary_folder(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FOLDER", Path("/short"))
    with demo.socket_path() as socket:
        assert socket == Path("/short/dskd.sock")
    monkeypatch.setattr(demo, "FOLDER", tmp_path / ("x" * 100))
    with demo.socket_path() as socket:
        assert len(bytes(socket)) <= 107
        assert socket.parent.is_dir()
    assert not socket.parent.exists()


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
