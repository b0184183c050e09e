"""Words on the command line and in tables for the values of the protocol: enums, sizes, times."""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.timestamp_pb2 import Timestamp

from dskapi.v1.common_pb2 import InFlight, PrecisionMode
from dskapi.v1.control_pb2 import NOISE_MEASURE_NOISE_TO_SIGNAL, FallbackState, ModelState, ModeProof
from dskapi.v1.inference_pb2 import FinishReason

NOTHING = "-"
HASH_DIGITS = 12
PHASES = ("validate", "build", "prove", "commit")


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


def fallback_word(state: int) -> str:
    return enum_word(FallbackState.DESCRIPTOR, state) or NOTHING


def in_flight_word(in_flight: int) -> str:
    return enum_word(InFlight.DESCRIPTOR, in_flight) or NOTHING


def finish_word(reason: int) -> str:
    """ "end of text", for people."""
    return (enum_word(FinishReason.DESCRIPTOR, reason) or NOTHING).replace("_", " ")


def transition(from_mode: int, to_mode: int) -> str:
    """ "int4 → int8"."""
    return f"{mode_word(from_mode)} → {mode_word(to_mode)}"


def moved(before: str, after: str) -> str:
    """ "3 → 4"; what stayed the same, or came from nothing, is told once."""
    return after if before in (after, NOTHING) else f"{before} → {after}"


def generation_word(number: int) -> str:
    return str(number) if number else NOTHING


def short_hash(digest: str, digits: int = HASH_DIGITS) -> str:
    """Enough digits to tell one from another."""
    return digest[:digits] or NOTHING


def kl_words(proof: ModeProof) -> str:
    """Noise before (where it was measured) and after a change."""
    before = f"{proven_words(proof.kl_before, proof.measure)} → " if proof.HasField("kl_before") else ""
    return f"{before}{proven_words(proof.kl_after, proof.measure)}"


def proven_words(value: float, measure: int) -> str:
    """Nats per token to four decimals; of plain graphs, dB."""
    return decibels(value) if is_ratio(measure) else f"{value:.4f}"


def is_ratio(measure: int) -> bool:
    """Whether noise is told as power over that of the signal: of plain graphs."""
    return measure == NOISE_MEASURE_NOISE_TO_SIGNAL


def decibels(ratio: float) -> str:
    """How far the noise is below the signal: "26.0 dB" for a ratio of 0.0025."""
    if math.isnan(ratio):
        return NOTHING
    return f"{-10 * math.log10(ratio):.1f} dB" if 0 < ratio < math.inf else "∞ dB" if ratio == 0 else "-∞ dB"


def noise_words(value: float, measure: int) -> str:
    """A figure of noise: nats, or dB."""
    return decibels(value) if is_ratio(measure) else nats(value)


def proof_facts(proofs: Iterable[ModeProof]) -> Iterator[tuple[str, str]]:
    """A name and a value for each mode that was proven."""
    for proof in proofs:
        if is_ratio(proof.measure):
            yield f"SQNR {mode_word(proof.mode)}", f"{kl_words(proof)}, same top class in {proof.agreement:.1%} of rows"
            continue
        agreement = f"same most probable token at {proof.agreement:.1%}"
        yield f"KL {mode_word(proof.mode)}", f"{kl_words(proof)} nats per token, {agreement}"


def nats(value: float) -> str:
    """Two digits that count: KL is told by its order of magnitude."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NOTHING if math.isnan(value) else "∞"
    return f"{value:.0f}" if value >= 10 else f"{value:#.2g}" if value >= 1e-4 else f"{value:.0e}"


def share(value: float) -> str:
    """ "81.2%"; nothing for NaN."""
    return NOTHING if math.isnan(value) else f"{value:.1%}"


def phase_words(phases_ms: Mapping[str, float]) -> str:
    """In the order they ran, as far as this client knows them."""
    known = [phase for phase in PHASES if phase in phases_ms]
    others = sorted(phases_ms.keys() - set(PHASES))
    return ", ".join(f"{phase} {duration_words(phases_ms[phase])}" for phase in (*known, *others)) or NOTHING


def duration_words(milliseconds: float) -> str:
    """Tenths only where they say something."""
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def flip_words(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds else NOTHING


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


def short_time(timestamp: Timestamp) -> str:
    """`local_time` without the year."""
    return local_time(timestamp)[5:]


def age_words(timestamp: Timestamp) -> str:
    """ "1 day, 2:03:04" since `timestamp`."""
    return str(timedelta(seconds=max(0, int(time.time()) - timestamp.seconds)))


def printable(text: str) -> str:
    """`text` without control characters other than line ends and tabs: a model must not steer the terminal."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc" and char not in "\n\t"
