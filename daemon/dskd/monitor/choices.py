"""What follows from the states of the modes: what serves instead, and what is scored. Pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dskd.engine.request import ScoringPlan
from dskd.monitor.config import MonitorConfig
from dskd.monitor.noise import NoiseWatch
from dskd.monitor.policy import stand_in, target_of
from dskd.monitor.rules import LoadState, is_above
from dskd.monitor.types import Served
from dskquant.modes import LADDER, PrecisionMode

Watches = Mapping[PrecisionMode, NoiseWatch]


@dataclass(frozen=True, slots=True)
class Replacement:
    """What serves in place of a tripped mode."""

    mode: PrecisionMode  # the tripped one
    target: PrecisionMode
    serving: PrecisionMode  # the target, or until it is in memory what stands in for it: `mode` itself if nothing can


def replacement_of(
    mode: PrecisionMode, watches: Watches, target: str, resident: Collection[PrecisionMode]
) -> Replacement:
    """What shall serve in place of `mode`, which has a watch; a target that has tripped too is replaced by its own."""
    wanted = target_of(mode, target, resident) or mode
    while is_tripped(wanted, watches):
        wanted = target_of(wanted, target, resident) or wanted
    return Replacement(mode, wanted, stand_in(mode, wanted, resident))


def replacement(
    modes: Iterable[PrecisionMode], watches: Watches, target: str, resident: Collection[PrecisionMode]
) -> Replacement | None:
    """The most exact of those that the tripped ones of `modes` need; None: none is tripped."""
    needed = [replacement_of(mode, watches, target, resident) for mode in modes if is_tripped(mode, watches)]
    return max(needed, key=lambda one: (LADDER.index(one.target), LADDER.index(one.serving)), default=None)


def is_tripped(mode: PrecisionMode, watches: Watches) -> bool:
    return mode in watches and watches[mode].fallback.is_tripped


def serving_modes(served: Served, config: MonitorConfig) -> tuple[PrecisionMode, ...]:
    """The modes that a model serves in while none has tripped, those that requests ask for left out.

    Neither does the mode of the load rule belong to them: when it trips, the rule gives it up.
    """
    if served.pinned:
        return (served.mode,)
    rules = (config.prefill, config.long_context.mode if config.long_context else None)
    return (served.mode, *(mode for mode in rules if mode is not None and mode is not served.mode))


def reference_of(served: Served, config: MonitorConfig) -> PrecisionMode | None:
    """The mode that scores: that of the configuration, or the most exact one in memory; None: nothing is below it."""
    if not served.resident:  # the graphs make room for others
        return None
    given = config.reference
    if given in served.resident and given is not None and is_above(given, served.mode):
        reference = given
    else:
        reference = max(served.resident, key=LADDER.index)
    return reference if any(is_above(reference, mode) for mode in served.resident) else None


def probe_of(served: Served, config: MonitorConfig, watches: Watches, load: LoadState) -> PrecisionMode | None:
    """The mode to score although another one serves: one that has tripped, or the one that the load rule would use."""
    if served.pinned:
        return None
    candidates = [mode for mode in serving_modes(served, config) if is_tripped(mode, watches)]
    if config.load is not None and not load.lowered and is_above(served.mode, config.load.mode):
        candidates.append(config.load.mode)
    return next((mode for mode in candidates if mode in served.resident), None)


def scoring_plan(
    served: Served,
    config: MonitorConfig,
    watches: Watches,
    load: LoadState = LoadState(),  # noqa: B008  # frozen
) -> ScoringPlan | None:
    """What the step loop shall score; None: nothing."""
    reference = reference_of(served, config)
    if reference is None or not config.share:
        return None
    probe = probe_of(served, config, watches, load)
    return ScoringPlan(reference, config.share, config.time_share, config.own_context, probe)


def is_scored(
    mode: PrecisionMode, plan: ScoringPlan | None, served: Served, config: MonitorConfig, *, tripped: bool
) -> bool:
    """Whether samples of `mode` can be expected."""
    if plan is None or not is_above(plan.reference, mode) or mode not in served.resident:
        return False
    serves = mode in serving_modes(served, config) and (served.pinned or not tripped)
    return serves or plan.probe is mode
