"""Drawing a plot must never fail, because a failure would prevent a release."""

from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("frauds", "known_scenarios", "champion"), [(1, False, False), (300, True, True)]
)
def test_all_plots_are_drawn_for_few_and_many_frauds(
    frauds: int, known_scenarios: bool, champion: bool, tmp_path: Path
):
    labels = np.zeros(2000, np.uint8)
    labels[:frauds] = 1
    if known_scenarios:
        scenarios = labels * (1 + np.arange(2000, dtype=np.uint8) % 3)
    else:
        scenarios = np.zeros_like(labels)

    scores = {"candidate": np.linspace(1, 0, 2000)}
    week = {"name": "2024-01-01", "candidate": {"ap": 0.5}}
    if champion:
        scores["champion"] = np.zeros(2000)
        week["champion"] = {"ap": 0.4}

    from steps.fraud.pictures import draw

    draw(tmp_path / "report", labels, scenarios, scores, [week])
    assert len(list((tmp_path / "report").glob("*.png"))) == 5
