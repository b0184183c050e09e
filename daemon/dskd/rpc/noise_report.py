"""What the noise monitor of a model knows, as a message of the Control protocol."""

from __future__ import annotations

import math

from dskapi.v1 import control_pb2
from dskd.monitor.types import ModeNoise, NoisePoint, NoiseSnapshot
from dskd.rpc.convert import FALLBACK_STATES, MEASURES, MODES, timestamp


def noise_response(model: str, noise: NoiseSnapshot) -> control_pb2.GetNoiseResponse:
    return control_pb2.GetNoiseResponse(
        model=model,
        generation=noise.generation,
        reference=MODES[noise.reference] if noise.reference else None,
        modes=map(_mode_noise, noise.modes),
        fallback=MODES[noise.fallback] if noise.fallback else None,
        lowered=noise.lowered,
        pin=MODES[noise.pin] if noise.pin else None,
        escalated_requests=noise.escalated_requests,
        measure=MEASURES.get(noise.measure),
    )


def _mode_noise(noise: ModeNoise) -> control_pb2.ModeNoise:
    """NaN goes through where the protocol says what it means."""
    statistics = noise.statistics
    return control_pb2.ModeNoise(
        mode=MODES[noise.mode],
        state=FALLBACK_STATES[noise.state],
        cause=noise.cause,
        trips=noise.trips,
        threshold=noise.threshold,
        samples=statistics.samples,
        mean_kl=statistics.mean,
        low=_known(statistics.low),
        high=_known(statistics.high),
        p50=statistics.p50,
        p90=statistics.p90,
        p99=statistics.p99,
        agreement=statistics.agreement,
        total_samples=noise.total_samples,
        non_finite=noise.non_finite,
        evidence=noise.evidence,
        evidence_needed=noise.evidence_needed,
        entropy=noise.entropy,
        margin=noise.margin,
        unique_ngrams=noise.unique_ngrams,
        latest=map(_noise_point, noise.latest),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _noise_point(point: NoisePoint) -> control_pb2.NoisePoint:
    return control_pb2.NoisePoint(
        time=timestamp(point.time), kl=point.kl, agrees=point.agrees, generation=point.generation
    )
