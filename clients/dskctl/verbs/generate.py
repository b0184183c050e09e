"""`dskctl generate`"""

from __future__ import annotations

import argparse
from contextlib import closing

from dskapi.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest
from dskctl.daemon import Daemon
from dskctl.exits import UsageError
from dskctl.options import add_generation, generation_request, token_ids, utf8
from dskctl.printer import Printer
from dskctl.stdin import STDIN, text_of_stdin
from dskctl.verb import Verb


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="[MODEL] PROMPT",
        nargs="*",
        type=utf8,
        help="MODEL may be left out while one model is loaded; PROMPT - is read from stdin",
    )
    parser.add_argument("--tokens", type=token_ids, metavar="1,2,3", help="token ids in place of PROMPT")
    parser.add_argument("--chat", action="store_true", help="PROMPT is what a user says (uses the chat template)")
    parser.add_argument("--system", type=utf8, metavar="TEXT", help="what the system says before it (implies --chat)")
    add_generation(parser)
    parser.add_argument("--raw", action="store_true", help="print the text of the answer and nothing else")


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    if args.raw and args.json:
        raise UsageError("--raw and --json exclude each other")
    request = generation_request(args)
    _set_input(request, args)
    with closing(daemon.generate(request)) as responses, printer.answer(raw=args.raw) as answer:
        for response in responses:
            answer.write(response)


def _set_input(request: GenerateRequest, args: argparse.Namespace) -> None:
    """Model, and one of tokens, chat and prompt."""
    if args.tokens is not None:
        request.model = _model_of(args.words)
        request.tokens.CopyFrom(args.tokens)
        return
    if not args.words:
        raise UsageError("generate needs a PROMPT (or - for stdin, or --tokens)")
    request.model, prompt = _model_of(args.words[:-1]), _prompt_text(args.words[-1])
    if args.chat or args.system is not None:
        request.chat.CopyFrom(_chat(args.system, prompt))
    else:
        request.prompt = prompt


def _model_of(words: list[str]) -> str:
    if len(words) > 1:
        raise UsageError("generate takes [MODEL] PROMPT; put a prompt of several words in quotes")
    return words[0] if words else ""


def _prompt_text(word: str) -> str:
    return text_of_stdin("prompt") if word == STDIN else word


def _chat(system: str | None, prompt: str) -> Chat:
    messages = [ChatMessage(role="user", content=prompt)]
    if system is not None:
        messages.insert(0, ChatMessage(role="system", content=system))
    return Chat(messages=messages)


VERB = Verb(
    name="generate",
    usage="dskctl generate [options] [MODEL] PROMPT",
    help="stream an answer and show which mode made which stretch of it",
    examples=(
        'dskctl generate --chat --max-tokens 100 "Why is the sky blue?"',
        'dskctl generate --max-tokens 64 smollm2 "Once upon a time"',
        'dskctl generate --precision fp32 --temperature 0.7 --seed 1 "A haiku:"',
        "dskctl generate --raw - < prompt.txt",
        "dskctl generate --tokens 1,2,3 --logprobs 3 --json",
    ),
    configure=configure,
    run=run,
)
