"""Rotary position embedding: from a Hugging Face configuration to one frequency for each pair of a head.

Computed in float32 in the order of operations of transformers, so that the numbers agree to the last bit or nearly so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.fields import Fields

DEFAULT_THETA = 10000.0

Frequencies = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn into angles: angle of pair i at position p = p * inverse_frequencies[i]."""

    inverse_frequencies: tuple[float, ...]  # radians a token; one for each pair: head_dim / 2 of them
    attention_factor: float = 1.0  # cosines and sines are multiplied by it (yarn)


@dataclass(frozen=True, slots=True)
class _Setting:
    parameters: Fields
    theta: float
    head_dim: int
    max_positions: int

    @property
    def periods(self) -> Frequencies:
        """theta ** (2 i / head_dim)."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        return np.float32(self.theta) ** exponents

    @property
    def original_positions(self) -> int:
        return self.parameters.count("original_max_position_embeddings", self.max_positions)


def read_rope(config: Fields, head_dim: int, max_positions: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before) of a configuration.

    Raises SourceError naming the key for an unknown type of scaling or a missing parameter.
    """
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    raw = config.values.get(key) or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise config.refusal(key, "must be one set of parameters for all layers")
    parameters = Fields(raw, f"{config.where}: {key}")
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _TYPES:
        raise parameters.refusal("rope_type", f"{rope_type!r} is unknown; known: {', '.join(_TYPES)}")
    if parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise config.refusal("partial_rotary_factor", "other than 1 is not supported")
    theta = parameters.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    if theta <= 1.0:
        raise config.refusal("rope_theta", f"must be larger than 1, not {theta}")
    with np.errstate(over="ignore"):
        frequencies, attention_factor = _TYPES[rope_type](_Setting(parameters, theta, head_dim, max_positions))
    if not np.isfinite(frequencies).all():
        raise config.refusal(key, "leads to frequencies that are not finite")
    return Rope(tuple(float(value) for value in frequencies), attention_factor)


def divided_frequencies(
    theta: float, divisors: Sequence[float], attention_factor: float, positions: int
) -> dict[str, Any]:
    """The parameters of a configuration for frequencies that are those of `theta`, each divided by a number.

    That is the type "longrope" with one list for contexts of all lengths.
    """
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        "attention_factor": attention_factor,
        "original_max_position_embeddings": positions,
    }


def _unscaled(setting: _Setting) -> tuple[Frequencies, float]:
    return np.float32(1.0) / setting.periods, 1.0


def _linear(setting: _Setting) -> tuple[Frequencies, float]:
    return np.float32(1.0) / setting.periods / np.float32(setting.parameters.number("factor")), 1.0


def _llama3(setting: _Setting) -> tuple[Frequencies, float]:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    parameters, original = setting.parameters, setting.original_positions
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.refusal("high_freq_factor", f"{high} must be larger than low_freq_factor {low}")
    frequencies = np.float32(1.0) / setting.periods
    wavelengths = np.float32(2 * math.pi) / frequencies
    blend = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * frequencies / np.float32(factor) + blend * frequencies
    stretched = np.where(wavelengths > original / low, frequencies / np.float32(factor), blended)
    return np.where(wavelengths < original / high, frequencies, stretched).astype(np.float32), 1.0


def _yarn(setting: _Setting) -> tuple[Frequencies, float]:
    """Peng et al., YaRN (arXiv:2309.00071), with the attention factor of transformers."""
    parameters, original = setting.parameters, setting.original_positions
    factor = parameters.number("factor", setting.max_positions / original)
    low = _yarn_dimension(parameters.number("beta_fast", 32.0), setting, original)
    high = _yarn_dimension(parameters.number("beta_slow", 1.0), setting, original)
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, setting.head_dim - 1)
    pairs = np.arange(setting.head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(max(high - low, 0.001)), 0, 1)
    stretched = np.float32(1.0) / (np.float32(factor) * setting.periods)
    kept = np.float32(1.0) / setting.periods
    return (stretched * ramp + kept * (1 - ramp)).astype(np.float32), _yarn_attention_factor(parameters, factor)


def _yarn_dimension(rotations: float, setting: _Setting, original: int) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    return setting.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(setting.theta))


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.has("attention_factor"):
        return parameters.number("attention_factor")
    if parameters.values.get("mscale") and parameters.values.get("mscale_all_dim"):
        return scale(parameters.number("mscale")) / scale(parameters.number("mscale_all_dim"))
    return scale(1.0)


def _longrope(setting: _Setting) -> tuple[Frequencies, float]:
    """A divisor for each pair, where short and long contexts share them: else angles depend on the length."""
    parameters = setting.parameters
    divisors = parameters.values.get("short_factor")
    if divisors != parameters.values.get("long_factor"):
        raise parameters.refusal("long_factor", "other than short_factor is not supported")
    if not isinstance(divisors, list) or len(divisors) != setting.head_dim // 2:
        raise parameters.refusal("short_factor", f"must be a list of {setting.head_dim // 2} numbers")
    values = np.array([Fields({"short_factor": value}, parameters.where).number("short_factor") for value in divisors])
    return np.float32(1.0) / (values.astype(np.float32) * setting.periods), parameters.number("attention_factor")


_TYPES: dict[str, Callable[[_Setting], tuple[Frequencies, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
