"""Turns the stored stateful model into the paged form the daemon runs."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from dskquant.engines.openvino.ir import LOGITS
from dskquant.errors import StoreError

LOGIT_ROWS = "logit_rows"

STEP_INPUTS = frozenset(
    {
        "input_ids",
        "position_ids",
        "past_lens",
        "subsequence_begins",
        "block_indices",
        "block_indices_begins",
        "max_context_len",
    }
)


def to_paged(model: ov.Model, num_layers: int) -> None:
    """Rewrites a stateful decoder in place: tokens of all sequences end to end, KV cache in blocks given by the caller.

    Raises StoreError when not every layer took part: the transformation stops half-way without a word where it does not
    know a pattern.
    """
    paged_attention_transformation(model)
    paged = sum(node.get_type_name() == "PagedAttentionExtension" for node in model.get_ops())
    if paged != num_layers:
        raise StoreError(f"only {paged} of {num_layers} attention layers could be turned into their paged form")
    odd = {name for name in _input_names(model) if name not in STEP_INPUTS and "_cache." not in name}
    if odd:
        raise StoreError(f"the model keeps inputs that a paged graph has no use for: {', '.join(sorted(odd))}")


def keep_wanted_logits(model: ov.Model) -> None:
    """Makes the lm_head run on the rows named by the new input `logit_rows` alone, not on every token of a prefill."""
    rows = add_row_input(model, LOGIT_ROWS)
    (result,) = model.get_results()
    lm_head = result.input_value(0).get_node()
    if lm_head.get_type_name() != "MatMul":
        raise StoreError(f"the logits come from a {lm_head.get_type_name()}, not from a MatMul (the lm_head)")
    hidden = lm_head.input_value(0)
    lm_head.input(0).replace_source_output(gather_rows(hidden, rows).output(0))
    lm_head.output(0).get_tensor().set_names({LOGITS})


def add_row_input(model: ov.Model, name: str) -> ov.Node:
    """A new input of the model: indices [R] of tokens of the step."""
    rows = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name=name)
    rows.output(0).get_tensor().set_names({name})
    model.add_parameters([rows])
    return rows


def gather_rows(tokens: ov.Output, rows: ov.Node) -> ov.Node:
    """The rows of `tokens` [T, ...] that `rows` names."""
    return ops.gather(tokens, rows, ops.constant(np.int32(0)))


def _input_names(model: ov.Model) -> list[str]:
    return [parameter.get_friendly_name() for parameter in model.get_parameters()]
