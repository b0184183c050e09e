"""Where the generations of a model come from: its default parameter set, and the sets that were applied to it.

Everything here reads files, and belongs into worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from dskd.errors import FailedPreconditionError
from dskd.manager.depot import SetDepot
from dskd.manager.generation import Generation
from dskd.manager.state_file import KeptGeneration
from dskd.manager.types import SetReference
from dskquant import parameter_set
from dskquant.engines.protocol import CompileOptions
from dskquant.errors import SchemeError, StoreError
from dskquant.parameter_set import ParameterSet
from dskquant.scheme import LayerRule
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest, verify
from dskquant.validation import validate

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


class Catalogue:
    """Makes generations. Raises StoreError when the model store is damaged."""

    def __init__(self, store: Path, depot: SetDepot, engine: str, options: CompileOptions) -> None:
        self._store = store
        self._depot = depot
        self._engine = engine
        self._options = options
        manifest = StoreManifest.read(store)
        verify(store, manifest)
        self._weights_sha256 = manifest.weights_sha256
        self._default = self._verified_default()

    @property
    def default(self) -> ParameterSet:
        """The set that the model was converted with. Raises StoreError when it is damaged."""
        if isinstance(self._default, StoreError):
            raise self._default
        return self._default

    def generation(self, number: int, parameters: ParameterSet, layers: tuple[LayerRule, ...]) -> Generation:
        """Raises FailedPreconditionError for a rule that matches no linear layer."""
        try:
            return Generation.of(number, parameters, layers, self._engine, self._options)
        except SchemeError as error:
            raise FailedPreconditionError("layers", str(error)) from error

    def find(self, reference: SetReference, before_piece: Callable[[], None]) -> ParameterSet:
        """The set that `reference` names, every rule checked, where it lies.

        Raises StoreError (ParameterSetError names the rule that is broken), FailedPreconditionError when it is not the
        one whose digest was given. `before_piece` is called again and again meanwhile; what it raises ends it.
        """
        found = self.default if reference.path is None else parameter_set.read(reference.path)
        if reference.sha256 and found.hash != reference.sha256:
            raise FailedPreconditionError(
                "params.sha256",
                f"the manifest of {found.directory} has the SHA-256 {found.hash}, not {reference.sha256}",
            )
        if reference.path is not None:
            validate(found, self._store, before_piece)
        return found

    def keep(self, found: ParameterSet, is_cancelled: Callable[[], bool]) -> ParameterSet:
        """A copy of the daemon's own, with codes; the default set stays in the model store."""
        return found if self._is_default(found.hash) else self._depot.keep(found, self._store, is_cancelled)

    def reopen(self, kept: KeptGeneration) -> Generation:
        """A generation of before. Raises StoreError when its set is gone or damaged, and as `generation` does."""
        is_default = self._is_default(kept.parameter_set)
        parameters = self.default if is_default else self._depot.open(kept.parameter_set)
        self._require_fit(parameters)
        return self.generation(kept.number, parameters, kept.layers)

    def forget_all_but(self, kept: Iterable[KeptGeneration], others: frozenset[str]) -> None:
        """Removes the sets that no generation of `kept` needs and that are not among `others`."""
        self._depot.forget_all_but(others | {generation.parameter_set for generation in kept})

    def _is_default(self, set_hash: str) -> bool:
        return not isinstance(self._default, StoreError) and self._default.hash == set_hash

    def _verified_default(self) -> ParameterSet | StoreError:
        """A damaged one is no hindrance while another set serves."""
        try:
            parameters = parameter_set.read(self._store / DEFAULT_PARAMETER_SET)
            self._require_fit(parameters)
            parameters.verify()
        except StoreError as error:
            log.error("the default parameter set is damaged", store=str(self._store), reason=str(error))
            return error
        return parameters

    def _require_fit(self, parameters: ParameterSet) -> None:
        if parameters.weights_sha256 != self._weights_sha256:
            raise StoreError(f"{parameters.directory}: made for other weights than those of {self._store}")
