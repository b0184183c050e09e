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


class SchemeError(QuantError):
    """A quantization scheme does not fit the tensor it is meant for."""
