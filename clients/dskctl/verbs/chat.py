"""`dskctl chat`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import closing, suppress

import grpc

from dskapi.v1.control_pb2 import SwitchPrecisionRequest
from dskapi.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest
from dskctl import interrupt
from dskctl.daemon import Daemon
from dskctl.errors import explained
from dskctl.options import add_generation, generation_request, utf8
from dskctl.printer import Printer
from dskctl.verb import Verb
from dskctl.verbs import switch
from dskctl.words import MODES

PROMPT = "> "
COMMANDS = "/switch MODE · /system TEXT · /reset · /help · /quit"
HELP = f"""{COMMANDS}
Commands count between answers; `dskctl switch` in another terminal changes the mode during one.
Ctrl-C stops an answer, Ctrl-D leaves."""


class Conversation:
    """What was said so far, and the commands that change it."""

    def __init__(self, daemon: Daemon, printer: Printer, options: GenerateRequest, system: str) -> None:
        self._daemon = daemon
        self._printer = printer
        self._options = options
        self._system = system
        self._messages: list[ChatMessage] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/switch": self._switch,
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": self._help,
        }

    def take(self, line: str) -> None:
        """One line of the user: a command or something to answer."""
        name, _, argument = line.strip().partition(" ")
        if name in self._commands:
            self._commands[name](argument.strip())
        elif name.startswith("/"):
            self._printer.note(f"no command {name}; there are: {COMMANDS}")
        elif name:
            self._say(line)

    def _say(self, text: str) -> None:
        """Asks and keeps question and answer; a question that was refused is forgotten."""
        question = ChatMessage(role="user", content=text)
        answer = self._answer([*self._messages, question])
        self._messages += [question, ChatMessage(role="assistant", content=answer)]

    def _answer(self, messages: list[ChatMessage]) -> str:
        """Streams an answer; Ctrl-C ends it, and what was said by then counts."""
        request = GenerateRequest()
        request.CopyFrom(self._options)
        system = [ChatMessage(role="system", content=self._system)] if self._system else []
        request.chat.CopyFrom(Chat(messages=[*system, *messages]))
        text = ""
        try:
            with closing(self._daemon.generate(request)) as responses, self._printer.answer() as view:
                for response in responses:
                    text += response.text
                    view.write(response)
        except KeyboardInterrupt:
            interrupt.handled()
            self._printer.note("")
        return text

    def _switch(self, mode: str) -> None:
        """Does not wait for a mode that must be prepared: one can go on talking meanwhile."""
        if mode.lower() not in MODES:
            self._printer.note(f"/switch takes one of {', '.join(MODES)}")
            return
        request = SwitchPrecisionRequest(model=self._options.model, mode=MODES[mode.lower()])
        self._printer.show_item(self._daemon.switch_precision(request), switch.as_text)

    def _set_system(self, text: str) -> None:
        self._system = text
        self._printer.note("system text set" if text else "system text removed")

    def _reset(self, _: str) -> None:
        self._messages.clear()
        self._printer.note("conversation forgotten")

    def _help(self, _: str) -> None:
        self._printer.note(HELP)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", type=utf8, help="may be left out while one model is loaded"
    )
    parser.add_argument("--system", type=utf8, default="", metavar="TEXT", help="what the system says first")
    add_generation(parser)


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    options = generation_request(args)
    options.model = args.model
    conversation = Conversation(daemon, printer, options, args.system)
    if sys.stdin.isatty():
        _interactive(conversation, printer, args.address)
    else:
        _piped(conversation)


def _piped(conversation: Conversation) -> None:
    """Lines from a file or a program; the first failure ends it."""
    for line in sys.stdin:
        if line.strip() == "/quit":
            return
        conversation.take(line.rstrip("\n"))


def _interactive(conversation: Conversation, printer: Printer, address: str) -> None:
    """Until Ctrl-D or /quit."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing for input())
    printer.note(HELP)
    while (line := _read_line(printer)).strip() != "/quit":
        _take_or_tell(conversation, line, printer, address)


def _take_or_tell(conversation: Conversation, line: str, printer: Printer, address: str) -> None:
    """What fails is told, and the conversation goes on."""
    try:
        conversation.take(line)
    except grpc.RpcError as error:
        _, lines = explained(error, address)
        for explanation in lines:
            printer.note(explanation)


def _read_line(printer: Printer) -> str:
    try:
        return input(PROMPT)
    except EOFError:
        return "/quit"
    except KeyboardInterrupt:
        interrupt.handled()
        printer.note("")
        return ""


VERB = Verb(
    name="chat",
    help="talk with a model; switch its precision between answers",
    examples=(
        "dskctl chat",
        'dskctl chat smollm2 --system "Answer in one sentence." --temperature 0.7',
        'echo "Why is the sky blue?" | dskctl chat',
    ),
    configure=configure,
    run=run,
)
