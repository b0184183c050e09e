"""A generation: what exactly serves. Every token of an answer carries the number of the one that made it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from dskquant.engines.protocol import CompileOptions
from dskquant.parameter_set import ParameterSet


@dataclass(frozen=True, slots=True)
class Generation:
    """Weights, parameter set and effective configuration; immutable. Its graphs come and go, their meaning does not."""

    number: int
    hash: str  # hex SHA-256 over all that decides what the graphs compute

    @classmethod
    def of(cls, number: int, parameters: ParameterSet, engine: str, options: CompileOptions) -> Generation:
        """The generation that serves `parameters` as `engine` compiles them with `options`."""
        compiled = asdict(options) | {"weights": options.weights.value}
        effective = {"parameters": parameters.hash, "engine": engine, "options": compiled}
        text = json.dumps(effective, sort_keys=True)
        return cls(number, hashlib.sha256(text.encode()).hexdigest())
