"""The metrics of a run come from a step, which may be any program; no value of a metric makes a
command fail."""

import pytest

from rekindle.operations import results


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"auc": 0.5, "rows": 3, "name": "x", "none": null}', {"auc": 0.5, "rows": 3.0}),
        ('{"auc": NaN}', {"auc": None}),
        (f'{{"auc": 1{"0" * 400}}}', {"auc": None}),
        (f'{{"auc": {"9" * 5000}}}', {"auc": None}),
        ("[" * 100_000, {}),
        ("[5]", {}),
    ],
)
def test_any_metrics_are_read(text: str, expected: dict[str, float | None]) -> None:
    assert results.parse_metrics({"metrics": text}) == expected
