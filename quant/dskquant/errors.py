"""Errors that a user of the offline tools or of the daemon can act on. The message is the whole story."""

from __future__ import annotations


class QuantError(Exception):
    """Base of all errors raised on purpose by `dskquant`."""


class SourceError(QuantError):
    """A source model is damaged, incomplete or of an unknown kind; the message names file and tensor."""


class StoreError(QuantError):
    """A model store is damaged, incomplete or of another format."""


class EngineError(QuantError):
    """The engine cannot do what was asked of it with this model and these options."""


class TensorError(QuantError):
    """A tensor given to a graph is not the one it takes."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"{name}: {description}")
        self.name = name
        self.description = description


class SchemeError(QuantError):
    """A quantization scheme does not fit the tensor it is meant for."""


class ParameterSetError(StoreError):
    """A parameter set breaks a rule of its format, or does not fit the model it is meant for."""

    def __init__(self, message: str, *, rule: str, tensor: str = "") -> None:
        super().__init__(message)
        self.rule = rule  # short and stable, such as "scale-positive"; see dskquant.validation
        self.tensor = tensor  # "" where the rule is about no single tensor


class ParameterSetMissingError(ParameterSetError):
    """A parameter set, or a file of it, is not there, or not there yet."""

    def __init__(self, message: str) -> None:
        super().__init__(message, rule="set-missing")
