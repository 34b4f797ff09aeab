"""`lint` does not warn of a default that the user did not choose."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle.cli import commands

CONFIG = """
name: demo
workload: steps.digits
data: {source: sklearn://digits}
train: {validation: 0.1}
"""


@pytest.mark.parametrize(
    ("image", "count"), [("", 0), ("cluster: {image: 'registry.example.com/own:1'}", 1)]
)
def test_only_a_chosen_image_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, count: int
) -> None:
    monkeypatch.setattr(
        "rekindle.training.rehearsal.check_trainable", lambda config, scheduled: None
    )
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG + image)
    result = CliRunner().invoke(commands, ["lint", str(file)])
    assert result.exit_code == 0, result.output
    assert result.output.count("can change, as the tag") == count, result.output
