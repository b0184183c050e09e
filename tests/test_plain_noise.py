"""The noise of answers: equal to its formulas in numpy, and what cannot be compared is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dskquant.errors import TensorError
from dskquant.plain.noise import MOST_DB, GraphNoise


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 8), columns=st.integers(2, 9), scale=st.floats(1e-3, 10))
def test_noise_follows_its_formulas(seed: int, rows: int, columns: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    r = random.standard_normal((rows, columns)).astype(np.float32)
    a = (r + scale * random.standard_normal((rows, columns))).astype(np.float32)
    noise = GraphNoise.between({"y": r}, {"y": a})
    wide, other = r.astype(np.float64), a.astype(np.float64)
    lengths = np.sqrt((wide**2).sum(1)) * np.sqrt((other**2).sum(1))
    assert noise.sqnr_db == pytest.approx(-10 * np.log10(((wide - other) ** 2).sum() / (wide**2).sum()))
    assert noise.cosine == pytest.approx(((wide * other).sum(1) / lengths).mean())
    assert noise.top1 == pytest.approx(np.mean(np.argmax(r, 1) == np.argmax(a, 1)))


def test_the_worst_output_counts() -> None:
    r = np.float32([[1, 2], [3, 4]])
    reference = {"a": r, "b": r, "n": np.int64([1])}
    noise = GraphNoise.between(reference, {"a": r, "b": r[:, ::-1], "n": np.int64([9])})
    assert noise == GraphNoise.between({"b": r}, {"b": r[:, ::-1]})
    assert noise.top1 == 0


def test_integers_count_where_there_are_no_floats() -> None:
    noise = GraphNoise.between({"n": np.int64([[3, 4]])}, {"n": np.int64([[4, 3]])})
    assert (noise.sqnr_db, noise.cosine, noise.top1) == (pytest.approx(10 * np.log10(25 / 2)), 24 / 25, None)


@pytest.mark.parametrize(
    ("reference", "answers", "sqnr_db", "cosine"),
    [
        ([[1.0]], [[1.0]], MOST_DB, 1.0),
        ([[0.0, 0.0]], [[0.0, 0.0]], MOST_DB, 1.0),
        ([[0.0, 0.0]], [[0.0, 1.0]], -MOST_DB, 0.0),
        ([[1.0, 0.0]], [[0.0, 0.0]], 0.0, 0.0),
        ([[1.0, 0.0]], [[-1.0, 0.0]], pytest.approx(-10 * np.log10(4)), -1.0),
    ],
)
def test_zeros_and_equal_answers_have_finite_noise(
    reference: list[list[float]], answers: list[list[float]], sqnr_db: float, cosine: float
) -> None:
    noise = GraphNoise.between({"y": np.array(reference)}, {"y": np.array(answers)})
    assert (noise.sqnr_db, noise.cosine) == (sqnr_db, cosine)


def test_scalars_and_ranks_above_two_have_no_classes() -> None:
    assert GraphNoise.between({"y": np.float32(2)}, {"y": np.float32(1)}) == GraphNoise(
        pytest.approx(10 * np.log10(4)), 1.0, None
    )
    assert GraphNoise.between({"y": np.ones((2, 3, 4))}, {"y": np.ones((2, 3, 4))}).top1 is None


Y = np.ones((1, 2), np.float32)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "y: is missing"),
        ({"y": Y[0]}, r"y: shape \[2\], where the reference has \[1, 2\]"),
        ({"y": Y * np.nan}, "y: has values that are not finite"),
        ({"y": Y * np.inf}, "y: has values that are not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(answers: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        GraphNoise.between({"y": Y}, answers)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="no outputs to compare"):
        GraphNoise.between({"y": np.ones((0, 2))}, {"y": np.ones((0, 2))})
