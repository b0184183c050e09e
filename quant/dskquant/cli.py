"""`dskquant`: offline tools around model stores. One module of `dskquant.commands` for each verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dskquant.commands import compare, convert
from dskquant.errors import QuantError

VERBS = (convert, compare)
DONE, REFUSED, INTERRUPTED = 0, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns 0 when done, 1 when refused (one line on stderr); argparse exits with 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="dskquant", description="Convert, quantize and compare models, offline.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_parser(verbs)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (QuantError, OSError) as error:
        print(f"dskquant {options.verb}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"dskquant {options.verb}: interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
