"""Rotary frequencies against those that transformers computes for published models, and what no setting may break."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from dskquant.errors import SourceError
from dskquant.fields import Fields
from dskquant.rope import Rope, read_rope

GOLDEN_ROPES: dict[str, Any] = json.loads((GOLDEN / "rope.json").read_text(encoding="utf-8"))
HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_of(config: dict[str, Any], max_positions: int = 8192) -> Rope:
    return read_rope(Fields(config, "config.json"), HEAD_DIM, max_positions)


def scaled(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


@pytest.mark.parametrize("name", GOLDEN_ROPES)
def test_published_settings_give_the_frequencies_of_transformers(name: str) -> None:
    golden = GOLDEN_ROPES[name]
    rope = rope_of(golden["config"], golden["config"]["max_position_embeddings"])
    np.testing.assert_allclose(rope.inverse_frequencies, golden["inverse_frequencies"], rtol=3e-7)
    assert rope.attention_factor == pytest.approx(golden["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("name", GOLDEN_ROPES)
def test_the_new_spelling_means_the_same_as_the_old_one(name: str) -> None:
    old = GOLDEN_ROPES[name]["config"]
    scaling = dict(old.get("rope_scaling", {}))
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type", "default"))
    new = {"rope_parameters": {"rope_theta": old["rope_theta"], **scaling}}
    assert rope_of(new, old["max_position_embeddings"]) == rope_of(old, old["max_position_embeddings"])


def test_without_scaling_the_frequencies_fall_from_one_by_powers_of_theta() -> None:
    frequencies = rope_of({"rope_theta": 10000.0}).inverse_frequencies
    assert len(frequencies) == HEAD_DIM // 2
    assert frequencies[0] == 1.0
    assert frequencies[8] == pytest.approx(0.1, rel=1e-6)  # 10000 ** (-16 / 64)
    assert frequencies[-1] == pytest.approx(10000.0 ** (-62 / 64), rel=1e-6)


def test_theta_is_10000_where_nothing_is_said() -> None:
    assert rope_of({}) == rope_of({"rope_theta": 10000.0})


@given(factor=st.floats(1.0, 64.0), theta=st.floats(1000.0, 1e7))
def test_llama3_and_yarn_lie_between_unscaled_and_linear(factor: float, theta: float) -> None:
    plain = np.array(rope_of({"rope_theta": theta}).inverse_frequencies)
    for parameters in (LLAMA3, {"rope_type": "yarn", "original_max_position_embeddings": 4096}):
        frequencies = np.array(
            rope_of({"rope_parameters": {**parameters, "factor": factor, "rope_theta": theta}}).inverse_frequencies
        )
        assert (frequencies <= plain * (1 + 1e-6)).all()
        assert (frequencies >= plain / factor * (1 - 1e-6)).all()


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = np.array(rope_of({"rope_theta": 500000.0}).inverse_frequencies)
    ratio = plain / np.array(rope_of({"rope_theta": 500000.0, "rope_scaling": LLAMA3}).inverse_frequencies)
    wavelengths = 2 * math.pi / plain
    assert np.allclose(ratio[wavelengths < 8192 / 4], 1.0)
    assert np.allclose(ratio[wavelengths > 8192], 8.0)


def test_yarn_takes_the_factor_from_the_lengths_where_it_is_not_given() -> None:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    assert rope_of(scaled(**parameters)) == rope_of(scaled(**parameters, factor=4.0))


def test_an_explicit_attention_factor_wins() -> None:
    rope = rope_of(scaled(rope_type="yarn", factor=4.0, attention_factor=1.25, mscale=0.7, mscale_all_dim=1.0))
    assert rope.attention_factor == 1.25


def test_one_divisor_for_each_pair() -> None:
    divisors = [1.0 + index for index in range(HEAD_DIM // 2)]
    rope = rope_of(scaled(rope_type="longrope", short_factor=divisors, long_factor=divisors, attention_factor=1.0))
    plain = rope_of({}).inverse_frequencies
    np.testing.assert_allclose(rope.inverse_frequencies, np.array(plain) / divisors, rtol=3e-7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (scaled(rope_type="dynamic", factor=2.0), "rope_parameters: rope_type 'dynamic' is unknown; known: default,"),
        (scaled(rope_type=["yarn"]), "rope_type"),
        (scaled(rope_type="linear"), "factor is missing"),
        (scaled(rope_type="linear", factor=-1.0), "factor must be a positive number"),
        (scaled(rope_type="linear", factor=float("nan")), "factor must be a positive number"),
        (scaled(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "high_freq_factor"),
        (scaled(rope_type="longrope", short_factor=[1.0], long_factor=[2.0]), "long_factor"),
        (scaled(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), "must be a list of 32 numbers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of parameters for all layers"),
        ({"rope_parameters": [1]}, "one set of parameters for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=r"^config\.json: ") as refusal:
        rope_of(config)
    assert message in str(refusal.value)
