"""What is to be done so that a model serves with what the files say. Pure decisions: no threads, files or clocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from dskd.manager.types import Change
from dskd.quant_config import QuantConfig, difference
from dskquant.modes import PrecisionMode


@dataclass(frozen=True, slots=True)
class ModelView:
    """What a decision needs to know of the world."""

    default_mode: PrecisionMode | None  # None: no such model is known
    serving: bool = False
    set_state: Hashable = None  # fingerprint of the parameter set that the desired config names
    set_settled: bool = True  # it has stayed the same for a while


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to make a model serve with `config`."""

    number: int
    config: QuantConfig | None
    change: Change
    set_state: Hashable


@dataclass(frozen=True, slots=True)
class UnknownModel:
    """The config is for a model that is not known."""


class ModelPlan:
    """What one model shall serve with, serves with, and is about to."""

    def __init__(self, applied: QuantConfig | None = None) -> None:
        self.applied = applied
        self.desired = applied
        self.files: tuple[str, ...] = ()  # that say what is desired; those that said it last when there are none now
        self._running: list[Attempt] = []  # oldest first
        self._refused: Attempt | None = None
        self._last_number = 0
        self._told_unknown: QuantConfig | None = None

    def aim(self, desired: QuantConfig | None, files: Iterable[str] = ()) -> None:
        """From now on `desired` is wanted, which `files` say."""
        self.desired = desired
        self.files = tuple(files) or self.files

    @property
    def wanted_set(self) -> str:
        """The path of the parameter set in a config that is still to be applied; "": there is none."""
        if self.desired is None or self.desired.params is None or self.desired == self.applied:
            return ""
        return str(self.desired.params.file)

    @property
    def is_over(self) -> bool:
        """Nothing is desired, nothing serves, nothing is tried: the plan of a model without any config."""
        return self.desired is None and self.applied is None and not self._running

    @property
    def is_refused(self) -> bool:
        """The desired config was refused, and nothing else is tried."""
        return self._refused is not None and self._refused.config == self.desired and not self._running

    def next_step(self, view: ModelView) -> Attempt | UnknownModel | None:
        """What to do now; None: nothing. An Attempt must be tried and its outcome be told by one of the methods below.

        A new one is made even while another is under way, which it overtakes.
        """
        if self._is_done():
            return None
        if view.default_mode is None:
            return self._unknown()
        if not view.serving or self._is_hopeless(view):
            return None
        change = self._change(view.default_mode)
        if change == Change(in_flight=change.in_flight):
            self.applied = self.desired
            return None
        self._last_number += 1
        attempt = Attempt(self._last_number, self.desired, change, view.set_state)
        self._running.append(attempt)
        return attempt

    def succeeded(self, attempt: Attempt) -> None:
        """The model serves with the config of `attempt`."""
        if attempt in self._running:  # otherwise a newer one has come in before it
            self._running = self._running[self._running.index(attempt) + 1 :]
            self.applied = attempt.config

    def refused(self, attempt: Attempt) -> None:
        """The model serves on as before. The refusal of any but the newest means nothing: that one overtook it."""
        self._drop(attempt)
        if attempt.number == self._last_number:
            self._refused = attempt

    def interrupted(self, attempt: Attempt) -> None:
        """The model went away meanwhile; the attempt is made again when it serves."""
        self._drop(attempt)

    def retry(self) -> None:
        """What was refused may be tried, and told, again."""
        self._refused = self._told_unknown = None

    def _is_done(self) -> bool:
        if self._running:
            return self._running[-1].config == self.desired
        return self.desired == self.applied

    def _is_hopeless(self, view: ModelView) -> bool:
        if self._running or self._refused is None or self._refused.config != self.desired:
            return False
        return not view.set_settled or view.set_state == self._refused.set_state

    def _unknown(self) -> UnknownModel | None:
        if self.desired in (None, self._told_unknown):
            return None
        self._told_unknown = self.desired
        return UnknownModel()

    def _change(self, default_mode: PrecisionMode) -> Change:
        """From whatever the model may serve with: any of the running attempts may still have come in."""
        befores = (self.applied, *(attempt.config for attempt in self._running))
        covering, *others = (difference(before, self.desired, default_mode) for before in befores)
        for other in others:
            covering = replace(
                covering,
                mode=covering.mode or other.mode,
                parameters=covering.parameters or other.parameters,
                layers=other.layers if covering.layers is None else covering.layers,
                monitor=other.monitor if covering.monitor is None else covering.monitor,
            )
        return covering

    def _drop(self, attempt: Attempt) -> None:
        if attempt in self._running:
            self._running.remove(attempt)
