"""A worse model must not replace a better one, and the reason of the verdict must contain
figures."""

import json
import math
from typing import Any

import pytest

from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError
from rekindle.gate import Decision, Difference, Evaluation, Gate, Metric, check_bounds
from steps.evaluate import metrics_to_log

CHAMPION = ("3", "b" * 64)


METRICS = (Metric("ap"), Metric("auc"))
ERRORS = (Metric("rmse", better="lower", unit="kWh", digits=2),)


def decide_release(
    gate: Gate, evaluation: Evaluation, candidate: str, champion: Any, metrics: Any = METRICS
) -> Any:
    return Decision(gate, metrics, evaluation, candidate, champion).decide()


def make_evaluation(
    gap: tuple[float, float, float] | None = None, ap: float = 0.7, **more: object
) -> Evaluation:
    metrics = {"candidate": {"ap": ap, "auc": 0.9}}
    if gap:
        metrics["champion"] = {"ap": ap - gap[0], "auc": 0.9}
        more["difference"] = Difference("ap", *gap)
    return Evaluation(metrics, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gap", "decision", "words"),
    [
        (
            (0.02, 0.01, 0.03),
            "release",
            "better, and not by chance: ap 0.7000 against 0.6800 of the champion",
        ),
        ((0.02, -0.01, 0.05), "release", "not worse by more than gate.tolerance (0.01)"),
        ((-0.005, -0.02, 0.01), "release", "-0.0050, 95% interval -0.0200 to +0.0100"),
        ((-0.005, -0.008, -0.002), "keep", "worse, and not by chance"),
        ((-0.02, -0.06, 0.02), "keep", "worse by more than gate.tolerance (0.01)"),
        ((0.0, 0.0, 0.0), "release", "+0.0000"),
    ],
)
def test_only_an_equally_good_model_replaces_the_champion(
    gap: tuple[float, float, float], decision: str, words: str
):
    verdict, reason = decide_release(Gate(), make_evaluation(gap), "a" * 64, CHAMPION)
    assert verdict == decision
    assert words in reason


def test_the_first_model_is_released_if_it_is_good_enough():
    assert (
        decide_release(Gate(minimum={"ap": 0.7}), make_evaluation(), "a" * 64, None)[0] == "release"
    )
    decision, reason = decide_release(
        Gate(minimum={"ap": 0.71, "auc": 0.8}), make_evaluation(), "a" * 64, None
    )
    assert decision == "keep"
    assert reason == "The candidate does not meet the gate: ap 0.7000 < 0.71."


def test_a_candidate_below_the_minimum_is_not_released_even_if_the_champion_is_worse():
    assert (
        decide_release(
            Gate(minimum={"ap": 0.71}), make_evaluation((0.2, 0.1, 0.3)), "a" * 64, CHAMPION
        )[0]
        == "keep"
    )


def test_a_nan_metric_fails_a_minimum():
    assert (
        decide_release(Gate(minimum={"ap": 0.1}), make_evaluation(ap=float("nan")), "a" * 64, None)[
            0
        ]
        == "keep"
    )


def test_an_interval_that_is_unknown_is_null_in_the_verdict() -> None:
    given_evaluation = make_evaluation((0.02, math.nan, math.nan))
    decision = Decision(Gate(), METRICS, given_evaluation, "a" * 64, CHAMPION)
    verdict, reason = decision.decide()
    assert verdict == "keep"
    assert "nan" not in reason
    assert "ap is not a number in most draws of the bootstrap, so it has no interval" in reason
    difference = json.loads(to_json(decision.record(verdict, reason)))["difference"]
    assert difference == {"metric": "ap", "mean": 0.02, "low": None, "high": None}

    assert metrics_to_log(given_evaluation, "").keys() == {
        "ap",
        "auc",
        "champion_ap",
        "champion_auc",
        "ap_difference_mean",
    }


def test_a_family_without_a_finite_validation_is_named_in_the_reason() -> None:
    chosen = {
        "family": "trees",
        "by": "loss",
        "validation": {"trees": {"loss": 0.5}, "network": {"loss": None}},
    }
    given_evaluation = make_evaluation(chosen=chosen)
    _, reason = decide_release(Gate(minimum={"ap": 0.1}), given_evaluation, "a" * 64, None)
    assert "Validation chose the family trees by loss 0.5 (network not a number)." in reason
    assert metrics_to_log(given_evaluation, "").keys() == {"ap", "auc", "validation/trees/loss"}


def test_equal_weights_are_not_a_new_version():
    decision, reason = decide_release(
        Gate(minimum={"ap": 0.99}), make_evaluation(), CHAMPION[1], CHAMPION
    )
    assert decision == "same"
    assert "version 3" in reason


def test_the_reason_says_that_the_champion_cannot_be_scored():
    given_evaluation = make_evaluation(incomparable="its features are others.")
    decision, reason = decide_release(Gate(), given_evaluation, "a" * 64, CHAMPION)
    assert decision == "keep"
    assert "(version 3) cannot score this data: its features are others." in reason
    decision, reason = decide_release(
        Gate(minimum={"ap": 0.6}), given_evaluation, "a" * 64, CHAMPION
    )
    assert decision == "release"
    assert (
        "only the bounds of the gate decide, and the candidate meets them (ap 0.7000 >= 0.6)"
        in reason
    )


def test_the_reason_contains_the_warnings():
    _, reason = decide_release(
        Gate(), make_evaluation(warnings=["look for leakage."]), "a" * 64, None
    )
    assert reason.endswith("Warning: look for leakage.")


def test_an_unknown_metric_is_rejected_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r'gate\.minimum\.aup: .* Did you mean "ap"\? Metrics: ap, auc'
    ):
        decide_release(Gate(minimum={"aup": 0.5}), make_evaluation(), "a" * 64, None)


def test_without_bounds_the_first_model_is_not_released():
    decision, reason = decide_release(Gate(), make_evaluation(), "a" * 64, None)
    assert decision == "keep"
    assert "set gate.minimum or gate.maximum" in reason


@pytest.mark.parametrize(
    ("rmse", "bound", "decision"),
    [(2.4, 2.5, "release"), (2.6, 2.5, "keep"), (float("nan"), 2.5, "keep")],
)
def test_a_maximum_bounds_an_error_metric(rmse: float, bound: float, decision: str):
    judged = Evaluation({"candidate": {"rmse": rmse}})
    assert (
        decide_release(Gate(maximum={"rmse": bound}), judged, "a" * 64, None, ERRORS)[0] == decision
    )


@pytest.mark.parametrize(
    ("gap", "decision", "words"),
    [
        (
            (-0.2, -0.3, -0.1),
            "release",
            "better, and not by chance: rmse 2.00 kWh against 2.20 of the champion",
        ),
        ((0.2, 0.1, 0.3), "keep", "worse, and not by chance"),
        ((0.2, -0.1, 0.5), "keep", "worse by more than gate.tolerance"),
        ((float("nan"),) * 3, "keep", "cannot be compared"),
    ],
)
def test_where_lower_is_better_a_higher_error_does_not_win(gap: Any, decision: str, words: str):
    metrics = {"candidate": {"rmse": 2.0}, "champion": {"rmse": 2.0 - gap[0]}}
    judged = Evaluation(metrics, difference=Difference("rmse", *gap))
    verdict, reason = decide_release(Gate(), judged, "a" * 64, CHAMPION, ERRORS)
    assert verdict == decision
    assert words in reason


def test_an_unknown_direction_is_rejected():
    with pytest.raises(ConfigError, match='better is \'max\': it must be "higher" or "lower"'):
        Metric("f1", better="max")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (
            {"minimum": {"rmse": 3}, "maximum": {"rmse": 2.5}},
            "gate.minimum.rmse is 3 and gate.maximum.rmse is 2.5",
        ),
        (
            {"minimum": {"rmse": 3}},
            "gate.minimum.rmse without gate.maximum.rmse: lower is better for rmse",
        ),
        ({"maximum": {"rmse": 3}}, ""),
        ({"minimum": {"rmse": 1}, "maximum": {"rmse": 1}}, ""),
    ],
)
def test_bounds_that_no_good_model_can_meet_are_rejected(
    bounds: dict[str, Any], words: str
) -> None:
    if not words:
        return check_bounds(Gate(**bounds), ERRORS)
    with pytest.raises(ConfigError, match=words):
        check_bounds(Gate(**bounds), ERRORS)


def test_a_minimum_without_maximum_is_valid_if_higher_is_better() -> None:
    check_bounds(Gate(minimum={"ap": 0.5}), METRICS)
    with pytest.raises(
        ConfigError, match=r"gate.maximum.ap without gate.minimum.ap: higher is better"
    ):
        check_bounds(Gate(maximum={"ap": 0.5}), METRICS)


@pytest.mark.parametrize(
    ("gap", "decision", "words"),
    [
        ((0.02, 0.0, 0.05), "release", "not worse by more than"),
        ((-0.005, -0.02, 0.0), "release", "not worse by more than"),
        ((-0.01, -0.02, 0.01), "release", "not worse by more than"),
        ((-0.0101, -0.02, 0.01), "keep", "worse by more than"),
        ((0.02, float("-inf"), 0.05), "keep", "cannot be compared"),
        ((0.02, 0.01, float("nan")), "keep", "cannot be compared"),
    ],
)
def test_the_gate_decides_at_its_limits_as_documented(gap: Any, decision: str, words: str) -> None:
    verdict, reason = decide_release(Gate(), make_evaluation(gap), "a" * 64, CHAMPION)
    assert verdict == decision
    assert words in reason


@pytest.mark.parametrize(("rows", "warned"), [(49, True), (50, False)])
def test_the_reason_warns_of_fewer_than_half_of_the_champions_rows(rows: int, warned: bool) -> None:
    decision = Decision(
        Gate(),
        METRICS,
        make_evaluation((0.02, 0.01, 0.03), rows=rows),
        "a" * 64,
        CHAMPION,
        champion_rows=100,
    )
    note = f"Warning: {rows} rows were judged; the champion was released on 100."
    assert decision.decide()[1].endswith(note) == warned


def test_the_champions_weights_with_changed_code_are_released() -> None:
    decision = Decision(
        Gate(), METRICS, make_evaluation(), CHAMPION[1], CHAMPION, changed="steps/model.py"
    )
    text = (
        "The weights equal the champion's (version 3), but steps/model.py changed. The candidate"
        " meets the gate."
    )
    assert decision.decide() == ("release", text)

    decision = Decision(
        Gate(minimum={"ap": 0.6, "auc": 0.9}),
        METRICS,
        make_evaluation(),
        CHAMPION[1],
        CHAMPION,
        changed="serve",
    )

    assert decision.decide()[1].endswith(
        "The candidate meets the gate (ap 0.7000 >= 0.6, auc 0.9000 >= 0.9)."
    )
    decision = Decision(
        Gate(minimum={"ap": 0.8}),
        METRICS,
        make_evaluation(),
        CHAMPION[1],
        CHAMPION,
        changed="serve",
    )
    assert decision.decide()[0] == "keep"


def test_the_reason_contains_the_baseline() -> None:
    judged = Evaluation({"candidate": {"ap": 0.7}, "baseline": {"ap": 0.5, "auc": 0.1}})
    assert decide_release(Gate(minimum={"ap": 0.6}), judged, "a" * 64, None)[1].endswith(
        "The baseline has ap 0.5000."
    )
    judged = Evaluation({"candidate": {"ap": 0.7}, "baseline": {"auc": 0.1}})
    assert "baseline" not in decide_release(Gate(minimum={"ap": 0.6}), judged, "a" * 64, None)[1]


@pytest.mark.parametrize(
    ("interval", "margin", "verdict", "words"),
    [
        ((0.05, 0.02, 0.08), 0.03, "release", "better than the baseline by 0.0500 ap >= 0.03"),
        (
            (0.05, -0.01, 0.11),
            0.03,
            "keep",
            "its advantage over the baseline may be chance: +0.0500, 95% interval",
        ),
        (
            (0.02, 0.01, 0.03),
            0.03,
            "keep",
            "its advantage over the baseline is less than gate.beats_baseline (0.03):",
        ),
        (
            (-0.05, -0.08, -0.02),
            0.0,
            "release",
            "the candidate minus the baseline is -0.0500, 95% interval -0.0800",
        ),
        ((float("nan"),) * 3, 0.03, "keep", "its advantage over the baseline is less than"),
        (None, 0.03, "keep", "gate.beats_baseline is set, but the test rows have no baseline"),
    ],
)
def test_a_required_advantage_over_the_baseline_must_be_large_enough_and_significant(
    interval: tuple[float, float, float] | None, margin: float, verdict: str, words: str
) -> None:
    metrics = {"candidate": {"ap": 0.7}} | ({"baseline": {"ap": 0.65}} if interval else {})
    judged = Evaluation(
        metrics, baseline_difference=Difference("ap", *interval) if interval else None
    )
    gate = Gate(minimum={"ap": 0.1}, beats_baseline=margin)
    found, reason = decide_release(gate, judged, "a" * 64, None)
    assert found == verdict, reason
    assert words in reason, reason


def test_the_advantage_counts_in_the_direction_of_the_metric_and_is_a_bound_for_a_first_model() -> (
    None
):
    judged = Evaluation(
        {"candidate": {"rmse": 2.0}, "baseline": {"rmse": 3.0}},
        baseline_difference=Difference("rmse", -1, -1.5, -0.5),
    )
    gate = Gate(beats_baseline=0.5)
    assert decide_release(gate, judged, "a" * 64, None, ERRORS)[0] == "release"
    assert decide_release(Gate(beats_baseline=1.5), judged, "a" * 64, None, ERRORS)[0] == "keep"


def test_the_reason_names_the_chosen_family_and_the_other_families() -> None:
    chosen = {
        "family": "trees",
        "by": "loss",
        "validation": {"trees": {"loss": 0.25}, "network": {"loss": 0.5}},
    }
    judged = Evaluation({"candidate": {"ap": 0.7}}, chosen=chosen)
    assert decide_release(Gate(minimum={"ap": 0.6}), judged, "a" * 64, None)[1].endswith(
        "Validation chose the family trees by loss 0.25 (network 0.5)."
    )


def test_the_record_contains_the_evidence_of_the_verdict() -> None:
    judged = make_evaluation((0.5, 0.25, 0.75), rows=8, parts=[{"name": "w1"}], warnings=["few"])
    record = Decision(Gate(minimum={"ap": 0.6}), METRICS, judged, "a" * 64, CHAMPION).record(
        "release", "why"
    )
    kind = {"better": "higher", "unit": "", "digits": 4}

    assert record == {
        "verdict": "release",
        "reason": "why",
        "metrics": [{"name": "ap", **kind}, {"name": "auc", **kind}],
        "rows": 8,
        "candidate": {"sha256": "a" * 64, "ap": 0.7, "auc": 0.9},
        "champion": {"version": "3", "sha256": "b" * 64, "ap": pytest.approx(0.2), "auc": 0.9},
        "baseline": None,
        "difference": {"metric": "ap", "mean": 0.5, "low": 0.25, "high": 0.75},
        "baseline_difference": None,
        "chosen": None,
        "parts": [{"name": "w1"}],
        "warnings": ["few"],
        "gate": {
            "minimum": {"ap": 0.6},
            "maximum": {},
            "tolerance": 0.01,
            "beats_baseline": 0.0,
            "confidence": 0.95,
            "resamples": 300,
        },
    }

    lone_decision = Decision(
        Gate(), METRICS, Evaluation({"candidate": {"ap": 0.7}}), "a" * 64, None
    )
    record = lone_decision.record("keep", "why")
    assert record["champion"] is None
    assert record["difference"] is None
    assert record["rows"] == 0
    assert "Warning" not in lone_decision.decide()[1]


def test_a_value_equal_to_its_bound_meets_it() -> None:
    assert (
        decide_release(Gate(minimum={"ap": 0.7}), make_evaluation(), "a" * 64, None)[0] == "release"
    )
    judged = Evaluation({"candidate": {"rmse": 2.5}})
    assert (
        decide_release(Gate(maximum={"rmse": 2.5}), judged, "a" * 64, None, ERRORS)[0] == "release"
    )


def test_a_metric_that_was_not_computed_keeps_the_champion() -> None:
    decision, reason = decide_release(
        Gate(minimum={"ap": 0.1, "auc": 0.1}), Evaluation({"candidate": {"ap": 0.5}}), "a", None
    )
    assert decision == "keep"
    assert "auc nan is not a number, must be >= 0.1" in reason


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("tolerance", (0.0, -0.001), (9.0,)),
        ("confidence", (0.501, 0.5), (0.999, 1.0)),
        ("resamples", (50, 49), (10_000, 10_001)),
    ],
)
def test_invalid_gate_settings_are_rejected(
    name: str, least: tuple[Any, ...], most: tuple[Any, ...]
) -> None:
    for accepted, *refused in (least, most):
        assert getattr(Gate(**{name: accepted}), name) == accepted
        for value in refused:
            with pytest.raises(ValueError, match=name):
                Gate(**{name: value})
