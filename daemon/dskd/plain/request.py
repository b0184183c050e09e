"""What goes into the batch loop of a plain graph and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from dskd.errors import InvalidArgumentError
from dskquant.modes import PrecisionMode
from dskquant.plain.protocol import Tensors


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A validated request: `tensors` are the inputs of the model, of its dtypes and shapes."""

    request_id: str
    tensors: Tensors
    precision: PrecisionMode | None = None  # None: follow the mode of the model


@dataclass(frozen=True, slots=True)
class TensorAnswer:
    """All outputs to one request, and what made them."""

    tensors: Tensors
    mode: PrecisionMode
    generation: int
    engine: str
    queue_s: float  # arrival to the run of its batch
    compute_s: float  # of the run
    batch_rows: int  # rows of the batch it was in; 1 where rows mean nothing


class UncomputableError(InvalidArgumentError):
    """The engine cannot compute these inputs, although their dtypes and shapes are those of the model."""

    def __init__(self, description: str) -> None:
        super().__init__("inputs", description)
