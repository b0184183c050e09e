"""Planes of a parameter set as MatMulNBits reads them: the same weights to the last bit."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from dskquant.engines.onnxruntime.nbits import NBitsMatrix, joined, repack
from dskquant.errors import EngineError
from dskquant.parameter_set import MappedMatrix
from dskquant.planes import QuantizedMatrix, pack_u4, quantize

ROWS = 6


def random_matrix(seed: int, bits: int, columns: int, group_size: int, symmetric: bool) -> QuantizedMatrix:
    weights = np.random.default_rng(seed).normal(size=(ROWS, columns)).astype(np.float32)
    return quantize(weights, bits, group_size, symmetric)


def as_stored(matrix: QuantizedMatrix, bits: int) -> MappedMatrix:
    codes = pack_u4(matrix.codes) if bits == 4 else matrix.codes
    return MappedMatrix(codes, matrix.scales, matrix.zero_points)


def by_the_documentation(matrix: NBitsMatrix) -> np.ndarray:
    """(q - zero point) * scale for each block, read as docs/ContribOperators.md of onnxruntime tells."""
    rows, blocks, _ = matrix.codes.shape
    weights = np.empty((rows, blocks, matrix.block_size), np.float32)
    for row in range(rows):
        for block in range(blocks):
            codes = unpacked(matrix.codes[row, block], matrix.bits)
            zero_point = 1 << (matrix.bits - 1)
            if matrix.zero_points is not None:
                zero_point = unpacked(matrix.zero_points[row], matrix.bits)[block]
            weights[row, block] = (codes - np.float32(zero_point)) * matrix.scales[row, block]
    return weights.reshape(rows, -1)


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed.astype(np.float32)
    return np.array([half for byte in packed.tolist() for half in (byte % 16, byte // 16)], np.float32)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([4, 8]),
    layout=st.sampled_from([(96, 32), (64, 64), (384, 128), (192, 64), (96, 0), (256, 0), (48, 0)]),
    symmetric=st.booleans(),
)
def test_repacked_weights_are_the_same_bits(seed: int, bits: int, layout: tuple[int, int], symmetric: bool) -> None:
    """Odd numbers of blocks, one group a row and symmetric groups included."""
    matrix = random_matrix(seed, bits, *layout, symmetric)
    repacked = repack("w", as_stored(matrix, bits), bits)
    np.testing.assert_array_equal(by_the_documentation(repacked), matrix.dequantized())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "group_size"), [(96, 32), (256, 0), (384, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_operator_multiplies_with_these_weights(bits: int, columns: int, group_size: int, symmetric: bool) -> None:
    """A unit matrix multiplied with the weights gives the weights."""
    matrix = random_matrix(1, bits, columns, group_size, symmetric)
    product = multiply(np.eye(columns, dtype=np.float32), repack("w", as_stored(matrix, bits), bits))
    np.testing.assert_allclose(product.T, matrix.dequantized(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [96, 128])
def test_joined_matrices_have_the_rows_of_all(bits: int, columns: int) -> None:
    """Zero-points may be left out of one of them: three blocks of a row end within a byte."""
    matrices = [random_matrix(seed, bits, columns, 32, symmetric=seed == 1) for seed in range(3)]
    stored = [repack("w", as_stored(matrix, bits), bits) for matrix in matrices]
    assert [matrix.zero_points is None for matrix in stored] == [False, True, False]
    wanted = np.concatenate([matrix.dequantized() for matrix in matrices])
    np.testing.assert_array_equal(by_the_documentation(joined(stored)), wanted)


def multiply(tokens: np.ndarray, matrix: NBitsMatrix) -> np.ndarray:
    constants = {"codes": matrix.codes, "scales": matrix.scales}
    if matrix.zero_points is not None:
        constants["zero_points"] = matrix.zero_points
    node = helper.make_node(
        "MatMulNBits",
        ["tokens", *constants],
        ["product"],
        domain="com.microsoft",
        K=matrix.columns,
        N=matrix.rows,
        bits=matrix.bits,
        block_size=matrix.block_size,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("tokens", TensorProto.FLOAT, tokens.shape)],
        [helper.make_tensor_value_info("product", TensorProto.FLOAT, [len(tokens), matrix.rows])],
        [onnx.numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (product,) = session.run(None, {"tokens": tokens})
    return np.asarray(product)


def test_codes_stay_in_the_mapped_file() -> None:
    stored = as_stored(random_matrix(2, 4, 128, 64, False), 4)
    assert np.shares_memory(repack("w", stored, 4).codes, stored.codes)


def test_a_row_that_no_block_divides_is_refused_by_name() -> None:
    stored = as_stored(random_matrix(3, 4, 40, 0, False), 4)
    with pytest.raises(EngineError, match=r"layer\.7.*blocks of 16 weights or more.*rows of 40"):
        repack("layer.7", stored, 4)
