"""The configuration: what a file may say, what is used otherwise, and how mistakes are told."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from dskd import config as config_module
from dskd.address import Address
from dskd.config import (
    BatchingConfig,
    Config,
    MetricsConfig,
    ModelConfig,
    ProofConfig,
    SocketMode,
    WatchConfig,
    build_config,
    load_config,
)
from dskd.monitor.config import MonitorConfig
from dskd.typed_toml import Between, ConfigError
from dskd.units import ByteSize, format_bytes
from dskquant.modes import PrecisionMode

ETC = Path(__file__).parent.parent / "etc"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_config(text: str) -> Path:
        path = tmp_path / "dskd.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_config(tomli.loads(text), Path("/base"))
    return list(caught.value.problems)


def uncommented(path: Path) -> str:
    """The example with its commented keys and sections in force (those after "#:" show no default)."""
    return re.sub(r"^# (?=\[[a-z0-9_.]+\]$|[a-z_0-9]+ = )", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("path", sorted(ETC.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_file_loads(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_the_example_shows_every_key_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_can_make", lambda _: True)  # as on a machine set up for it
    table = tomli.loads(uncommented(ETC / "dskd.toml"))
    shown = build_config(table, ETC)
    assert shown == Config(
        watch=WatchConfig(directory=ETC / "quant.d"),
        metrics=MetricsConfig(Address(host="127.0.0.1", port=9464)),
        monitor=MonitorConfig(reference=PrecisionMode.FP32, prefill=PrecisionMode.INT8),
        models={"smollm2": ModelConfig(path=ETC / "smollm2")},
    )
    assert set(table["server"]) | {"tls"} == {item.name for item in dataclasses.fields(shown.server)}
    assert set(table["scheduler"]) == {item.name for item in dataclasses.fields(shown.scheduler)}
    assert set(table["watch"]) == {item.name for item in dataclasses.fields(shown.watch)}
    assert set(table["log"]) == {item.name for item in dataclasses.fields(shown.log)}
    assert set(table["metrics"]) == {item.name for item in dataclasses.fields(shown.metrics)}
    tables = {"threshold", "long_context", "load"}
    assert set(table["monitor"]) | tables == {item.name for item in dataclasses.fields(MonitorConfig)}
    assert set(table["models"]["smollm2"]) | {"monitor", "batching"} == {
        item.name for item in dataclasses.fields(ModelConfig)
    }
    assert set(table["models"]["smollm2"]["proof"]) == {item.name for item in dataclasses.fields(ProofConfig)}


def test_the_example_tells_every_key_of_batching_with_its_default() -> None:
    told = re.findall(r"^#   ([a-z_]+ = \S+)", (ETC / "dskd.toml").read_text(encoding="utf-8"), re.MULTILINE)
    table = tomli.loads("\n".join(told))
    shown = build_config({"models": {"m": {"path": "m", "batching": table}}}, ETC)
    assert shown.models["m"].batching == BatchingConfig()
    assert set(table) == {item.name for item in dataclasses.fields(BatchingConfig)}


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"max_size": 0}, "models.m.batching.max_size = 0: allowed: 1 to 4096"),
        ({"max_delay_ms": -1}, "models.m.batching.max_delay_ms = -1: allowed: 0 to 60000"),
        ({"preferred_sizes": [2, 9]}, "models.m.batching.preferred_sizes: 9 must not be above max_size, 8"),
        ({"prefered_sizes": [2]}, "models.m.batching.prefered_sizes: unknown key; did you mean 'preferred_sizes'?"),
    ],
)
def test_wrong_batching_is_refused_by_name(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_config({"models": {"m": {"path": "m", "batching": table}}}, ETC)
    assert refused.value.problems == (problem,)


def numbers_in(section: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that takes a number, with its type."""
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is not typing.Annotated else [hint]
        for option in options:
            kind = typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option
            if dataclasses.is_dataclass(kind) and kind is not Address:
                yield from numbers_in(kind, f"{where}.{name}")
            elif isinstance(kind, type) and issubclass(kind, (int, float)) and kind not in (bool, SocketMode):
                yield f"{where}.{name}", option


def test_every_number_has_an_upper_bound() -> None:
    """What is beyond the numbers of the machine would be accepted and then fail wherever it is used."""
    numbers = dict(numbers_in(Config))
    assert len(numbers) > 30
    unbounded = [
        key for key, hint in numbers.items() if not math.isfinite(getattr(hint, "__metadata__", (Between(0),))[0].high)
    ]
    assert unbounded == []


def test_the_tls_section_of_the_example_is_whole() -> None:
    text = re.sub(r"^#: ", "", (ETC / "dskd.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert problems_of(text) == [
        "server.tls.certificate: no file /base/server.pem",
        "server.tls.key: no file /base/server.key",
        "server.tls.client_ca: no file /base/clients.pem",
    ]


def test_a_model_takes_what_the_file_says(write: Callable[[str], Path], tmp_path: Path) -> None:
    path = write(
        """
        [models.a]
        path = "stores/a"
        resident = ["int8", "fp32"]
        default_mode = "fp32"
        kv_cache_bytes = "512MiB"
        on_demand_ttl_s = 5
        proof = {max_kl = 0.5}
        """
    )
    model = load_config(path).models["a"]
    assert model.path == tmp_path / "stores" / "a"
    assert model.resident == (PrecisionMode.INT8, PrecisionMode.FP32)
    assert model.default_mode is PrecisionMode.FP32
    assert model.kv_cache_bytes == 536_870_912
    assert model.on_demand_ttl_s == 5.0
    assert (model.proof.max_kl, model.proof.min_agreement) == (0.5, 0.3)


def test_paths_start_at_the_directory_of_the_file(write: Callable[[str], Path], tmp_path: Path) -> None:
    path = write('server.listen = ["unix:run/d.sock"]\nmodels.a.path = "/abs"\nserver.state_dir = "state"')
    config = load_config(path)
    assert config.server.listen == (Address(path=tmp_path / "run" / "d.sock"),)
    assert config.server.state_dir == tmp_path / "state"
    assert config.models["a"].path == Path("/abs")


def test_the_command_line_replaces_single_keys(write: Callable[[str], Path]) -> None:
    path = write('server.grace_s = 3\nserver.listen = ["127.0.0.1:1"]')
    server = load_config(path, {"server": {"listen": ["127.0.0.1:2"]}}).server
    assert (server.grace_s, server.listen) == (3.0, (Address(host="127.0.0.1", port=2),))


def test_all_problems_of_a_file_are_told_together() -> None:
    problems = problems_of(
        """
        [server]
        grace_s = -1
        lisen = ["unix:///tmp/x"]
        [scheduler]
        max_sequences = "many"
        [models.a]
        default_mode = "int5"
        """
    )
    assert sorted(problems) == [
        'models.a.default_mode = "int5": allowed: int4, int8, fp16, fp32'.replace(
            "int4, int8, fp16, fp32", '"int4", "int8", "fp16", "fp32"'
        ),
        "models.a.path: is missing",
        'scheduler.max_sequences = "many": allowed: a whole number',
        "server.grace_s = -1: allowed: 0 to 31622400.0",
        "server.lisen: unknown key; did you mean 'listen'?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("servr = {}", "servr: unknown key; did you mean 'server'?"),
        ("q = {}", "q: unknown key; known: log, "),
        ("watch.directry = 'x'", "watch.directry: unknown key; did you mean 'directory'?"),
        ("watch.settle_s = -1", "watch.settle_s = -1: allowed: 0 to 31622400.0"),
        ("watch.rescan_s = 0", "watch.rescan_s = 0: allowed: 0.1 to 31622400.0"),
        ("watch.polling = 1", "watch.polling = 1: allowed: true or false"),
        ("models.a = {path = 'x', swap = 'fast'}", 'models.a.swap = "fast": allowed: "availability", "resource"'),
        ("models.a = {path = 'x', keep_generations = 1}", "models.a.keep_generations = 1: allowed: 2 to 1000"),
        ("models.a = {path = 'x', keep_previous_s = -1}", "models.a.keep_previous_s = -1: allowed: 0 to 31622400.0"),
        ("server = 3", "server = 3: allowed: a table"),
        ("server.listen = 'unix:///x'", 'server.listen = "unix:///x": allowed: a list'),
        ("server.listen = []", "server.listen: at least one address is needed"),
        ("server.insecure = 1", "server.insecure = 1: allowed: true or false"),
        ("scheduler.max_waiting = true", "scheduler.max_waiting = true: allowed: a whole number"),
        ("scheduler.max_batch_tokens = 0", "scheduler.max_batch_tokens = 0: allowed: 1 to 65536"),
        ("log.level = 'loud'", 'log.level = "loud": allowed: "debug", "info", "warning", "error"'),
        ("server.max_message_bytes = '4GiB'", 'server.max_message_bytes = "4GiB": allowed: 1 to 2147483647'),
        ("models.a = {path = 'x', resident = ['int8', 4]}", "models.a.resident[1] = 4: allowed: "),
        ("models.a = {path = 'x', resident = ['int8']}", 'models.a.default_mode: "int4" must be one of the resident'),
        (
            "models.a = {path = 'x', engine = 'auto', kv_precision = 'bf16'}",
            'models.a.kv_precision: "bf16" keys and values cannot move to ONNX Runtime',
        ),
        (
            "models.a = {path = 'x', engine = 'onnx'}",
            'models.a.engine = "onnx": allowed: "openvino", "onnxruntime", "auto"',
        ),
        ("models.a = {path = 'x', kv_cache_bytes = '2 gigs'}", 'models.a.kv_cache_bytes = "2 gigs": allowed: '),
        *(
            (f"models.a = {{path = 'x', kv_cache_bytes = '{'9' * digits}GiB'}}", "models.a.kv_cache_bytes = ")
            for digits in (308, 400)  # the product, or the number itself, is beyond all floats
        ),
        ("models.a = {path = '~nosuchuser/x'}", 'models.a.path = "~nosuchuser/x": allowed: a path'),
        (
            "models.a = {path = 'x', proof = {min_agreement = 1.5}}",
            "models.a.proof.min_agreement = 1.5: allowed: 0 to 1",
        ),
        ("models.'a/b' = {path = 'x'}", "models.a/b: a name has letters"),
        ("server.socket_mode = '0990'", 'server.socket_mode = "0990": allowed: a string of octal digits'),
        ("server.tls = {key = '/dev/null'}", "server.tls.certificate: is missing"),
        ("metrics.listen = 'unix:/run/m.sock'", "metrics.listen: unix:///run/m.sock is no TCP address"),
        ("monitor.threshold.int4 = 0", "monitor.threshold.int4 = 0: allowed: 1e-06 to 1000000.0"),
        ("monitor.dwell_s = 1000", "monitor.max_dwell_s: 900.0 must not be below dwell_s, 1000.0"),
        ("monitor.load = {mode = 'fp32', queue = 1, max_kl = 1}", "monitor.load.mode: fp32 is not a faster mode"),
        ("models.a = {path = 'x', monitor = {share = 2}}", "models.a.monitor.share = 2: allowed: 0 to 1"),
        ("server.grace_s = nan", "server.grace_s = nan: allowed: 0 to 31622400.0"),
    ],
)
def test_a_mistake_names_key_value_and_what_is_allowed(text: str, problem: str) -> None:
    assert any(told.startswith(problem) for told in problems_of(text)), problems_of(text)


@pytest.mark.parametrize("text", ["0.0.0.0:7411", "[::]:7411", "192.0.2.1:7411", "example.org:7411"])
def test_plain_tcp_beyond_loopback_is_refused(text: str) -> None:
    (problem,) = problems_of(f"server.listen = ['{text}']")
    assert problem.startswith(f"server.listen: {text} can be reached from other machines without encryption")
    assert build_config({"server": {"listen": [text], "insecure": True}}, Path("/")).server.insecure


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:///tmp/d.sock"])
def test_loopback_needs_no_encryption(text: str) -> None:
    assert [str(address) for address in build_config({"server": {"listen": [text]}}, Path("/")).server.listen] == [text]


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:65536", "::1:80", "unix:", "unix://"])
def test_what_is_no_address_is_told_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        Address.from_toml(text, Path("/"))


def test_a_socket_path_too_long_for_the_system_is_told_in_time() -> None:
    with pytest.raises(ValueError, match="has 108 bytes; the system allows 107"):
        Address.from_toml("unix:" + "/" + "x" * 107, Path("/"))


def test_a_damaged_file_is_named(write: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dskd\.toml: .*line 1"):
        load_config(write("server = = 1"))
    with pytest.raises(ConfigError, match=r"dskd\.toml: .*nested"):
        load_config(write("a = " + "[" * 100_000))
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_config(tmp_path / "none.toml")


def test_a_user_without_rights_gets_a_socket_and_a_state_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/state")
    monkeypatch.setattr(config_module, "_can_make", lambda _: False)
    server = Config().server
    assert [str(address) for address in server.listen] == ["unix:///run/user/7/dskd.sock"]
    assert server.state_dir == Path("/home/u/state/dskd")


@given(st.integers(1, 1 << 50), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_are_multiples_of_their_unit(amount: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}[unit]
    small = amount % 1000 + 1
    assert ByteSize.from_toml(f"{small}{unit}", Path("/")) == small * factor


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 1 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "3.0 GiB",
    ]
