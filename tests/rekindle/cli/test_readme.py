"""Every command block of the README, run as a reader would run it, in a small world."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.commands import ROOT, blocks, commands, shell, write_files

README = ROOT / "README.md"
WORLD = "simulate://7?cards=150&terminals=300&days=70"
RECIPES = {  # what `make` runs; the tests cannot run themselves
    "make run": "rekindle run configs/demo.yaml",
    "make test": "python -m pytest -n 4",
}


def test_make_does_what_the_readme_says():
    makefile = (ROOT / "Makefile").read_text()
    for target, recipe in RECIPES.items():
        (command,) = re.findall(rf"^{target.split()[1]}: install\n\t@(.*)$", makefile, re.MULTILINE)
        assert recipe in command
        assert target in commands(README)
    assert "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.timeout(600)  # several whole runs
def test_every_command_of_the_readme_works(tmp_path: Path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    write_files(README, tmp_path)
    small = {"REKINDLE_DATA__SOURCE": WORLD, "REKINDLE_TRAIN__EPOCHS": "1", "REKINDLE_GATE__MINIMUM": "{auc: 0.01}"}
    with shell(tmp_path, **small) as typed:
        for command in commands(README):
            # see RECIPES, test_end_to_end.py, test_demo.py
            if command in ("make test", "rekindle run mine.yaml", "rekindle demo chaos"):
                continue
            done = typed(RECIPES.get(command, command))
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            if command == "make run":
                (trial,) = re.findall(r"^try it +(.*)$", done.stdout, re.MULTILINE)
                (score,) = json.loads(typed(trial).stdout)["predictions"]
                assert 0 < score < 1
            if command.startswith("rekindle run configs/demo.yaml --set"):
                assert "same" in done.stdout


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_folders_that_contributors_are_sent_to_are_there():
    folders = "rekindle|steps|pipelines|images|tests|docs"
    for path in re.findall(rf"`((?:{folders})/[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text()):
        assert (ROOT / path.replace("STEP", "prepare")).exists(), path


@pytest.mark.timeout(600)
def test_every_command_of_the_cluster_document_is_one(tmp_path: Path):
    """Commands that need no cluster are run; the others only have to accept their arguments."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    lines = "".join(blocks(ROOT / "docs/cluster.md", "sh")).replace("\\\n", "").splitlines()
    typed = [line.partition(" | ")[0] for line in lines if line.startswith("rekindle ")]
    offline = [line for line in typed if line.startswith(("rekindle platform render", "rekindle lint"))]
    assert len(typed) > 12 and len(offline) == 4
    with shell(tmp_path) as run:
        for command in typed:
            done = run(command if command in offline else f"{command} --help")
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(600)  # several whole runs
def test_your_own_model_runs_as_the_document_says(tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str):
    import numpy as np

    document = ROOT / "docs/your-own-model.md"
    write_files(document, tmp_path)
    rng = np.random.default_rng(0)
    hours, degrees = rng.integers(0, 24, 2000), rng.normal(10, 8, 2000)
    kwh = 40 - degrees + 5 * np.cos(hours / 24 * 2 * np.pi) + rng.normal(0, 1, 2000)
    lines = [f"{hour},{degree:.1f},{power:.2f}" for hour, degree, power in zip(hours, degrees, kwh, strict=True)]
    (tmp_path / "power.csv").write_text("\n".join(["hour,temperature,kwh", *lines]))
    with shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as typed:
        runs = [typed(command) for command in commands(document)]
        assert [run.returncode for run in runs] == [0] * len(runs), runs
        (endpoint,) = re.findall(r"^endpoint +(.*)$", runs[-1].stdout, re.MULTILINE)
        request = "".join(blocks(document, "sh")).strip().replace("http://127.0.0.1:8080", endpoint)
        assert 40 < json.loads(typed(request).stdout)["predictions"][0] < 55
    assert blocks(document, "python")


@pytest.mark.timeout(600)
def test_your_own_pipeline_runs_as_the_document_says(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
):
    import numpy as np

    document = ROOT / "docs/your-own-pipeline.md"
    write_files(ROOT / "docs/your-own-model.md", tmp_path)
    write_files(document, tmp_path)
    rng = np.random.default_rng(0)
    rows = [f"{hour},{10 + hour / 4:.1f},{40 - hour:.2f}" for hour in rng.integers(0, 24, 800)]
    (tmp_path / "power.csv").write_text("\n".join(["hour,temperature,kwh", *rows]))
    with shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as typed:
        itself = "rekindle lint nightly.py --set workload=power --set data.source=power.csv"
        for command in [*commands(document), itself]:
            done = typed(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            if "rekindle run" in command:
                assert re.search(r"released: release(-2)? 1\n", done.stdout), done.stdout
                assert "notify succeeded" in done.stdout and "card succeeded" in done.stdout
        wrong = (tmp_path / "nightly.py").read_text().replace("small.outputs.metrics", "small.outputs.metric", 1)
        (tmp_path / "nightly.py").write_text(wrong)
        done = typed("rekindle lint nightly.yaml")
        assert re.search(
            r'nightly\.py:\d+: evaluate-small has no output "metric"\. Did you mean "metrics"', done.stderr
        )
