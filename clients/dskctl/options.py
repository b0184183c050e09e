"""Arguments that several verbs share, and the request that the generation options make."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dskapi.v1.inference_pb2 import GenerateRequest, Sampling, TokenIds
from dskctl.words import IN_FLIGHT, MODES

INT32 = (-(2**31), 2**31 - 1)
UINT64 = (0, 2**64 - 1)


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer the protocol can carry. Sensible ranges are for the daemon to judge."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not between {low} and {high}")
        return number

    return parse


def seconds(text: str) -> float:
    """An argparse type: a positive number."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return number


def utf8(text: str) -> str:
    """An argparse type: text that the protocol can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not valid UTF-8") from None
    return text


def token_ids(text: str) -> TokenIds:
    """An argparse type: "1,2,3"."""
    parse = integer(*INT32)
    return TokenIds(ids=[parse(part) for part in text.split(",")])


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", type=utf8, help="one model only (default: all)"
    )


def add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", metavar="MODE", choices=MODES, type=str.lower, help=f"one of {', '.join(MODES)}")


def add_only_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", type=utf8, help="may be left out while one model is loaded"
    )


def add_in_flight(parser: argparse.ArgumentParser, default: str | None = "migrate") -> None:
    parser.add_argument(
        "--in-flight",
        choices=IN_FLIGHT,
        default=default,
        help="open requests go on in the new one (migrate, the default) or end in the old one (finish)",
    )


def add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait for what must be prepared first (default), or let it go on in the background",
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    """The options of a GenerateRequest, apart from its input."""
    int32, add = integer(*INT32), parser.add_argument
    add("--max-tokens", type=int32, metavar="N", help="tokens to generate at most (default: 512 or what fits)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default); at most 10")
    add("--top-k", type=int32, metavar="K", help="draw from the K most probable tokens (default: all)")
    add(
        "--top-p", type=float, metavar="P", help="draw from the most probable tokens that together reach P (default: 1)"
    )
    add(
        "--min-p", type=float, metavar="P", help="drop tokens less probable than P times the most probable (default: 0)"
    )
    add("--repetition-penalty", type=float, metavar="R", help="above 1, tokens already seen get less probable")
    add("--seed", type=integer(*UINT64), metavar="N", help="same seed, same answer (default: drawn afresh)")
    add("--stop", type=utf8, action="append", default=[], metavar="TEXT", help="end before TEXT (can be repeated)")
    add("--precision", choices=MODES, type=str.lower, metavar="MODE", help="a mode for this request alone")
    add("--logprobs", type=int32, default=0, metavar="N", help="show the N most probable tokens at each place (0-20)")
    add("--ignore-eos", action="store_true", help="go on past the end-of-text tokens")


def generation_request(args: argparse.Namespace) -> GenerateRequest:
    """The request of the options of `add_generation`, still without an input."""
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    return GenerateRequest(
        max_new_tokens=args.max_tokens,
        sampling=sampling,
        stop=args.stop,
        precision=MODES[args.precision] if args.precision else None,
        top_logprobs=args.logprobs,
        ignore_eos=args.ignore_eos,
    )
