"""Quant configs: what a file may say, how files of one model add up, and what changes from one to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dskd import quant_config
from dskd.engine.request import InFlight
from dskd.manager.types import Change, SetReference
from dskd.monitor.config import LoadConfig, LongContextConfig, MonitorConfig, ThresholdConfig
from dskd.monitor.states import Scope
from dskd.quant_config import ParamsConfig, QuantConfig, difference, merge, overridden, parse
from dskd.typed_toml import ConfigError
from dskquant.modes import PrecisionMode
from dskquant.scheme import LAYER_PRECISIONS, LayerRule

ETC = Path(__file__).parent.parent / "etc"
BASE = Path("/configs")
DIGEST = "0123456789abcdef" * 4
WHOLE = f"""
model = "smollm2"
precision = "int8"
in_flight = "finish"
[params]
file = "calibrated"
sha256 = "{DIGEST}"
[[layers]]
match = "*.down_proj.weight"
precision = "int8"
[[layers]]
match = "*.3.*"
precision = "int4"
[monitor]
scope = "request"
threshold.int4 = 0.3
"""

RULES = st.builds(LayerRule, st.sampled_from(["*", "a", "b.*"]), st.sampled_from(LAYER_PRECISIONS))
MONITORS = st.fixed_dictionaries(
    {},
    optional={
        "share": st.sampled_from([0.1, 0.2]),
        "threshold": st.fixed_dictionaries({}, optional={"int4": st.just(0.3), "int8": st.sampled_from([0.01, 0.02])}),
    },
)
CONFIGS = st.builds(
    QuantConfig,
    st.just("m"),
    st.none() | st.sampled_from(PrecisionMode),
    st.none() | st.sampled_from(InFlight),
    st.none() | st.builds(ParamsConfig, st.sampled_from([Path("/a"), Path("/b")]), st.sampled_from(["", DIGEST])),
    st.lists(RULES, max_size=3).map(tuple),
    MONITORS,
)


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.toml", BASE)
    return caught.value.problems


def outcome(text: str) -> QuantConfig | tuple[str, ...]:
    try:
        return parse(text, "x.toml", BASE)
    except ConfigError as error:
        return error.problems


def flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values of a table of tables by their dotted keys."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return values


def in_order(*configs: QuantConfig) -> list[tuple[str, QuantConfig]]:
    return [(f"{index:03}.toml", config) for index, config in enumerate(configs)]


def test_a_whole_file_is_understood() -> None:
    assert parse(WHOLE, "x.toml", BASE) == QuantConfig(
        "smollm2",
        PrecisionMode.INT8,
        InFlight.FINISH,
        ParamsConfig(BASE / "calibrated", DIGEST),
        (LayerRule("*.down_proj.weight", PrecisionMode.INT8), LayerRule("*.3.*", PrecisionMode.INT4)),
        {"scope": "request", "threshold": {"int4": 0.3}},
    )


def test_a_model_alone_is_a_config_that_changes_nothing() -> None:
    config = parse('model = "m"', "x.toml", BASE)
    assert config == QuantConfig("m")
    assert difference(None, config, PrecisionMode.INT4) == Change()


@pytest.mark.parametrize("path", sorted((ETC / "quant.d").iterdir()), ids=lambda path: path.name)
def test_every_example_is_a_config(path: Path) -> None:
    config = parse(path.read_text(encoding="utf-8"), path.name, path.parent)
    assert config.model == "smollm2"
    assert config.params is not None
    assert config.layers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "x.toml: model: is missing"),
        ('model = ""', "x.toml: model: the name of a model is needed"),
        ("model = 3", "x.toml: model = 3: allowed: a string"),
        ('model = "m"\nprecison = "int4"', "x.toml: precison: unknown key; did you mean 'precision'?"),
        (
            'model = "m"\n[noise]',
            "x.toml: noise: unknown key; known: in_flight, layers, model, monitor, params, precision",
        ),
        ('model = "m"\nmonitor = 3', "x.toml: monitor = 3: allowed: a table"),
        ('model = "m"\nmonitor.shar = 1', "x.toml: monitor.shar: unknown key; did you mean 'share'?"),
        ('model = "m"\nmonitor.scope = "all"', 'x.toml: monitor.scope = "all": allowed: "request", "model"'),
        (
            'model = "m"\nmonitor.threshold.int4 = -1',
            "x.toml: monitor.threshold.int4 = -1: allowed: 1e-06 to 1000000.0",
        ),
        (
            f'model = "m"\nmonitor.share = {"9" * 400}',
            f"x.toml: monitor.share = {'9' * 57}...: allowed: numbers of at most 64 bits",
        ),
        (
            f'model = "m"\nmonitor.window = 0x{"f" * 10_000}',
            "x.toml: monitor.window = a huge number: allowed: numbers of at most 64 bits",
        ),
        ('model = "m"\nmonitor.threshold = 1', "x.toml: monitor.threshold = 1: allowed: a table"),
        ('model = "m"\nmonitor.load.max_kl = "x"', 'x.toml: monitor.load.max_kl = "x": allowed: a number'),
        (
            'model = "m"\nprecision = "int5"',
            'x.toml: precision = "int5": allowed: "int4", "int8", "fp16", "fp32"',
        ),
        ('model = "m"\nin_flight = "drop"', 'x.toml: in_flight = "drop": allowed: "migrate", "finish"'),
        ('model = "m"\nparams = "set"', 'x.toml: params = "set": allowed: a table'),
        ('model = "m"\n[params]\nsha256 = ""', "x.toml: params.file: is missing"),
        ('model = "m"\n[params]\nfile = "a\\u0000b"', "x.toml: params.file: a path has no NUL"),
        (
            'model = "m"\n[params]\nfile = "a"\nsha256 = "12ab"',
            "x.toml: params.sha256: allowed: 64 hexadecimal digits in lower case",
        ),
        ('model = "m"\nlayers = {match = "*"}', "x.toml: layers = {'match': '*'}: allowed: a list"),
        ('model = "m"\nlayers = [{match = "*"}]', "x.toml: layers[0].precision: is missing"),
        (
            'model = "m"\nlayers = [{match = "*", precision = "fp16"}]',
            'x.toml: layers[0].precision = "fp16": allowed: "int4", "int8"',
        ),
        ('model = "m', "x.toml: Unterminated string (at end of document)"),
        ('model = "m"\nmodel = "n"\n', "x.toml: Cannot overwrite a value (at line 2, column 12)"),
    ],
)
def test_a_mistake_names_file_field_and_what_is_allowed(text: str, problem: str) -> None:
    assert problems_of(text) == (problem,)


def test_all_mistakes_of_a_file_are_told_together() -> None:
    text = 'precision = 4\nin_fligth = "finish"\n[params]\nfile = 1\n[[layers]]\nmatch = "*"\nprecision = "int2"'
    assert sorted(problems_of(text)) == [
        "x.toml: in_fligth: unknown key; did you mean 'in_flight'?",
        'x.toml: layers[0].precision = "int2": allowed: "int4", "int8"',
        "x.toml: model: is missing",
        "x.toml: params.file = 1: allowed: a path",
        'x.toml: precision = 4: allowed: "int4", "int8", "fp16", "fp32"',
    ]


def test_of_thousands_of_mistakes_the_first_are_told_and_the_others_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        parse('model = "m"\n' + "\n".join(f"k{number} = 1" for number in range(40_000)), "x.toml", BASE)
    assert [problem.split(":")[1] for problem in caught.value.problems] == [f" k{number}" for number in range(20)]
    assert caught.value.lines[-1] == "and 39980 more"


def test_deep_nesting_is_refused() -> None:
    assert "nested" in problems_of("a = " + "[" * 100_000)[0]
    assert problems_of('model = "m"\nprecision' + ".a" * 5_000 + " = 1")[0].startswith("x.toml: ")


def test_a_file_may_have_half_a_mebibyte_and_not_a_byte_more() -> None:
    text = 'model = "m"\n#'
    text += "\u00e9" * ((quant_config.MAX_BYTES - len(text)) // 2)  # two bytes each
    text += " " * (quant_config.MAX_BYTES - len(text.encode()))
    assert parse(text, "x.toml", BASE) == QuantConfig("m")
    assert problems_of(text + " ") == ("x.toml: has 524289 bytes; at most 512.0 KiB are allowed",)


def test_a_file_may_have_ten_thousand_layer_rules() -> None:
    rule = '[[layers]]\nmatch="*"\nprecision="int8"\n'
    text = 'model = "m"\n' + rule * 10_000
    assert len(parse(text, "x.toml", BASE).layers) == 10_000
    assert problems_of(text + rule) == ("x.toml: layers: 10001 rules; at most 10000 are allowed",)


@given(st.text(max_size=200) | st.text(alphabet='model="x[]{}.,\n#\\', max_size=200))
@settings(max_examples=300)
def test_any_text_is_a_config_or_has_named_problems(text: str) -> None:
    result = outcome(text)
    assert isinstance(result, QuantConfig) or (result and all(problem.startswith("x.toml: ") for problem in result))


@given(CONFIGS)
def test_a_table_is_read_back_as_the_same_config(config: QuantConfig) -> None:
    assert quant_config.from_table(quant_config.to_table(config), BASE) == config


@given(st.lists(CONFIGS, min_size=1, max_size=5))
def test_for_each_key_the_last_file_that_has_it_wins(configs: list[QuantConfig]) -> None:
    merged = merge(in_order(*configs))
    assert merged.precision == next((c.precision for c in reversed(configs) if c.precision), None)
    assert merged.in_flight == next((c.in_flight for c in reversed(configs) if c.in_flight), None)
    assert merged.params == next((c.params for c in reversed(configs) if c.params), None)
    assert merged.layers == tuple(rule for config in configs for rule in config.layers)
    assert flat(merged.monitor) == {key: value for config in configs for key, value in flat(config.monitor).items()}


@given(st.lists(CONFIGS, min_size=2, max_size=5), st.data())
def test_merging_is_associative(configs: list[QuantConfig], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(configs) - 1))
    halves = merge(in_order(*configs[:cut])), merge(in_order(*configs[cut:]))
    assert merge(in_order(*halves)) == merge(in_order(*configs))


@given(CONFIGS)
def test_a_file_that_says_nothing_changes_nothing(config: QuantConfig) -> None:
    nothing = QuantConfig("m")
    assert merge(in_order(config, nothing)) == merge(in_order(nothing, config)) == config


@given(st.lists(CONFIGS, min_size=1, max_size=5), st.data())
def test_files_are_merged_in_the_order_of_their_names(configs: list[QuantConfig], data: st.DataObject) -> None:
    named = in_order(*configs)
    assert merge(data.draw(st.permutations(named))) == merge(named)


def test_configs_of_two_models_are_never_merged() -> None:
    with pytest.raises(ValueError, match="one model"):
        merge(in_order(QuantConfig("a"), QuantConfig("b")))


def test_only_what_differs_is_changed() -> None:
    before = parse(WHOLE, "x.toml", BASE)
    after = parse(WHOLE.replace("calibrated", "better"), "x.toml", BASE)
    assert difference(before, after, PrecisionMode.INT4) == Change(
        parameters=SetReference(BASE / "better", DIGEST), in_flight=InFlight.FINISH
    )


def test_what_is_gone_is_taken_back() -> None:
    before = parse(WHOLE, "x.toml", BASE)
    assert difference(before, None, PrecisionMode.INT4) == Change(
        PrecisionMode.INT4, SetReference(None), (), monitor={}
    )


@given(CONFIGS, CONFIGS)
def test_a_change_leads_from_one_config_to_the_other(before: QuantConfig, after: QuantConfig) -> None:
    def served(config: QuantConfig, change: Change | None = None) -> tuple[object, ...]:
        reference = config.params.reference if config.params else SetReference(None)
        state = (config.precision or PrecisionMode.INT4, reference, config.layers, config.monitor)
        new = (change.mode, change.parameters, change.layers, change.monitor) if change else (None,) * 4
        return tuple(old if value is None else value for old, value in zip(state, new, strict=True))

    change = difference(before, after, PrecisionMode.INT4)
    assert served(before, change) == served(after)
    assert change.in_flight is (after.in_flight or InFlight.MIGRATE)
    nothing = Change(in_flight=change.in_flight)
    assert difference(after, after, PrecisionMode.INT4) == nothing


BASE_MONITOR = MonitorConfig(
    threshold=ThresholdConfig(int8=0.02),
    reference=PrecisionMode.FP32,
    max_dwell_s=3600.0,
    load=LoadConfig(PrecisionMode.INT4, 8, 0.5),
)


def test_only_the_keys_of_a_file_override_the_monitor_of_a_model() -> None:
    table = parse(WHOLE, "x.toml", BASE).monitor
    assert overridden(BASE_MONITOR, table) == replace(
        BASE_MONITOR, scope=Scope.REQUEST, threshold=ThresholdConfig(int4=0.3, int8=0.02)
    )


@pytest.mark.parametrize("base", [MonitorConfig(), BASE_MONITOR])
def test_no_keys_override_nothing(base: MonitorConfig) -> None:
    assert overridden(base, {}) == base


def test_keys_are_judged_together_with_those_they_do_not_override() -> None:
    table = parse('model = "m"\nmonitor.dwell_s = 1000', "x.toml", BASE).monitor
    assert overridden(BASE_MONITOR, table).dwell_s == 1000.0
    with pytest.raises(ConfigError, match=r"monitor\.max_dwell_s: 900\.0 must not be below dwell_s, 1000\.0"):
        overridden(MonitorConfig(), table)


def test_half_a_table_completes_what_is_there_and_is_refused_where_nothing_is() -> None:
    table = parse('model = "m"\nmonitor.load.queue = 3\nmonitor.long_context.tokens = 9', "x.toml", BASE).monitor
    with pytest.raises(ConfigError) as caught:
        overridden(BASE_MONITOR, table)
    assert caught.value.problems == ("monitor.long_context.mode: is missing",)
    whole = replace(BASE_MONITOR, long_context=LongContextConfig(1, PrecisionMode.INT8))
    assert overridden(whole, table) == replace(
        BASE_MONITOR,
        long_context=LongContextConfig(9, PrecisionMode.INT8),
        load=LoadConfig(PrecisionMode.INT4, 3, 0.5),
    )
