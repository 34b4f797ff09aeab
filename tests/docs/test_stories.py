"""Run all commands of some pages, in the order of the page, with little data."""

import ast
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from rekindle import tracking
from tests.commands import (
    DOCUMENTS,
    README,
    RECIPES,
    ROOT,
    list_blocks,
    list_commands,
    open_shell,
    typed_by_hand,
    write_files,
)
from tests.docs.pictures import OVERVIEW, draw_overview
from tests.ports import free_port

TRACKING = ROOT / "docs/tracking.md"
SURVIVING = ROOT / "docs/surviving.md"
MODEL = ROOT / "docs/your-own-model.md"
PIPELINE = ROOT / "docs/your-own-pipeline.md"
PROGRAM = ROOT / "docs/your-own-program.md"
ARGOLOCAL = ROOT / "docs/argolocal.md"
CACHE_PAGE, COST_PAGE, TIME_PAGE, SHARED_PAGE = (
    ROOT / f"docs/{name}.md" for name in ("cache", "cost", "time", "shared-clusters")
)
AFTER_RELEASE_PAGE = ROOT / "docs/after-release.md"
SERVING = ROOT / "docs/serving.md"
TYPED_BLOCKS = {
    AFTER_RELEASE_PAGE,
    SERVING,
    ARGOLOCAL,
    README,
    TRACKING,
    CACHE_PAGE,
    COST_PAGE,
    TIME_PAGE,
    SHARED_PAGE,
    SURVIVING,
    MODEL,
    PIPELINE,
    PROGRAM,
    # tests/docs/test_one_machine.py
    ROOT / "docs/one-machine.md",
}
WORLD = "simulate://7?cards=150&terminals=300&days=70"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_all_commands_of_a_page_are_tested(document: Path) -> None:
    assert document in TYPED_BLOCKS or typed_by_hand(document) == []


def test_make_targets_match_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target, recipe in RECIPES.items():
        (command,) = re.findall(rf"^{target.split()[1]}: install\n\t@(.*)$", makefile, re.MULTILINE)
        assert recipe in command
        assert f"`{target}`" in README.read_text() or target in list_commands(README)
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_page_of_argolocal_works_without_a_training(tmp_path: Path) -> None:
    write_files(ARGOLOCAL, tmp_path)
    with open_shell(tmp_path) as run_command:
        results = {command: run_command(command) for command in typed_by_hand(ARGOLOCAL)}
        assert {completed.returncode for completed in results.values()} == {0}, results
    assert "hello reader" in results["argolocal logs"].stdout
    assert not (tmp_path / ".rekindle").exists()


@pytest.mark.slow
# this test executes several whole runs
@pytest.mark.timeout(600)
def test_all_commands_of_the_readme_work(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (notebook,) = list_blocks(TRACKING, "python")
    (tmp_path / "notebook.py").write_text(
        f"{notebook.text}\nprint(model.predict(model.input_example))"
    )

    with open_shell(tmp_path) as run_command:
        for command in [
            command
            for page in (README, SURVIVING, TRACKING, CACHE_PAGE, COST_PAGE, AFTER_RELEASE_PAGE)
            for command in typed_by_hand(page)
        ]:
            completed = run_command(
                RECIPES.get(command, command).replace("jupyter lab", "python notebook.py")
            )
            expected_code = 10 if command.startswith("rekindle plan") else 0
            assert completed.returncode == expected_code, (
                f"{command}\n{completed.stdout}{completed.stderr}"
            )

            if command.startswith("rekindle run configs/demo.yaml --set"):
                assert "same" in completed.stdout
                assert ("train-transformer succeeded" in completed.stdout) == (
                    "--no-cache" in command
                )


@pytest.mark.slow
@pytest.mark.timeout(600)  # three runs
def test_backfill_works_as_documented(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    world = "simulate://7?cards=150&terminals=300&days=91"

    small_data = {
        "REKINDLE_DATA__SOURCE": world,
        "REKINDLE_TRAIN__EPOCHS": "1",
        "REKINDLE_GATE__MINIMUM": "{auc: 0.01}",
    }
    with open_shell(tmp_path, **small_data) as run_command:
        run, backfill = typed_by_hand(TIME_PAGE)
        completed = run_command(run)
        assert completed.returncode == 0, f"{completed.stdout}{completed.stderr}"
        tables = [run_command(backfill), run_command(backfill)]
        assert [table.returncode for table in tables] == [0, 0], tables
        weeks = [
            re.findall(r"^(2024-03-\d\d)T.* Succeeded +(\w+) .*$", table.stdout, re.MULTILINE)
            for table in tables
        ]
        assert [week for week, _ in weeks[0]] == ["2024-03-18", "2024-03-25"]
        assert weeks[1] == weeks[0]
        assert "Served" not in tables[0].stdout
        assert "version 2" not in run_command("rekindle status").stdout


@pytest.mark.slow
# this test executes five runs, two of which train a model
@pytest.mark.timeout(600)
def test_a_source_without_new_rows_is_trained_on_once(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    for page in (MODEL, TIME_PAGE):
        write_files(page, tmp_path)

    write_power_data(tmp_path, 800)
    rows = (tmp_path / "power.csv").read_text().splitlines()
    # the last day is 2024-04-10
    days = [f"2024-{3 + day // 28:02}-{1 + day % 28:02}T00:00:00+00:00" for day in range(38)]
    timed_rows = [f"{days[index * 38 // 800]},{row}" for index, row in enumerate(rows[1:])]
    (tmp_path / "power.csv").write_text("\n".join([f"time,{rows[0]}", *timed_rows]))

    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as run_command:
        changed_seed = "--set train.seed=2"
        weeks = {
            "04-15": "",
            "04-22": "",
            "04-29": "",
            "05-06": changed_seed,
            "05-13": changed_seed,
        }
        outcomes = {}

        for day, settings in weeks.items():
            command = (
                f"rekindle run power.yaml --set workload=metered --set name=metered {settings}"
            )
            completed = run_command(f"{command} -p scheduled-time=2024-{day}T03:00:00Z -o json")
            assert completed.returncode in (0, 3), f"{completed.stdout}{completed.stderr}"
            result = json.loads(completed.stdout)
            phases = {step["name"]: step["phase"] for step in result["steps"]}
            outcomes[day] = phases["train"], completed.returncode

            if phases["train"] == "Omitted":
                assert result["verdict"] == "same"
                assert "does not contain rows after 2024-04-10" in result["reason"]
                assert tracking.read_tags(result["run_id"])["reason"] == result["reason"]
            elif settings:
                assert any(
                    "train.seed changed: this run trains." in text for text in result["warnings"]
                )

        trained = {day for day, (phase, _) in outcomes.items() if phase == "Succeeded"}
        assert trained == {"04-15", "05-06"}
        assert {code for day, (_, code) in outcomes.items() if day not in trained} == {0}


@pytest.mark.slow
@pytest.mark.timeout(600)  # two runs
def test_extra_workers_do_not_change_the_weights_as_documented(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    small_data = {
        "REKINDLE_DATA__SOURCE": WORLD,
        "REKINDLE_TRAIN__EPOCHS": "1",
        "REKINDLE_GATE__MINIMUM": "{auc: 0.01}",
    }
    with open_shell(tmp_path, **small_data) as run_command:
        (command,) = typed_by_hand(SHARED_PAGE)
        runs = [
            json.loads(run_command(f"{run} -o json").stdout)
            for run in (command, "rekindle run configs/demo.yaml --no-cache")
        ]
        assert runs[0]["model_sha256"] == runs[1]["model_sha256"]
        explanation = run_command(f"rekindle explain {runs[0]['workflow']}").stdout
        assert re.search(r"[234] workers trained", explanation), explanation
        pods = run_command("ps -eo args").stdout
        assert f"deployments/{runs[0]['workflow']}-train" not in pods, "they end with the training"


@pytest.mark.slow
@pytest.mark.timeout(600)  # two runs
def test_model_servers_need_a_token_as_documented(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with open_shell(tmp_path) as run_command:
        run, request = typed_by_hand(SERVING)
        completed = run_command(run)
        assert completed.returncode == 0, f"{completed.stdout}{completed.stderr}"
        (endpoint,) = re.findall(r"^endpoint +(.*)$", completed.stdout, re.MULTILINE)
        (trial,) = re.findall(r"^try it +(.*)$", completed.stdout, re.MULTILINE)
        assert "instances" in json.loads(
            run_command(request.replace("127.0.0.1:8080", endpoint)).stdout
        )
        status = f"curl -s -o answer -w '%{{http_code}}' {endpoint}/v1/models/digits"
        headers = "", "-H 'Authorization: Bearer wrong'", "-H @.rekindle/services/authorization"

        for command in (
            f"{run} --set train.seed=2 --set gate.tolerance=1",
            "rekindle rollback digits",
            "rekindle status",
        ):
            assert "predictions" in json.loads(run_command(trial).stdout)
            assert [run_command(f"{status} {header}").stdout for header in headers] == [
                "401",
                "401",
                "200",
            ]
            completed = run_command(command)
            assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"


def test_the_pipeline_in_the_readme_equals_the_module_of_the_pipeline() -> None:
    (shown_block,) = list_blocks(README, "python")
    bodies = [
        ast.parse(text).body[-1]
        for text in (shown_block.text, (ROOT / "pipelines/training.py").read_text())
    ]
    with_blocks = [
        function.body[-2:] for function in bodies if isinstance(function, ast.FunctionDef)
    ]
    assert [ast.unparse(node) for node in with_blocks[0]] == [
        ast.unparse(node) for node in with_blocks[1]
    ]


def test_the_overview_picture_is_up_to_date() -> None:
    assert OVERVIEW.read_text() == draw_overview(), "python -m tests.docs.pictures overview"


def write_power_data(folder: Path, rows: int) -> None:
    """Write the data of docs/your-own-model.md: the consumption of power falls with the
    temperature."""
    rng = np.random.default_rng(0)
    hours = rng.integers(0, 24, rows)
    degrees = rng.normal(10, 8, rows)
    kwh = 40 - degrees + 5 * np.cos(hours / 24 * 2 * np.pi) + rng.normal(0, 1, rows)
    lines = [
        f"{hour},{degree:.1f},{write_power_data:.2f}"
        for hour, degree, write_power_data in zip(hours, degrees, kwh, strict=True)
    ]
    (folder / "power.csv").write_text("\n".join(["hour,temperature,kwh", *lines]))


@pytest.mark.slow
# this test executes several whole runs
@pytest.mark.timeout(600)
def test_the_page_your_own_model_works_as_documented(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    write_files(MODEL, tmp_path)
    write_power_data(tmp_path, 2000)
    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as run_command:
        runs = [run_command(command) for command in typed_by_hand(MODEL)]
        assert [run.returncode for run in runs] == [0] * len(runs), runs
        (endpoint,) = re.findall(r"^endpoint +(.*)$", runs[-1].stdout, re.MULTILINE)
        (request,) = [command for block in list_blocks(MODEL, "sh") for command in block.commands]
        answer = run_command(request.replace("http://127.0.0.1:8080", endpoint)).stdout
        assert 40 < json.loads(answer)["predictions"][0] < 55


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_your_own_pipeline_works_as_documented(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    write_files(MODEL, tmp_path)
    write_files(PIPELINE, tmp_path)
    write_power_data(tmp_path, 800)

    with open_shell(tmp_path, **s3_environment, MLFLOW_TRACKING_URI=mlflow_server) as run_command:
        lint_of_the_module = (
            "rekindle lint nightly.py --set workload=power --set data.source=power.csv"
        )
        for command in [*typed_by_hand(PIPELINE), lint_of_the_module]:
            completed = run_command(command)
            assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"

            if "rekindle run" in command:
                assert re.search(
                    r"released: nightly@1 \(judge-(small|wide)\)\n", completed.stdout
                ), completed.stdout
                assert "notify succeeded" in completed.stdout
                assert "card succeeded" in completed.stdout
                run = json.loads(run_command("rekindle status -o json").stdout)["runs"][0]["run"]
                tags = tracking.read_tags(tracking.find_run("nightly", run) or "")

                assert {
                    "judge-small/verdict",
                    "judge-wide/verdict",
                    "train-wide/rekindle.device",
                } <= tags.keys()

                assert "verdict" not in tags


@pytest.mark.slow
# this test executes four runs with a training
@pytest.mark.timeout(900)
def test_the_programs_of_the_page_run_to_a_served_model(tmp_path: Path) -> None:
    write_files(PROGRAM, tmp_path)
    shutil.copy(ROOT / "template/data/power.csv", tmp_path)
    for name in ("lightning", "fsdp"):
        config = (tmp_path / "power_huggingface.yaml").read_text()
        (tmp_path / f"power_{name}.yaml").write_text(config.replace("huggingface", name))

    with open_shell(tmp_path) as run_command:
        other_commands = [
            f"rekindle run power_{name}.yaml --set serve.port={free_port()}"
            for name in ("huggingface", "lightning", "fsdp")
        ]
        for command in [*typed_by_hand(PROGRAM), *other_commands]:
            completed = run_command(command)
            assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
            assert (
                "continued after SIGKILL" in completed.stdout
                or "release: released" in completed.stdout
            )
