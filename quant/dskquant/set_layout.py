"""Which arrays of a parameter set stand for a tensor, and how they are named and shaped."""

from __future__ import annotations

from dataclasses import dataclass

from dskquant.planes import group_length
from dskquant.scheme import Role, TensorScheme


@dataclass(frozen=True, slots=True)
class Plane:
    """A matrix of codes that stands for a tensor or for part of it, as the files of a set name and shape it."""

    tensor: str
    prefix: str  # of the names of its arrays
    bits: int
    shape: tuple[int, int]  # [N, K]
    groups: int  # of a row

    @property
    def codes(self) -> str:
        return f"{self.prefix}.codes"

    @property
    def scales(self) -> str:
        return f"{self.prefix}.scales"

    @property
    def zero_points(self) -> str:
        return f"{self.prefix}.zero_points"

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, int]]]:
        """Dtype, as safetensors spells it, and shape of each."""
        rows, columns = self.shape
        grid = rows, self.groups
        return {
            self.codes: ("U8", (rows, columns * self.bits // 8)),
            self.scales: ("F16", grid),
            self.zero_points: ("U8", grid),
        }


def planes_of(tensor: str, scheme: TensorScheme) -> dict[str, Plane]:
    """The planes of a tensor: "base", "residual" and maybe "int8" of a linear layer, "" of an 8-bit tensor.

    Raises SchemeError when groups do not divide the rows.
    """
    rows, columns = scheme.shape
    groups = columns // group_length(columns, scheme.group_size)
    bits = {"base": 4, "residual": 4} | ({"int8": 8} if scheme.int8_plane else {})
    return {
        plane: Plane(tensor, f"{tensor}.{plane}" if plane else tensor, width, (rows, columns), groups)
        for plane, width in (bits if scheme.role is Role.LINEAR else {"": 8}).items()
    }
