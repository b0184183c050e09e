"""Finds the float constants of a decoder's OpenVINO IR and what Hugging Face calls them, without OpenVINO.

Our converter and optimum-intel keep the names of matrices; optimum-intel loses those of norms and biases, which are
then told by what reads them. The form of the file: https://docs.openvino.ai/2026/documentation/openvino-ir-format.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from dskquant.decoder import EMBEDDING, FINAL_NORM, LM_HEAD
from dskquant.floats import NUMPY_FLOATS

Data = dict[str, str]
"""element_type, shape, and offset and size in the .bin."""

WEIGHT = ".weight"
NORM_BEFORE = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm"}
NORM_AFTER = {"q_proj": "q_norm", "k_proj": "k_norm"}
LONGEST_WALK = 8
"""Layers between a projection and the norm of its heads."""


def float_constants(xml: Path) -> dict[str, Data]:
    """Every float constant that is no scalar, by name. Raises OSError, ElementTree.ParseError or KeyError."""
    # Written by our own converter, or copied by it from an export that OpenVINO has read.
    graph = _Graph(ElementTree.parse(xml).getroot())  # noqa: S314
    return {graph.name(layer): data for layer, data in graph.constants()}


class _Graph:
    """Layers by id, and what reads what."""

    def __init__(self, root: ElementTree.Element) -> None:
        self._layers = {layer.attrib["id"]: layer for layer in root.iterfind("layers/layer")}
        self._inputs: dict[str, list[str]] = {layer: [] for layer in self._layers}
        self._readers: dict[str, list[str]] = {layer: [] for layer in self._layers}
        for edge in root.iterfind("edges/edge"):
            source, target = edge.attrib["from-layer"], edge.attrib["to-layer"]
            self._inputs[target].append(source)
            self._readers[source].append(target)

    def constants(self) -> Iterator[tuple[str, Data]]:
        for layer, element in self._layers.items():
            data = element.find("data")
            if element.get("type") != "Const" or data is None:
                continue
            if data.get("element_type") in NUMPY_FLOATS and data.get("shape"):
                yield layer, dict(data.attrib)

    def name(self, constant: str) -> str:
        """The name in the file without what optimum-intel adds to it, or the name that its use gives it."""
        written = self._layers[constant].attrib["name"]
        written = written.removeprefix("self.").removesuffix("_compressed").replace("._openvino_orig_", ".")
        return written if written.endswith((WEIGHT, ".bias")) else self._name_by_use(constant) or written

    def _name_by_use(self, constant: str) -> str | None:
        for reader in self._readers_through_convert(constant):
            if self._type(reader) == "Add":
                matrix = self._matrix_behind(reader, 1)
                return matrix and f"{matrix.removesuffix(WEIGHT)}.bias"
            if self._type(reader) == "Multiply":
                return self._norm_of(reader)
        return None

    def _norm_of(self, product: str) -> str | None:
        """The norm that ends in `product`: before a projection, or of the heads that a projection makes."""
        for reader in self._readers[product]:
            matrix = self._matrix_of(reader)
            if matrix in (EMBEDDING, LM_HEAD):
                return FINAL_NORM
            block, _, module = (matrix or "").removesuffix(WEIGHT).rpartition(".")
            if module in NORM_BEFORE:
                return f"{block.rpartition('.')[0]}.{NORM_BEFORE[module]}{WEIGHT}"
        matrix = self._matrix_behind(product, LONGEST_WALK)
        block, _, module = (matrix or "").removesuffix(WEIGHT).rpartition(".")
        return f"{block}.{NORM_AFTER[module]}{WEIGHT}" if module in NORM_AFTER else None

    def _matrix_behind(self, layer: str, steps: int) -> str | None:
        """Name of the matrix of the nearest MatMul, at most `steps` layers before `layer`."""
        reached = {layer}
        for _ in range(steps):
            reached = {source for target in reached for source in self._inputs[target]}
            for candidate in sorted(reached):
                matrix = self._matrix_of(candidate)
                if matrix:
                    return matrix
        return None

    def _matrix_of(self, layer: str) -> str | None:
        """Name of the weight that a MatMul multiplies with; None for all else."""
        if self._type(layer) != "MatMul":
            return None
        sources = [self._before_convert(source) for source in self._inputs[layer]]
        return next((self.name(source) for source in sources if self._type(source) == "Const"), None)

    def _before_convert(self, layer: str) -> str:
        return self._inputs[layer][0] if self._type(layer) == "Convert" else layer

    def _readers_through_convert(self, constant: str) -> list[str]:
        readers = []
        for reader in self._readers[constant]:
            readers += self._readers[reader] if self._type(reader) == "Convert" else [reader]
        return readers

    def _type(self, layer: str) -> str:
        return self._layers[layer].attrib["type"]
