"""The decisions of the watcher: what settles, what is applied, retried and taken back. No threads, files or clocks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

from dskd.engine.request import InFlight
from dskd.manager.types import Change, SetReference
from dskd.quant_config import ParamsConfig, QuantConfig, difference
from dskd.watch.drop_ins import DropIns, names_of
from dskd.watch.plan import Attempt, ModelPlan, ModelView, UnknownModel
from dskd.watch.settling import Settling
from dskquant.modes import PrecisionMode
from dskquant.scheme import LayerRule

INT4, INT8, FP32 = PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP32
SERVING = ModelView(INT4, serving=True)
LOADED_LATER = ModelView(INT4, serving=False)
UNKNOWN = ModelView(default_mode=None)
PLAIN = QuantConfig("m", precision=INT8)
SET_A = QuantConfig("m", params=ParamsConfig(Path("/a")))
SET_B = QuantConfig("m", params=ParamsConfig(Path("/b")))
RULE = LayerRule("*", INT8)


def started(plan: ModelPlan, view: ModelView = SERVING) -> Attempt:
    step = plan.next_step(view)
    assert isinstance(step, Attempt)
    return step


def aiming(desired: QuantConfig | None, applied: QuantConfig | None = None) -> ModelPlan:
    plan = ModelPlan(applied)
    plan.aim(desired, ["x.toml"])
    return plan


def serving_with(state: object) -> ModelView:
    return ModelView(INT4, serving=True, set_state=state)


# Settling


def test_a_value_settles_when_it_stayed_the_same_long_enough() -> None:
    settling = Settling(1.0)
    assert settling.observe(0.0, {"x": "a"}) == []
    assert settling.observe(0.5, {"x": "b"}) == []
    assert settling.observe(1.4, {"x": "b"}) == []
    assert list(settling.moving) == ["x"]
    assert settling.observe(1.5, {"x": "b"}) == ["x"]
    assert (settling.settled("x"), list(settling.moving)) == ("b", [])
    assert settling.observe(9.0, {"x": "b"}) == []


def test_a_value_that_returns_to_what_it_was_has_not_changed() -> None:
    settling = Settling(1.0, {"x": "a"})
    assert settling.observe(0.0, {"x": "b"}) == []
    assert settling.observe(5.0, {"x": "a"}) == []
    assert settling.observe(5.1, {"x": "b"}) == []
    assert settling.observe(6.0, {"x": "b"}) == []  # the time since it was b before does not count


def test_what_is_held_does_not_settle() -> None:
    settling = Settling(1.0)
    settling.observe(0.0, {"x": "a"}, held={"x"})
    assert settling.observe(100.0, {"x": "a"}, held={"x"}) == []
    assert settling.observe(100.1, {"x": "a"}) == ["x"]


def test_absence_settles_as_well() -> None:
    settling = Settling(1.0, {"x": "a"})
    assert settling.observe(0.0, {}) == []
    assert settling.observe(0.5, {"x": "a"}) == []
    assert settling.observe(1.2, {}) == []
    assert settling.observe(2.2, {}) == ["x"]
    assert settling.settled("x") is None


def test_without_waiting_the_first_sight_counts() -> None:
    assert Settling(0.0).observe(0.0, {"x": "a", "b": "c"}) == ["b", "x"]


def test_after_starting_over_the_time_before_does_not_count() -> None:
    settling = Settling(1.0, {"x": "a"})
    settling.observe(0.0, {})
    settling.start_over()
    assert settling.observe(5.0, {}) == []
    assert settling.observe(6.0, {}) == ["x"]


@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.sampled_from(["a", "b", None])), max_size=20))
def test_whatever_comes_the_last_steady_value_is_the_settled_one(looks: list[tuple[float, str | None]]) -> None:
    settling, now = Settling(1.0), 0.0
    for pause, value in looks:
        now += pause
        settling.observe(now, {} if value is None else {"x": value})
    last = looks[-1][1] if looks else None
    settling.observe(now + 1.5, {} if last is None else {"x": last})
    assert settling.settled("x") == last
    assert not settling.moving


# Drop-ins


def test_files_of_a_model_are_merged_and_a_removed_one_is_gone() -> None:
    drop_ins = DropIns()
    drop_ins.put("20.toml", "", QuantConfig("m", precision=INT8))
    drop_ins.put("10.toml", "", QuantConfig("m", precision=INT4, layers=(RULE,)))
    drop_ins.put("10-other.toml", "", QuantConfig("n", precision=FP32))
    assert drop_ins.files_of("m") == ["10.toml", "20.toml"]
    assert drop_ins.desired() == {
        "m": QuantConfig("m", precision=INT8, layers=(RULE,)),
        "n": QuantConfig("n", precision=FP32),
    }
    drop_ins.remove("20.toml")
    assert drop_ins.desired()["m"] == QuantConfig("m", precision=INT4, layers=(RULE,))
    drop_ins.put("10.toml", "", QuantConfig("n"))
    assert drop_ins.desired().keys() == {"n"}
    assert (drop_ins.model_of("10.toml"), drop_ins.model_of("never.toml")) == ("n", "")


def test_names_that_cannot_be_printed_are_shown_without_harm() -> None:
    assert names_of(["a.toml", "b\n\udcff.toml"]) == "a.toml,b\ufffd\ufffd.toml"


# Plans


def test_a_config_is_applied_once() -> None:
    plan = aiming(PLAIN)
    attempt = started(plan)
    assert attempt.change == Change(mode=INT8)
    assert plan.next_step(SERVING) is None
    plan.succeeded(attempt)
    assert plan.applied == PLAIN
    assert plan.next_step(SERVING) is None


def test_after_a_restart_only_what_changed_meanwhile_is_applied() -> None:
    applied = QuantConfig("m", precision=INT8, layers=(RULE,))
    plan = ModelPlan(applied)
    plan.aim(applied)
    assert plan.next_step(SERVING) is None
    plan.aim(QuantConfig("m", precision=INT8))
    assert started(plan).change == Change(layers=())


def test_a_removed_config_is_taken_back_in_the_name_of_its_files() -> None:
    plan = aiming(QuantConfig("m", FP32, params=ParamsConfig(Path("/a")), layers=(RULE,)))
    plan.succeeded(started(plan))
    plan.aim(None)
    assert started(plan).change == Change(INT4, SetReference(None), ())
    assert plan.files == ("x.toml",)


def test_a_model_that_does_not_serve_is_waited_for() -> None:
    plan = aiming(PLAIN)
    assert plan.next_step(LOADED_LATER) is None
    assert started(plan).config == PLAIN


def test_what_an_unload_interrupts_is_applied_after_the_next_load() -> None:
    plan = aiming(PLAIN)
    plan.interrupted(started(plan))
    assert plan.next_step(LOADED_LATER) is None
    assert started(plan).config == PLAIN


def test_an_unknown_model_is_told_once() -> None:
    plan = aiming(PLAIN)
    assert plan.next_step(UNKNOWN) == UnknownModel()
    assert plan.next_step(UNKNOWN) is None
    plan.aim(SET_A)
    assert plan.next_step(UNKNOWN) == UnknownModel()
    plan.retry()
    assert plan.next_step(UNKNOWN) == UnknownModel()
    assert started(plan).config == SET_A  # it has become known


def test_what_an_unknown_model_served_with_is_taken_back_when_it_returns() -> None:
    plan = ModelPlan(PLAIN)
    plan.aim(None)
    assert plan.next_step(UNKNOWN) is None
    assert started(plan).change == Change(mode=INT4, parameters=None, layers=None)


def test_a_refused_config_is_tried_again_only_when_it_changes() -> None:
    plan = aiming(SET_A)
    plan.refused(started(plan))
    assert plan.is_refused
    assert plan.next_step(SERVING) is None
    plan.aim(SET_B)
    assert not plan.is_refused
    plan.refused(started(plan))
    plan.aim(SET_A)
    assert started(plan).config == SET_A


def test_a_refused_config_is_tried_again_when_asked() -> None:
    plan = aiming(SET_A)
    plan.refused(started(plan))
    plan.retry()
    assert started(plan).config == SET_A


def test_a_refused_config_is_tried_again_when_its_set_has_changed_and_stands_still() -> None:
    plan = aiming(SET_A)
    plan.refused(started(plan, serving_with("nothing there")))
    assert plan.wanted_set == "/a"
    assert plan.next_step(serving_with("nothing there")) is None
    assert plan.next_step(ModelView(INT4, True, "half of it", set_settled=False)) is None
    attempt = started(plan, serving_with("all of it"))
    plan.refused(attempt)
    assert plan.next_step(serving_with("all of it")) is None
    plan.retry()
    plan.succeeded(started(plan))
    assert plan.wanted_set == ""


def test_a_refused_config_that_is_withdrawn_leaves_nothing_to_do() -> None:
    plan = aiming(SET_A, applied=PLAIN)
    plan.refused(started(plan))
    plan.aim(PLAIN)
    assert plan.next_step(SERVING) is None
    assert not plan.is_refused


def test_the_newest_content_is_tried_at_once_and_the_refusal_of_the_overtaken_one_means_nothing() -> None:
    plan = aiming(SET_A)
    first = started(plan)
    plan.aim(SET_B)
    second = started(plan)
    assert second.change == Change(parameters=SetReference(Path("/b")))
    plan.refused(first)
    assert plan.next_step(SERVING) is None
    plan.succeeded(second)
    assert (plan.applied, plan.is_refused, plan.next_step(SERVING)) == (SET_B, False, None)


def test_going_back_to_what_serves_overtakes_what_is_under_way() -> None:
    plan = aiming(SET_A, applied=PLAIN)
    first = started(plan)
    plan.aim(PLAIN)
    second = started(plan)
    assert second.change == Change(mode=INT8, parameters=SetReference(None))
    plan.refused(first)
    plan.succeeded(second)
    assert plan.applied == PLAIN


def test_a_plan_is_over_when_nothing_is_left_of_its_config() -> None:
    plan = aiming(PLAIN)
    attempt = started(plan)
    plan.aim(None)
    assert not plan.is_over  # the attempt may come in
    back = started(plan)
    plan.refused(attempt)
    plan.succeeded(back)
    assert plan.is_over


def test_an_older_attempt_that_comes_in_late_is_not_what_serves() -> None:
    plan = aiming(SET_A)
    first = started(plan)
    plan.aim(SET_B)
    plan.succeeded(started(plan))
    plan.succeeded(first)
    assert (plan.applied, plan.next_step(SERVING)) == (SET_B, None)


def test_when_the_newest_is_refused_the_older_one_may_still_come_in() -> None:
    plan = aiming(SET_A)
    first = started(plan)
    plan.aim(SET_B)
    plan.refused(started(plan))
    plan.succeeded(first)
    assert plan.applied == SET_A
    assert plan.is_refused
    assert plan.next_step(SERVING) is None


def test_another_way_to_treat_open_requests_is_no_change_by_itself() -> None:
    plan = aiming(QuantConfig("m", INT8, InFlight.FINISH), applied=PLAIN)
    assert plan.next_step(SERVING) is None
    assert plan.applied == QuantConfig("m", INT8, InFlight.FINISH)


CONFIGS = st.builds(
    QuantConfig,
    st.just("m"),
    precision=st.sampled_from([None, INT8]),
    params=st.sampled_from([None, SET_A.params, SET_B.params]),
    layers=st.sampled_from([(), (RULE,)]),
    monitor=st.sampled_from([{}, {"share": 1.0}]),
)


@given(CONFIGS, CONFIGS, CONFIGS)
def test_whichever_attempt_comes_in_first_the_newest_sets_all_that_it_changed(
    before: QuantConfig, first: QuantConfig, newest: QuantConfig
) -> None:
    """Whatever the model serves with when the change is made, it serves with `newest` and nothing else after it."""
    assume(before != first != newest)
    plan = aiming(first, applied=before)
    started(plan)
    plan.aim(newest)
    change = started(plan).change
    for serves in (before, first):
        needed = difference(serves, newest, INT4)
        assert change.mode == (needed.mode or change.mode)
        assert change.parameters == (needed.parameters or change.parameters)
        assert needed.layers in (None, change.layers)
        assert needed.monitor in (None, change.monitor)


@given(st.lists(st.tuples(st.sampled_from([None, PLAIN, SET_A, SET_B]), st.booleans()), min_size=1, max_size=8))
def test_whatever_the_order_the_model_ends_on_the_last_config(turns: list[tuple[QuantConfig | None, bool]]) -> None:
    plan, running = ModelPlan(), list[Attempt]()
    for desired, ends in turns:
        plan.aim(desired)
        step = plan.next_step(SERVING)
        if isinstance(step, Attempt):
            for overtaken in running:
                plan.refused(overtaken)
            running = [step]
        if ends and running:
            plan.succeeded(running.pop())
    for attempt in running:
        plan.succeeded(attempt)
    assert plan.next_step(SERVING) is None
    assert plan.applied == turns[-1][0]
