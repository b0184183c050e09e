"""Words on the command line and in tables for the values of the protocol: enums, sizes, times."""

from __future__ import annotations

import time
import unicodedata
from datetime import timedelta

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.timestamp_pb2 import Timestamp

from dskapi.v1.common_pb2 import InFlight, PrecisionMode
from dskapi.v1.control_pb2 import ModelState
from dskapi.v1.inference_pb2 import FinishReason

NOTHING = "-"


def enum_word(descriptor: EnumDescriptor, number: int) -> str | None:
    """ "int4" for PRECISION_MODE_INT4; None for the unspecified value."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    if number == 0:
        return None
    value = descriptor.values_by_number.get(number)
    return value.name.removeprefix(prefix).lower() if value else str(number)


def enum_names(descriptor: EnumDescriptor) -> dict[str, str]:
    """The names in the protocol of the values of an enum, by their words; without the unspecified one."""
    named = {enum_word(descriptor, value.number): value.name for value in descriptor.values}
    return {word: name for word, name in named.items() if word is not None}


MODES = enum_names(PrecisionMode.DESCRIPTOR)
IN_FLIGHT = enum_names(InFlight.DESCRIPTOR)


def mode_word(mode: int) -> str:
    return enum_word(PrecisionMode.DESCRIPTOR, mode) or NOTHING


def state_word(state: int) -> str:
    return enum_word(ModelState.DESCRIPTOR, state) or NOTHING


def finish_word(reason: int) -> str:
    """ "end of text", for people."""
    return (enum_word(FinishReason.DESCRIPTOR, reason) or NOTHING).replace("_", " ")


def transition(from_mode: int, to_mode: int) -> str:
    """ "int4 → int8"; a load or unload has one end only."""
    return f"{mode_word(from_mode)} → {mode_word(to_mode)}"


def size_words(count: int) -> str:
    """Bytes, in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def count_words(count: int) -> str:
    """ "135 M" parameters."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} G"
    return f"{count / 1e6:.0f} M" if count >= 1_000_000 else f"{count:,}"


def local_time(timestamp: Timestamp) -> str:
    """Date and time in the zone of this machine, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp.seconds))


def age_words(timestamp: Timestamp) -> str:
    """ "1 day, 2:03:04" since `timestamp`."""
    return str(timedelta(seconds=max(0, int(time.time()) - timestamp.seconds)))


def printable(text: str) -> str:
    """`text` without control characters other than line ends and tabs: a model must not steer the terminal."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc" and char not in "\n\t"
