"""IRs of other programs: the names of their weights, and what they would have the engine do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from golden_models import GOLDEN, weights_of
from openvino import opset13 as ops

from dskquant.architecture import read_decoder
from dskquant.convert import ConvertOptions, convert
from dskquant.engines.openvino.core import CORE
from dskquant.engines.openvino.ir import find_weights, read_ir
from dskquant.engines.openvino.stateful import inspect_ir
from dskquant.errors import SourceError
from dskquant.scheme import Role, Scheme
from dskquant.sources.directory import read_config
from dskquant.store import IR_XML

EXPORT = GOLDEN / "llama_openvino"
"""By optimum-intel 2.2.0, of the tiny Llama."""


def test_the_weights_of_an_export_have_the_names_and_values_of_the_checkpoint() -> None:
    expected = {name: values for name, values in weights_of("llama").items() if values.ndim == 2}
    found = {weight.name: weight for weight in find_weights(read_ir(EXPORT))}
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert np.array_equal(np.concatenate(list(weight.pieces())), expected[name].astype(np.float32))
    roles = {name: weight.role for name, weight in found.items() if weight.role is not Role.LINEAR}
    assert roles == {"model.embed_tokens.weight": Role.EMBEDDING, "lm_head.weight": Role.LM_HEAD}


def test_an_export_has_the_same_names_as_our_own_ir(tmp_path: Path) -> None:
    options = ConvertOptions(scheme=Scheme(group_size=0), golden=False)
    convert(GOLDEN / "llama", tmp_path / "store", options, lambda stage, done, total: None)
    ours, theirs = (find_weights(read_ir(store)) for store in (tmp_path / "store", EXPORT))
    assert {weight.name for weight in ours} == {weight.name for weight in theirs}


@pytest.mark.parametrize(
    "name",
    [
        "self.model.layers.0.mlp.up_proj._openvino_orig_weight",  # optimum-intel 2.2.0
        "self.model.layers.0.mlp.up_proj.weight",  # before
        "self.model.layers.0.mlp.up_proj.weight_compressed",  # float32, rounded to 16 bit when it was saved
        "model.layers.0.mlp.up_proj.weight",  # ours
    ],
)
def test_every_spelling_of_a_weight_gives_one_name(name: str) -> None:
    inputs = ops.parameter([1, 4], ov.Type.f32)
    constant = ops.constant(np.ones((6, 4), np.float16))
    constant.set_friendly_name(name)
    hidden = ops.matmul(inputs, ops.convert(constant, "f32"), False, True)
    model = ov.Model([ops.result(ops.relu(hidden))], [inputs])
    (weight,) = find_weights(model)
    assert weight.name == "model.layers.0.mlp.up_proj.weight"
    assert (weight.role, weight.shape) == (Role.LINEAR, (6, 4))


def test_a_tied_matrix_is_one_weight_named_after_the_embedding() -> None:
    ids = ops.parameter([3], ov.Type.i32)
    constant = ops.constant(np.ones((6, 4), np.float16))
    constant.set_friendly_name("self.model.embed_tokens._openvino_orig_weight")
    matrix = ops.convert(constant, "f32")
    logits = ops.matmul(ops.gather(matrix, ids, ops.constant(np.int64(0))), matrix, False, True)
    (weight,) = find_weights(ov.Model([ops.result(logits)], [ids]))
    assert (weight.name, weight.role, len(weight.matmuls)) == ("model.embed_tokens.weight", Role.EMBEDDING, 1)


def test_options_left_in_an_export_are_no_defaults_of_its_graphs() -> None:
    """The export asks for a cache in f16; without it, the CPU plugin takes its own default, u8."""
    exported = CORE.compile_model(CORE.read_model(EXPORT / IR_XML), "CPU")
    ours = CORE.compile_model(read_ir(EXPORT), "CPU")
    assert exported.get_property("KV_CACHE_PRECISION") == ov.Type.f16
    assert ours.get_property("KV_CACHE_PRECISION") == ov.Type.u8
    assert not read_ir(EXPORT).has_rt_info("runtime_options")


def test_an_export_in_8_bit_is_refused_with_the_option_to_give(tmp_path: Path) -> None:
    model = CORE.read_model(EXPORT / IR_XML)
    weight = find_weights(model)[1]
    codes = ops.constant(np.zeros(weight.shape, np.uint8))
    codes.set_friendly_name(weight.constant.get_friendly_name())
    weight.source.replace(ops.convert(codes, "f32").output(0))
    ov.save_model(model, tmp_path / IR_XML, compress_to_fp16=False)
    decoder = read_decoder(read_config(EXPORT), "config.json")
    with pytest.raises(SourceError, match=r"_openvino_orig_weight: .*uint8_t.*export with --weight-format fp16"):
        inspect_ir(tmp_path / IR_XML, decoder)


SIGNALLED = """
import signal, sys
from pathlib import Path
from dskquant.engines.openvino.stateful import StatefulModel

signal.signal(signal.SIGTERM, lambda number, _: print(f"signal {number} handled", flush=True))
graphs = [StatefulModel(Path(sys.argv[1])) for _ in range(3)]
while graphs:
    graphs.pop(0)
signal.raise_signal(signal.SIGTERM)
"""


def test_signals_are_handled_after_graphs_were_made_and_let_go() -> None:
    """The CPU plugin gives threads an alternate signal stack; a plugin that ends takes it away from under them."""
    command = [sys.executable, "-c", SIGNALLED, EXPORT / IR_XML]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "signal 15 handled\n"), done.stderr
