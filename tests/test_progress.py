"""How dskquant tells how far it is where stderr is no terminal."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from dskquant.commands import progress


def test_a_log_gets_a_line_when_some_time_has_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("time.monotonic", clock)
    with progress.progress_bar(quiet=False) as show:
        for done, now in enumerate([9.0, 10.0, 19.0, 21.0]):
            clock.return_value = now
            show("quantizing layers.0", done, 4)
    assert capsys.readouterr().err == "quantizing layers.0: 1 of 4\nquantizing layers.0: 3 of 4\n"


def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.progress_bar(quiet=True) as show:
        show("quantizing layers.0", 0, 4)
    assert capsys.readouterr().err == ""
