"""What docs/plain-graphs.md and the README tell to type works, in that order, on real graphs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from test_readme import README, command_lines
from tests.plain_models import DETECTOR, MAGIKA, Arrays, files, pages, present, saved

from dskquant.cli import main

GUIDE = (Path(__file__).parents[1] / "docs" / "plain-graphs.md").read_text(encoding="utf-8")
SECTION = README.partition("### Other graphs")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("text", "graph", "data"),
    [(GUIDE, DETECTOR, pages(1, size=96)), (SECTION, MAGIKA, files(4))],
    ids=["guide", "readme"],
)
def test_every_command_runs(
    text: str, graph: Path, data: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(present(graph), "detector.onnx")
    saved(Path("inputs.npz"), data)
    commands = list(command_lines(text))
    assert len(commands) >= 3
    for _, *arguments in commands:
        assert main([argument.replace("/srv/", "srv/") for argument in arguments]) == 0, arguments


def test_every_option_that_is_told_of_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps = ""
    for verb in ("convert", "recommend", "inspect"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        helps += capsys.readouterr().out
    for option in re.findall(r"`[^`\n]*?(--[a-z0-9-]+)", GUIDE):
        assert option in helps
