"""A generation: what exactly serves. Every token of an answer carries the number of the one that made it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from dskquant.engines.protocol import CompileOptions
from dskquant.parameter_set import ParameterSet
from dskquant.scheme import LayerRule


@dataclass(frozen=True, slots=True)
class Generation:
    """Weights, parameter set and effective configuration; immutable. Its graphs come and go, their meaning does not."""

    number: int
    hash: str  # hex SHA-256 over all that decides what the graphs compute
    parameters: ParameterSet
    layers: tuple[LayerRule, ...] = ()

    @property
    def effective_parameters(self) -> ParameterSet:
        """The set with the precisions of its layers as the rules say."""
        return self.parameters.with_rules(self.layers)

    @classmethod
    def of(
        cls,
        number: int,
        parameters: ParameterSet,
        layers: tuple[LayerRule, ...],
        engine: str,
        options: CompileOptions,
    ) -> Generation:
        """The generation that serves `parameters` under the rules `layers`, as `engine` compiles them with `options`.

        Raises SchemeError for a rule that matches no linear layer.
        """
        effective = {
            "parameters": parameters.hash,
            "layers": [[rule.match, rule.precision.value] for rule in layers],
            "engine": engine,
            "options": asdict(options) | {"weights": options.weights.value},
        }
        text = json.dumps(effective, sort_keys=True)
        parameters.with_rules(layers)  # an unfit rule is refused here, not when a graph is built
        return cls(number, hashlib.sha256(text.encode()).hexdigest(), parameters, layers)
