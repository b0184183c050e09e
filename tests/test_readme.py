"""What README.md says is what the programs do: its commands parse, its tables are complete."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import tomli

from dskctl.exits import EXIT_CODES

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = ("dskctl", "dskd", "dskquant")
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> Iterator[list[str]]:
    """The commands of our programs in the sh blocks of `text`, without redirections."""
    for block in SHELL_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from own_commands(line)


def own_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    for word in (*lexer, ";"):
        if word[0] not in "();<>|&":
            command.append(word)
            continue
        if command and (program := Path(command[0]).name) in PROGRAMS:
            yield [program, *command[1:]]
        command = []


def test_commands_are_found_without_comments_pipes_and_redirections() -> None:
    text = (
        "```sh\ncat x | a/dskctl generate --raw \\\n - < p.txt  # why\ndskd serve; ls\n```\n```text\ndskctl no\n```\n"
    )
    assert list(command_lines(text)) == [["dskctl", "generate", "--raw", "-"], ["dskd", "serve"]]


@pytest.mark.parametrize("command", list(command_lines(README)), ids=" ".join)
def test_every_command_parses(command: list[str]) -> None:
    program, *arguments = command
    parser: argparse.ArgumentParser = importlib.import_module(f"{program}.cli").build_parser()
    parser.parse_args(arguments)  # exits with an error, which fails the test, when it does not understand them


def test_the_programs_are_all_shown() -> None:
    assert {command[0] for command in command_lines(README)} == set(PROGRAMS)


def test_every_verb_of_dskctl_is_shown() -> None:
    verbs = importlib.import_module("dskctl.verbs").ALL
    shown = {word for program, *words in command_lines(README) if program == "dskctl" for word in words}
    assert {verb.name for verb in verbs} <= shown


def test_the_exit_codes_are_those_of_dskctl() -> None:
    section = README.partition("### Exit codes of dskctl")[2].partition("\n#")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)] == list(EXIT_CODES)


def problems_of(toml: str) -> tuple[str, ...]:
    config, typed_toml = importlib.import_module("dskd.config"), importlib.import_module("dskd.typed_toml")
    try:
        if "model" in (table := tomli.loads(toml)):
            importlib.import_module("dskd.quant_config").parse(toml, "example", Path("/"))
        else:
            config.build_config(table, Path("/"))
    except typed_toml.ConfigError as error:
        return tuple(error.problems)
    return ()


def test_the_configuration_examples_are_valid_but_for_their_files() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    problems = [problem for example in examples for problem in problems_of(example)]
    assert len(examples) == 4
    assert all("no file" in problem for problem in problems), problems


def test_the_configuration_table_has_every_key_in_order() -> None:
    config = importlib.import_module("dskd.config")
    sections = {
        "server": config.ServerConfig,
        "server.tls": config.TlsConfig,
        "scheduler": config.SchedulerConfig,
        "watch": config.WatchConfig,
        "log": config.LogConfig,
        "metrics": config.MetricsConfig,
        "monitor": config.MonitorConfig,
        "monitor.threshold": importlib.import_module("dskd.monitor.config").ThresholdConfig,
        "models.NAME": config.ModelConfig,
        "models.NAME.proof": config.ProofConfig,
        "models.NAME.batching": config.BatchingConfig,
    }
    keys = [f"[{name}] {field.name}" for name, section in sections.items() for field in fields(section)]
    assert re.findall(r"^\| `(\[[\w.]+\] \w+)` \|", README, re.MULTILINE) == keys
