"""Group-wise quantization and the two planes of a linear layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dskquant.errors import SchemeError
from dskquant.planes import SMALLEST_SCALE, pack_u4, quantize, quantize_planes, unpack_u4
from dskquant.scheme import Role, Scheme

matrices = npst.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.sampled_from([32, 64, 192])),
    elements=st.floats(-100, 100, width=32),
)


def dequantized_in_float64(matrix):
    """(code - zero-point) * scale, written out weight by weight (Jacob et al. 2018, equation 1)."""
    rows, groups = matrix.scales.shape
    length = matrix.codes.shape[1] // groups
    values = np.empty(matrix.codes.shape)
    for row in range(rows):
        for column in range(matrix.codes.shape[1]):
            group = column // length
            code, zero_point = int(matrix.codes[row, column]), int(matrix.zero_points[row, group])
            values[row, column] = (code - zero_point) * float(matrix.scales[row, group])
    return values


@given(
    npst.arrays(
        np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 40).map(lambda n: 2 * n)), elements=st.integers(0, 15)
    )
)
def test_packing_keeps_every_code(codes):
    packed = pack_u4(codes)
    assert packed.shape == (codes.shape[0], codes.shape[1] // 2)
    assert np.array_equal(unpack_u4(packed), codes)


def test_the_first_code_of_a_byte_is_in_its_low_half():
    assert pack_u4(np.array([[0x1, 0xA]], np.uint8))[0, 0] == 0xA1


@given(matrices, st.booleans(), st.sampled_from([4, 8]), st.sampled_from([0, 32]))
def test_dequantized_values_follow_the_formula(weights, symmetric, bits, group_size):
    matrix = quantize(weights, bits, group_size, symmetric)
    assert matrix.codes.max() <= 2**bits - 1
    np.testing.assert_allclose(matrix.dequantized(), dequantized_in_float64(matrix), rtol=1e-6, atol=1e-30)


@given(matrices, st.booleans(), st.sampled_from([4, 8]))
def test_no_weight_moves_further_than_rounding_and_the_cast_of_the_scale_can_move_it(weights, symmetric, bits):
    matrix = quantize(weights, bits, 32, symmetric)
    scales = np.repeat(matrix.scales.astype(np.float64), 32, axis=1)
    # half a step for the code, half a step for the zero-point, and 2^-11 of the range for the float16 scale
    allowed = scales * (1.0 + 2**bits * 2.0**-11) * 1.001
    assert (np.abs(dequantized_in_float64(matrix) - weights) <= allowed).all()


@given(matrices)
def test_symmetric_groups_have_their_zero_point_in_the_middle(weights):
    assert (quantize(weights, 4, 32, symmetric=True).zero_points == 8).all()


@given(matrices, st.booleans())
def test_scales_are_positive_and_never_denormal(weights, symmetric):
    assert (quantize(weights, 4, 32, symmetric).scales >= SMALLEST_SCALE).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_residual_plane_takes_the_error_of_four_bits_down_to_that_of_about_eight(symmetric):
    weights = np.random.default_rng(7).normal(0, 0.02, (64, 512)).astype(np.float32)
    base, residual = quantize_planes(weights, 64, symmetric)
    coarse = weights - base.dequantized()
    exact = coarse - residual.dequantized()
    # the range of what is left shrinks by the 15 steps of the base, and so does the error of quantizing it
    assert np.sqrt((exact**2).mean()) < np.sqrt((coarse**2).mean()) / 10


def test_a_group_that_does_not_divide_the_row_is_refused_with_those_that_do():
    with pytest.raises(SchemeError, match=r"group size 128 does not divide rows of 576; allowed: 32, 64, 0"):
        quantize(np.zeros((1, 576), np.float32), 4, 128, symmetric=False)


def test_weights_too_large_for_a_float16_scale_are_refused():
    with pytest.raises(SchemeError, match="does not fit float16"):
        quantize(np.full((1, 32), 1e7, np.float32), 4, 32, symmetric=False)


def test_layer_rules_match_names_and_leave_the_others_alone():
    scheme = Scheme(group_size=32, int8_layers=("*.down_proj.weight",))
    assert scheme.for_tensor("model.layers.0.mlp.down_proj.weight", Role.LINEAR, (4, 64)).always_residual
    assert not scheme.for_tensor("model.layers.0.mlp.up_proj.weight", Role.LINEAR, (4, 64)).always_residual


@pytest.mark.parametrize("role", [Role.EMBEDDING, Role.LM_HEAD])
def test_embeddings_and_lm_head_are_eight_bit_with_one_group_a_row(role):
    scheme = Scheme(group_size=32).for_tensor("x", role, (4, 64))
    assert (scheme.bits, scheme.group_size) == (8, 0)


def test_an_unknown_group_size_is_refused_with_the_allowed_ones():
    with pytest.raises(SchemeError, match="group_size 48: allowed are 32, 64, 128, 0"):
        Scheme(group_size=48)
