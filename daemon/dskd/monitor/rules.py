"""Which mode serves a sequence in a step: one function composes what was asked for, what is allowed and what is needed.

Precedence, the first that speaks wins:

1. the request's own precision,
2. an operator's pin of the model,
3. the fallback of a tripped mode, unless a more exact one would serve anyway,
4. the long-context rule: at least a mode, from a number of tokens on,
5. the load rule: a lower mode while many wait,
6. the mode of the model; of prompts, that of the prefill rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dskd.monitor.config import LoadConfig, LongContextConfig, MonitorConfig
from dskd.monitor.states import Phase
from dskquant.modes import LADDER, PrecisionMode


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, and in words why."""

    mode: PrecisionMode
    reason: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Whether the load rule holds a model down, and since when nobody has waited (seconds of a steady clock)."""

    lowered: bool = False
    quiet_since: float = math.inf


@dataclass(frozen=True, slots=True)
class Situation:
    """What the rules are told of a sequence and of its model."""

    model_mode: PrecisionMode
    phase: Phase
    tokens: int  # of the sequence so far, prompt included
    requested: PrecisionMode | None = None  # by the request
    pin: PrecisionMode | None = None  # by an operator
    fallback: PrecisionMode | None = None  # what stands in for the mode that has tripped; None: it has not
    lowered: bool = False  # by the load rule


def effective_mode(situation: Situation, config: MonitorConfig) -> Choice:
    """The mode that shall serve the next step of a sequence; whether it is resident is not looked at."""
    if situation.requested is not None:
        return Choice(situation.requested, "asked for by the request")
    if situation.pin is not None:
        return Choice(situation.pin, "pinned by an operator")
    choice = base_mode(situation, config)
    choice = load_rule(situation, config.load) or choice
    choice = long_context_rule(situation, config.long_context, choice.mode) or choice
    return fallback_rule(situation, choice.mode) or choice


def base_mode(situation: Situation, config: MonitorConfig) -> Choice:
    """The mode with no rule that bends it."""
    if situation.phase is Phase.PREFILL and config.prefill is not None:
        return Choice(config.prefill, "mode of prompts")
    return Choice(situation.model_mode, "mode of the model")


def load_rule(situation: Situation, rule: LoadConfig | None) -> Choice | None:
    """The lower mode while the rule holds the model down (`advance_load`), if it is lower than the model's."""
    if rule is None or not situation.lowered or not is_above(situation.model_mode, rule.mode):
        return None
    return Choice(rule.mode, f"more than {rule.queue} requests waited")


def long_context_rule(situation: Situation, rule: LongContextConfig | None, otherwise: PrecisionMode) -> Choice | None:
    """The least mode of long sequences, if it is more exact than the one that would serve otherwise."""
    if rule is None or situation.tokens < rule.tokens or not is_above(rule.mode, otherwise):
        return None
    return Choice(rule.mode, f"at least {rule.tokens} tokens")


def fallback_rule(situation: Situation, otherwise: PrecisionMode) -> Choice | None:
    """The fallback, if it is more exact than the mode that would serve otherwise."""
    if situation.fallback is None or not is_above(situation.fallback, otherwise):
        return None
    return Choice(situation.fallback, "fallback from a mode that is too noisy")


def advance_load(state: LoadState, waiting: int, mean_kl: float | None, now: float, rule: LoadConfig) -> LoadState:
    """The state of the load rule at `now`: `waiting` requests wait, the lower mode has `mean_kl` (None: not known).

    Goes down as soon as more than `rule.queue` wait, if the lower mode is known to be good enough; goes up at once when
    it is not any more, and when nobody has waited for `rule.quiet_s` seconds. What lies between changes nothing.
    """
    quiet_since = math.inf if waiting else min(state.quiet_since, now)
    if mean_kl is None or mean_kl > rule.max_kl or now - quiet_since >= rule.quiet_s:
        return LoadState(False, quiet_since)
    return LoadState(state.lowered or waiting > rule.queue, quiet_since)


def is_above(mode: PrecisionMode, other: PrecisionMode) -> bool:
    """Whether `mode` is more exact."""
    return LADDER.index(mode) > LADDER.index(other)
