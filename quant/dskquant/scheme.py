"""How the tensors of a model are quantized: one scheme for the model, rules for single layers."""

from __future__ import annotations

import enum
import fnmatch
from dataclasses import dataclass, replace

from dskquant.errors import SchemeError
from dskquant.modes import PrecisionMode

GROUP_SIZES = (32, 64, 128, 0)
"""Allowed group sizes; 0 is one group per channel (row)."""


class Role(enum.Enum):
    """What a weight matrix is used for, which decides how it is quantized."""

    LINEAR = "linear"  # base + residual planes
    EMBEDDING = "embedding"  # 8 bit, one group a row; may also be the lm_head (tied)
    LM_HEAD = "lm_head"  # 8 bit, one group a row


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """How one tensor is quantized."""

    role: Role
    shape: tuple[int, int]  # [N, K]
    group_size: int
    symmetric: bool
    always_residual: bool = False  # the layer uses base + residual in every quantized mode
    int8_plane: bool = False  # the layer also has a plane of 8-bit codes, for the separate weight layout

    def __post_init__(self) -> None:
        sizes = (*self.shape, self.group_size)
        if len(self.shape) != 2 or any(type(size) is not int for size in sizes) or min(self.shape) < 1:
            raise SchemeError(f"shape {list(self.shape)}, group_size {self.group_size!r}: not the sizes of a matrix")

    def has_groups_of(self, other: TensorScheme) -> bool:
        """Whether rows of both are quantized alike, so that they could be those of one tensor."""
        return self.shape[1] == other.shape[1] and replace(self, shape=other.shape) == other

    @property
    def bits(self) -> int:
        """Bits of a code: of each plane for a linear layer."""
        return 4 if self.role is Role.LINEAR else 8


LAYER_PRECISIONS = (PrecisionMode.INT4, PrecisionMode.INT8)
"""What a layer can compute in while the model serves in INT4: the base plane, or base + residual."""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Linear layers whose names match the shell pattern `match` compute in `precision` while the model is in INT4."""

    match: str
    precision: PrecisionMode

    def __post_init__(self) -> None:
        if self.precision not in LAYER_PRECISIONS:
            allowed = ", ".join(mode.value for mode in LAYER_PRECISIONS)
            raise SchemeError(f"layers that match {self.match!r}: precision {self.precision.value}; allowed: {allowed}")

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.match)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model is quantized.

    Tensors that match one of the shell patterns `int8_layers` never use the base plane alone. `int8_plane` adds a plane
    of 8-bit codes to every linear layer, which the separate weight layout serves INT8 from.
    """

    group_size: int = 64
    symmetric: bool = False
    int8_layers: tuple[str, ...] = ()
    int8_plane: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise SchemeError(
                f"group_size {self.group_size}: allowed are {', '.join(map(str, GROUP_SIZES))} (0: per channel)"
            )

    def for_tensor(self, name: str, role: Role, shape: tuple[int, int]) -> TensorScheme:
        """The scheme of the tensor `name`."""
        if role is not Role.LINEAR:
            return TensorScheme(role, shape, group_size=0, symmetric=False)
        always_residual = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.int8_layers)
        return TensorScheme(role, shape, self.group_size, self.symmetric, always_residual, self.int8_plane)
