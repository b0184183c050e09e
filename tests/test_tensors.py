"""Tensors of every datatype of the Open Inference Protocol, there and back, in typed and raw contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from dskapi.open_inference import infer_pb2
from dskd.errors import InvalidArgumentError
from dskd.rpc.tensors import DATATYPES, Datatype, read_tensors, wanted_outputs, write_tensors
from dskquant.plain.protocol import TensorSpec


def spec_of(datatype: Datatype, *shape: int | None) -> TensorSpec:
    return TensorSpec("t", datatype.dtype, shape or (None, None))


def request_of(response: infer_pb2.ModelInferResponse) -> infer_pb2.ModelInferRequest:
    """Asks with the outputs of `response`."""
    request = infer_pb2.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    for output in response.outputs:
        tensor = request.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if not response.raw_output_contents:
            tensor.contents.CopyFrom(output.contents)
    return request


def there_and_back(datatype: Datatype, values: NDArray[Any], raw: bool) -> NDArray[Any]:
    response, specs = infer_pb2.ModelInferResponse(), [spec_of(datatype)]
    write_tensors(response, {"t": values}, specs, raw)
    assert bool(response.raw_output_contents) is (raw or datatype.field is None)
    return read_tensors(request_of(response), specs, None)["t"]


@pytest.mark.parametrize("datatype", DATATYPES, ids=lambda datatype: datatype.name)
@given(data=st.data(), raw=st.booleans())
def test_values_of_every_datatype_survive(datatype: Datatype, data: st.DataObject, raw: bool) -> None:
    shape = arrays.array_shapes(min_dims=2, max_dims=2, max_side=4)
    values = data.draw(arrays.arrays(datatype.dtype, shape))
    found = there_and_back(datatype, values, raw)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


def typed(datatype: Datatype, *values: Any) -> infer_pb2.ModelInferRequest:
    request = infer_pb2.ModelInferRequest()
    tensor = request.inputs.add(name="t", datatype=datatype.name, shape=[1, len(values)])
    getattr(tensor.contents, datatype.field or "").extend(values)
    return request


def refused_field(request: infer_pb2.ModelInferRequest, spec: TensorSpec) -> str:
    with pytest.raises(InvalidArgumentError) as refused:
        read_tensors(request, [spec], None)
    return refused.value.field


@pytest.mark.parametrize(
    "datatype",
    [datatype for datatype in DATATYPES if datatype.dtype.kind in "iu" and datatype.dtype.itemsize < 4],
    ids=lambda datatype: datatype.name,
)
def test_numbers_that_a_small_datatype_does_not_have_are_refused(datatype: Datatype) -> None:
    limits = np.iinfo(datatype.dtype)
    for value in (limits.max + 1, limits.min - 1):
        if datatype.dtype.kind == "i" or value > 0:
            request = typed(datatype, 0, value)
            assert refused_field(request, spec_of(datatype)) == f"inputs[0].contents.{datatype.field}"
    found = read_tensors(typed(datatype, limits.min, limits.max), [spec_of(datatype)], None)["t"]
    assert found.tolist() == [[limits.min, limits.max]]


def test_a_bool_is_0_or_1() -> None:
    request = infer_pb2.ModelInferRequest(raw_input_contents=[b"\x00\x02"])
    request.inputs.add(name="t", datatype="BOOL", shape=[1, 2])
    assert refused_field(request, spec_of(DATATYPES[0])) == "raw_input_contents[0]"


def test_float16_has_raw_contents_alone() -> None:
    (half,) = (datatype for datatype in DATATYPES if datatype.field is None)
    request = infer_pb2.ModelInferRequest()
    request.inputs.add(name="t", datatype="FP16", shape=[1, 1]).contents.fp32_contents.append(1)
    assert refused_field(request, spec_of(half)) == "inputs[0].contents"


def test_an_answer_with_one_float16_output_is_raw_as_a_whole() -> None:
    (half,) = (datatype for datatype in DATATYPES if datatype.field is None)
    specs = [TensorSpec("a", half.dtype, (None,)), TensorSpec("b", np.dtype(np.float32), (None,))]
    response = infer_pb2.ModelInferResponse()
    write_tensors(response, {"a": np.ones(2, np.float16), "b": np.ones(3, np.float32)}, specs, raw=False)
    assert [len(raw) for raw in response.raw_output_contents] == [4, 12]


def test_outputs_come_in_the_order_in_which_they_are_asked_for() -> None:
    specs = [TensorSpec(name, np.dtype(np.float32), (None,)) for name in "abc"]
    request = infer_pb2.ModelInferRequest()
    assert [spec.name for spec in wanted_outputs(request, specs)] == ["a", "b", "c"]
    for name in "ca":
        request.outputs.add(name=name)
    assert [spec.name for spec in wanted_outputs(request, specs)] == ["c", "a"]
