"""The command `dskd`: its exit codes, what it says about mistakes, and what the doctor finds."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fake_host import MANIFEST

from dskd import cli, doctor
from dskd.cli import main
from dskd.config import load_config
from dskd.doctor import Level, examine
from dskd.engine.step_times import StepKind
from dskd.manager.timings_file import timings_file
from dskquant.modes import PrecisionMode


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A /proc with 1 GiB available and a CPU with VNNI."""
    root = tmp_path / "root"
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemAvailable: 1048576 kB\n")
    set_flags(root, "avx2 avx512f avx512_vnni")
    return root


def set_flags(root: Path, flags: str) -> None:
    (root / "proc" / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")
    digest = hashlib.sha256(b"w").hexdigest()
    dataclasses.replace(MANIFEST, sha256={"weights": digest}).write(folder)
    return folder


def config_for(store: Path) -> Path:
    path = store.parent / "dskd.toml"
    path.write_text(f"[models.m]\npath = {str(store)!r}\n")
    return path


def details(root: Path, config: Path | None, subject: str) -> list[tuple[Level, str]]:
    return [(found.level, found.detail) for found in examine(config, root) if found.subject == subject]


def test_each_mistake_of_a_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dskd.toml"
    path.write_text("[server]\ngrace = 1\n[log]\nlevel = 'loud'\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"dskd: {path}: server.grace: unknown key; did you mean 'grace_s'?",
        f'dskd: {path}: log.level = "loud": allowed: "debug", "info", "warning", "error"',
    ]


def test_a_configuration_that_is_not_there_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.toml"
    assert main(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err == f"dskd: {path}: No such file or directory\n"


def test_a_wrong_address_on_the_command_line_is_a_wrong_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "SYSTEM_CONFIG", tmp_path / "none.toml")
    assert main(["serve", "--listen", "0.0.0.0:7411"]) == 2
    assert "0.0.0.0:7411 can be reached from other machines" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve", "--log-format", "xml"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: dskd" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["dskd", "dskquant"])
def test_where_the_client_alone_is_installed_the_others_tell_what_to_install(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"{program}.cli", None)  # the import fails, as that of a missing package
    assert importlib.import_module(f"{program}.__main__").main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{program}: no module")
    assert err.endswith("from the source directory with: pip install '.[daemon]'\n")


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "dskd serve --config etc/dskd.toml" in capsys.readouterr().out


def test_without_standard_error_the_command_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(cli, "main", lambda: len(sys.stderr.name))
    assert importlib.import_module("dskd.__main__").main() == len("/dev/null")
    sys.stderr.close()


@pytest.mark.parametrize("signals", [1, 2])
def test_the_process_ends_at_a_signal_and_removes_its_socket(tmp_path: Path, signals: int) -> None:
    """`stuck` is a thread that never ends, as that of a build."""
    (tmp_path / "dskd.toml").write_text(f"[server]\nstate_dir = {str(tmp_path)!r}\n")
    program = (
        "import sys, threading; from dskd.cli import main;"
        "threading.Thread(target=threading.Event().wait, name='stuck').start();"
        "main(['serve', '--config', 'dskd.toml', '--listen', 'unix:s'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("listening" in line for line in process.stderr)
            for _ in range(signals):
                process.terminate()
            assert "stopped" in process.communicate(timeout=20)[1]
        finally:
            process.kill()
    assert process.returncode in (0, 1)
    assert not (tmp_path / "s").exists()


def test_a_socket_on_the_command_line_starts_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = cli.build_parser().parse_args(["serve", "--listen", "unix:d.sock", "--listen", "127.0.0.1:1"])
    assert cli._overrides(options) == {"server": {"listen": [f"unix:{tmp_path}/d.sock", "127.0.0.1:1"]}}


def test_the_doctor_finds_nothing_wrong_with_a_whole_store(machine: Path, store: Path) -> None:
    assert details(machine, config_for(store), "models.m") == [(Level.OK, f"{store} is whole")]


def test_the_doctor_tells_which_engine_was_measured_to_be_faster(machine: Path, store: Path) -> None:
    config = config_for(store)
    config.write_text(f"{config.read_text()}engine = 'auto'\n[server]\nstate_dir = 'state'\n")
    (model,) = load_config(config).models.values()
    times = {StepKind("openvino", PrecisionMode.INT4, 1): 0.055, StepKind("onnxruntime", PrecisionMode.INT4, 1): 0.032}
    file = timings_file(store.parent / "state" / "models" / "m", model, ("openvino", "onnxruntime"))
    file.write(times | {StepKind("openvino", PrecisionMode.INT8, 1): 0.060})  # of one engine alone: says nothing
    found = [detail for _, detail in details(machine, config, "models.m")]
    assert found[1:] == ["a step in int4: 1 at a time openvino 55.0 ms, onnxruntime 32.0 ms"]


def test_the_doctor_names_damaged_and_missing_files(machine: Path, store: Path) -> None:
    config = config_for(store)
    (store / "weights").write_bytes(b"x")
    ((level, detail),) = details(machine, config, "models.m")
    assert level is Level.FAILED
    assert detail.startswith(f"{store / 'weights'} is damaged")
    (store / "weights").unlink()
    assert details(machine, config, "models.m") == [(Level.FAILED, f"{store / 'weights'} is missing")]


def test_the_doctor_names_a_directory_that_is_no_store(machine: Path, tmp_path: Path) -> None:
    ((level, detail),) = details(machine, config_for(tmp_path / "nothing"), "models.m")
    assert level is Level.FAILED
    assert "is not a model store" in detail


def test_the_doctor_tells_every_mistake_of_the_configuration(machine: Path, tmp_path: Path) -> None:
    path = tmp_path / "dskd.toml"
    path.write_text("servr = 1\n[log]\nformat = 3\n")
    assert [level for level, _ in details(machine, path, "config")] == [Level.FAILED, Level.FAILED]


def test_the_doctor_knows_the_features_of_the_cpu(machine: Path) -> None:
    ((level, detail),) = details(machine, None, "cpu")
    assert level is Level.OK
    assert detail.endswith("; AVX2, AVX-512, VNNI")


def test_the_doctor_warns_of_saturation_without_vnni(machine: Path) -> None:
    set_flags(machine, "avx2")
    _, (level, detail) = details(machine, None, "cpu")
    assert level is Level.WARNING
    assert "no VNNI" in detail
    assert "saturate" in detail


def test_the_doctor_tells_the_memory_that_is_left(machine: Path) -> None:
    assert details(machine, None, "memory") == [(Level.OK, "1.0 GiB available to this process")]


def test_the_doctor_tells_a_missing_engine(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENGINE_PACKAGES", ("surely-not-installed",))
    ((level, _),) = details(machine, None, "surely-not-installed")
    assert level is Level.FAILED


def test_the_doctor_exits_with_1_when_something_failed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(store)
    assert main(["doctor", "--config", str(config)]) == 0
    (store / "weights").unlink()
    capsys.readouterr()
    assert main(["doctor", "--json", "--config", str(config)]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [found["subject"] for found in findings if found["level"] == "failed"] == ["models.m"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_start_in_order_and_a_hangup_does_not(number: signal.Signals) -> None:
    """While the daemon is still being imported: nothing listens to signals then but what comes first."""
    script = (
        "import os, signal, sys, types\n"
        "from dskd import __main__\n"
        "def run():\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('went on', flush=True)\n"
        f"    os.kill(os.getpid(), {number.value})\n"
        "    return 9\n"
        "sys.modules['dskd.cli'] = types.SimpleNamespace(main=run)\n"
        "sys.argv = ['dskd', 'serve']\n"
        "sys.exit(__main__.main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
