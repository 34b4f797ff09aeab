"""Configs are read completely: no setting is silently ignored, and every error names the key and
the rule."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rekindle import project
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.recorded_secrets import PASSWORD_URL
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from tests.effort import count_calls
from tests.kinds import pod_specs

SMALL_CONFIG = {
    "name": "demo",
    "workload": "steps.fraud",
    "families": ["transformer"],
    "data": {"source": "simulate://7"},
}


def write(path: Path, values: Any) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_each_source_of_settings_overrides_the_previous_one_and_is_named_as_origin(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "c.yaml", SMALL_CONFIG | {"train": {"workers": 2, "seed": 5}})
    environment = {"REKINDLE_TRAIN__WORKERS": "3", "REKINDLE_HOME": "/elsewhere"}
    loaded = load_config(file, ["train.workers=4"], environment)
    rows = {path: (value, origin) for path, value, origin in loaded.rows()}
    assert rows["train.workers"] == (4, "--set train.workers=4")
    assert rows["train.seed"] == (5, str(file))
    assert rows["train.threads"][1] == "default"
    loaded = load_config(file, [], environment)
    assert loaded.config.train.workers == 3


def test_pods_are_shown_with_the_values_that_are_rendered(tmp_path: Path) -> None:
    pods = {"train": {"preset": "gke-spot", "memory": "16Gi"}, "deploy": {"cpu": "3"}}
    file = write(tmp_path / "c.yaml", SMALL_CONFIG | {"cluster": {"image": "ours:1", "pods": pods}})
    loaded = load_config(file, [], {})
    rows = {path: (value, origin) for path, value, origin in loaded.rows()}
    assert rows["cluster.pods.train.memory"] == ("16Gi", str(file))
    assert rows["cluster.pods.train.grace_seconds"] == (15, "preset gke-spot")
    assert rows["cluster.pods.train.node_selector.cloud.google.com/gke-spot"] == (
        "true",
        "preset gke-spot",
    )
    assert rows["cluster.pods.train.deadline_minutes"] == (
        1440,
        "default",
    ), "not the default of other pods"
    assert rows["cluster.pods.coordinator.avoid.cloud.google.com/gke-spot"] == (
        "true",
        "cluster.pods.train",
    )
    assert rows["cluster.pods.prepare.image"] == ("ours:1", "cluster.image")
    assert rows["cluster.pods.deploy.cpu"] == ("3", str(file))

    assert {path.split(".")[2] for path in rows if path.startswith("cluster.pods.")} >= {
        "executor",
        "serve",
        "verify",
    }


@pytest.mark.parametrize(
    ("values", "sets", "words"),
    [
        (SMALL_CONFIG | {"trian": {}}, [], ["trian is not a known key", 'Did you mean "train"?']),
        (
            SMALL_CONFIG | {"train": {"worker": 3}},
            [],
            ["train.worker is not", 'Did you mean "workers"?'],
        ),
        (SMALL_CONFIG, ["train.workrs=3"], ["--set train.workrs=3", 'Did you mean "workers"?']),
        (SMALL_CONFIG, ["train.workers=many"], ["train.workers is 'many'", "integer"]),
        (SMALL_CONFIG, ["train.workers"], ["must be KEY=VALUE"]),
        (
            SMALL_CONFIG,
            ["cluster.pods.train.gpuz=1"],
            ["cluster.pods.train.gpuz is not", 'Did you mean "gpus"?'],
        ),
        (SMALL_CONFIG, ["serve.min_replicas=9"], ["min_replicas is 9", "max_replicas (4)"]),
        (SMALL_CONFIG, ["name.x=1"], ["name", "cannot have keys below"]),
        (
            SMALL_CONFIG,
            ["train.virtual_workers=2", "train.workers=3"],
            ["train.virtual_workers (2)"],
        ),
        (SMALL_CONFIG, ["train.patience=3"], ["train.patience is 3: it needs a validation loss"]),
        (SMALL_CONFIG, ["train.validation=2"], ["train.validation is '2': it must be a share"]),
        (
            SMALL_CONFIG,
            ["train.validation=workload"],
            ["but steps.fraud does not define a validation split"],
        ),
        ({"name": "demo", "workload": "steps.fraud"}, [], ["data is missing"]),
        ({"name": "demo"}, [], ["workload is missing"]),
        (SMALL_CONFIG | {"data": None}, [], ["data"]),
        (SMALL_CONFIG | {"name": "Not A Name"}, [], ["name is 'Not A Name'"]),
        (SMALL_CONFIG | {"workload": "no.such"}, [], ['workload "no.such" cannot be imported']),
        ("- a\n- b\n", [], ["must be a mapping"]),
        ("a: [1", [], ["is not YAML"]),
        ("", [], ["must be a mapping"]),
        ({"apiVersion": "argoproj.io/v1alpha1"}, [], ["--manifest"]),
        (
            "name: a\ntrain: {workers: 2}\ntrain: {epochs: 3}\n",
            [],
            ['the key "train" is duplicated', "line 3"],
        ),
        (SMALL_CONFIG, ["train.learning_rate=.inf"], ["train.learning_rate is '.inf'", "number"]),
        (SMALL_CONFIG, ["train.learning_rate=1e400"], ["train.learning_rate is '1e400'", "finite"]),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefgh")),
            [],
            ["aliases"],
        ),
    ],
)
def test_an_error_in_a_config_names_file_key_and_rule(
    tmp_path: Path, values: Any, sets: list[str], words: list[str]
) -> None:
    file = write(tmp_path / "c.yaml", values)
    with pytest.raises(ConfigError) as caught:
        load_config(file, sets, {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


# wrong setting, as key=VALUE with the value in YAML → (beginning of the error message after the
# file's name, a word of the rest of the message)
WRONG_SETTINGS = {
    "train.workers=0": ("train.workers is 0: ", "greater than or equal to 1"),
    "train.workers=2.5": ("train.workers is 2.5: ", "integer"),
    "train.workers=true": ("train.workers is True: it must be a number, not true or false.", ""),
    "train.workers=": ("train.workers is None: ", "integer"),
    "train.workers=[1]": ("train.workers is [1]: ", "integer"),
    "train.max_workers=99": (
        "train: train.max_workers is 99: it must be at most train.virtual_workers (8).",
        "Lower it",
    ),
    "train.min_workers=5": (
        "train: train.workers is 2: it must lie between train.min_workers (5)",
        "max_workers (2)",
    ),
    "train.epochs=ten": ("train.epochs is 'ten': ", "number"),
    "train.epochs=2026-01-01": ("train.epochs is '2026-01-01': ", "number"),
    "train.epochs=.nan": ("train.epochs is nan: ", "finite"),
    "train.learning_rate=0": ("train.learning_rate is 0: ", "greater than 0"),
    "train.schedule=cosin": ("train.schedule is 'cosin': ", 'Did you mean "cosine"?'),
    "train.warmup=1": ("train.warmup is 1: ", "less than 1"),
    "train.precision=bf32": ("train.precision is 'bf32': ", "'float32' or 'bf16'"),
    "train.device=cud": ("train.device is 'cud': ", 'Did you mean "cuda"?'),
    "train.seed=-1": ("train.seed is -1: ", "greater than or equal to 0"),
    "train.keep_checkpoints=1": ("train.keep_checkpoints is 1: ", "greater than or equal to 2"),
    "train.keep_best=maybe": ("train.keep_best is 'maybe': ", "boolean"),
    "train.fingerprint={torhc: '2'}": (
        "train.fingerprint.torhc is 'torhc': ",
        'Did you mean "torch"?',
    ),
    "train=3": ("train is 3: ", "dictionary"),
    "train=": ("train is empty: give it keys, or remove it.", ""),
    "train=[workers]": ("train is ['workers']: ", "dictionary"),
    "gate.minmum={ap: .9}": ("gate.minmum is not a known key.", 'Did you mean "minimum"?'),
    "gate.minimum=0.9": ("gate.minimum is 0.9: ", "dictionary"),
    "gate.minimum={ap: high}": ("gate.minimum.ap is 'high': ", "number"),
    "gate.minimum={app: .9}": (
        "gate.minimum.app: the workload does not define this metric.",
        'Did you mean "ap"?',
    ),
    "gate.maximum={ap: .5}": (
        "gate.maximum.ap without gate.minimum.ap: higher is better for ap",
        "Set gate.minimum",
    ),
    "gate={minimum: {ap: .9}, maximum: {ap: .5}}": (
        "gate.minimum.ap is 0.9 and gate.maximum.ap is 0.5: no value",
        "",
    ),
    "gate.confidence=95": ("gate.confidence is 95: ", "less than 1"),
    "gate.tolerance=-1": ("gate.tolerance is -1: ", "greater than or equal to 0"),
    "gate.resamples=3": ("gate.resamples is 3: ", "greater than or equal to 50"),
    "serve.port=http": ("serve.port is 'http': ", "integer"),
    "serve.port=99999": ("serve.port is 99999: ", "65535"),
    "serve.replicas=3": ("serve.replicas is not a known key.", 'Did you mean "min_replicas"?'),
    "serve.canary=true": ("serve.canary is True: ", "dictionary"),
    "serve.canary={sharse: [1]}": ("serve.canary.sharse is not a known key.", "Did you mean"),
    "serve.max_batch=0": ("serve.max_batch is 0: ", "greater than or equal to 1"),
    "schedule.cron=every day": ("schedule.cron is 'every day': it must have five fields", "not 2"),
    "schedule.cron=0 25 * * *": (
        "schedule.cron is '0 25 * * *': the hour is \"25\": it must be * or 0-23",
        "ranges",
    ),
    "schedule.crom=0 3 * * 1": ("schedule.crom is not a known key.", 'Did you mean "cron"?'),
    "schedule.timezone=Europe/Pari": (
        "schedule.timezone is 'Europe/Pari': ",
        'Did you mean "Europe/Paris"?',
    ),
    "notify.format=slak": ("notify.format is 'slak': ", 'Did you mean "slack"?'),
    "notify.events=[failures]": ("notify.events.0 is 'failures': ", 'Did you mean "failure"?'),
    "notify=slack": ("notify is 'slack': ", "dictionary"),
    "cluster.backend=pytorch": ("cluster.backend is 'pytorch': ", 'Did you mean "pytorchjob"?'),
    "cluster.image=''": ("cluster.image is '': ", "at least 1 character"),
    "cluster.namespace=My Space": ("cluster.namespace is 'My Space': ", ""),
    "cluster.queue=x y": ("cluster.queue is 'x y': ", ""),
    "cluster.gang=kueu": (
        'cluster: cluster.gang is "kueu": this preset does not exist.',
        'Did you mean "kueue"?',
    ),
    "cluster.pods=[train]": ("cluster.pods is ['train']: ", "dictionary"),
    "cluster.pods.train=3": ("cluster.pods.train is 3: ", "dictionary"),
    "cluster.pods.train.gpuz=1": (
        "cluster.pods.train.gpuz is not a known key.",
        'Did you mean "gpus"?',
    ),
    "cluster.pods.train.memory=lots": ("cluster.pods.train.memory is 'lots': ", ""),
    "cluster.pods.train.preset=gke-spt": (
        'cluster: cluster.pods.train.preset is "gke-spt": ',
        'mean "gke-spot"?',
    ),
    "data={source: x, sorce: y}": ("data.sorce is not a known key.", 'Did you mean "source"?'),
    "data=": ("data is empty: give it keys, or remove it.", ""),
    "data.source=''": ("data.source is '': it must name the raw data", ""),
    "data.source=3": ("data.source is 3: ", "string"),
    "data.first_day=2026-13-01": ("data.first_day is '2026-13-01': ", "month"),
    "data.columns={idd: x}": ("data.columns.idd is not a known key.", 'Did you mean "id"?'),
    "data=power.csv": ("data is 'power.csv': ", "dictionary"),
    "model.widht=3": ("model.widht is not a known key.", 'Did you mean "width"?'),
    "model.width=wide": ("model.width is 'wide': ", "integer"),
    "model.heads=7": ("model: width is 64: it must be a multiple of heads (7).", ""),
    "model=": ("model is empty: give it keys, or remove it.", ""),
    "name=3": ("name is 3: ", "string"),
    "name=": ("name is None: ", "string"),
    "workload=": ("workload is None: it must be the dotted name of a module.", ""),
    "workload=steps.frad": (
        'workload "steps.frad" cannot be imported',
        'Did you mean "steps.fraud"?',
    ),
    "workload=numpy": ('workload "numpy" lacks Data, Model, metrics', "docs/your-own-model.md"),
    "pipeline=": ("pipeline is None: it must be the dotted name of a module.", ""),
    "pipeline=pipelines.trainin": (
        'pipeline "pipelines.trainin" cannot be imported',
        'mean "pipelines.training"?',
    ),
    "pipeline=numpy": ('pipeline "numpy" lacks build', "docs/your-own-pipeline.md"),
}


@pytest.mark.parametrize("setting", WRONG_SETTINGS)
def test_a_wrong_setting_is_one_sentence_with_file_key_and_nearest_name(
    setting: str, tmp_path: Path
) -> None:
    path, _, text = setting.partition("=")
    *sections, field_name = path.split(".")
    values = inner_section = yaml.safe_load(yaml.safe_dump(SMALL_CONFIG))
    for section in sections:
        inner_section = inner_section.setdefault(section, {})
    inner_section[field_name] = yaml.safe_load(re.sub(r"(2026-\S+)", r"'\1'", text))
    file = write(tmp_path / "c.yaml", values)
    with pytest.raises(ConfigError) as caught:
        load_config(file, [], {})
    beginning, ending = WRONG_SETTINGS[setting]
    error = str(caught.value)
    assert error.startswith(f"{file}: {beginning}"), error
    assert ending in error, error
    assert "\n" not in error, error


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("=3", "it must be KEY=VALUE, such as --set train.workers=3."),
        ("train.workers=", "train.workers is '': "),
        ("train.workers=3=4", "train.workers is '3=4': "),
        ("train.workers=[1", "is not YAML: "),
        ("trian.workers=3", 'trian is not a known key. Did you mean "train"?'),
        ("workload=steps.frad", 'Did you mean "steps.fraud"?'),
        ("gate.minimum.app=.9", "the workload does not define this metric."),
    ],
)
def test_an_error_in_a_set_option_names_the_option(
    assignment: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "c.yaml", SMALL_CONFIG), [assignment], {})
    error = str(caught.value)
    assert error.startswith(f"--set {assignment}"), error
    assert words in error, error
    assert "\n" not in error, error


def test_a_missing_file_is_reported_with_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path / "demo.yaml", SMALL_CONFIG)
    with pytest.raises(ConfigError, match=r"Did you mean .*demo\.yaml"):
        load_config(tmp_path / "dmo.yaml", [], {})


@given(st.integers(1, 8), st.integers(0, 2**31), st.booleans())
def test_a_value_has_the_same_meaning_in_file_environment_and_set(
    tmp_path_factory: pytest.TempPathFactory, workers: int, seed: int, as_set: bool
) -> None:
    file = write(tmp_path_factory.mktemp("c") / "c.yaml", SMALL_CONFIG)
    config_file = write(
        file.with_name("w.yaml"), SMALL_CONFIG | {"train": {"workers": workers, "seed": seed}}
    )
    sets = [f"train.workers={workers}", f"train.seed={seed}"] if as_set else []
    if as_set:
        names = {}
    else:
        names = {"REKINDLE_TRAIN__WORKERS": str(workers), "REKINDLE_TRAIN__SEED": str(seed)}
    assert load_config(file, sets, names).config == load_config(config_file, [], {}).config


def test_a_misspelt_variable_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", SMALL_CONFIG)
    with pytest.raises(
        ConfigError,
        match=r'REKINDLE_TRIAN__WORKERS: trian is not a known key. Did you mean "train"',
    ):
        load_config(
            file,
            [],
            {"REKINDLE_TRIAN__WORKERS": "3", "REKINDLE_HOME": "/elsewhere", "REKINDLE_PATH": "x"},
        )


def test_only_the_first_errors_of_a_config_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    def error_of(count: int) -> str:
        file = write(
            tmp_path / "c.yaml", SMALL_CONFIG | {f"k{number}": 1 for number in range(count)}
        )
        with pytest.raises(ConfigError) as caught:
            load_config(file, [], {})
        return str(caught.value)

    assert error_of(5000).endswith("and 4,980 more errors.")
    assert error_of(5000).count("\n") == 20
    assert count_calls(lambda: error_of(4000)) < 4.5 * count_calls(lambda: error_of(1000))


def test_null_turns_off_the_notifications_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", SMALL_CONFIG | {"notify": {"format": "slack"}})
    assert load_config(file, [], {}).config.notify.format == "slack"
    assert load_config(file, ["notify=null"], {}).config.notify.format == "off"


def test_data_that_pods_cannot_read_is_rejected_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path / "here"))
    for folder, is_visible in (("here", True), ("elsewhere", False)):
        (tmp_path / folder).mkdir()
        source = write(tmp_path / folder / "a.csv", "")
        data = load_config(
            write(tmp_path / "c.yaml", SMALL_CONFIG), [f"data.source={source}"], {}
        ).config.data

        if is_visible:
            data.check_source()
            continue

        # make the test independent of the directory of temporary files
        monkeypatch.setattr("rekindle.workload.POD_PRIVATE", tmp_path)
        with pytest.raises(ConfigError, match=rf"each pod has its own .*rekindle put {source}"):
            data.check_source()


def test_a_missing_source_is_reported_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    (tmp_path / "payments.csv").touch()
    file = write(tmp_path / "c.yaml", SMALL_CONFIG)
    load_config(file, ["data.source=~/payments.csv"], {}).config.data.check_source()
    with pytest.raises(
        ConfigError,
        match=r'payment\.csv.: this file or folder does not exist\. Did you mean ".*payments\.csv"',
    ):
        load_config(file, ["data.source=~/payment.csv"], {}).config.data.check_source()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def run(inputs): ...", "it has no function build"),
        ("def build(config): ...", "add --set workload=MODULE"),
    ],
)
def test_a_module_without_a_workload_is_a_pipeline_or_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / "own.py", environment={})


@pytest.mark.parametrize(
    "query", ["X-Amz-Expires=9&X-Amz-Signature=hunter2", "sig=hunter2", "a=1&access_token=hunter2"]
)
def test_a_signed_url_is_refused_and_not_repeated(query: str) -> None:
    demo = project.REFERENCE / "configs/demo.yaml"
    with pytest.raises(ConfigError, match=r"data\.source is a URL with a .* signature") as caught:
        load_config(demo, [f"data.source=s3://bucket/x.csv?{query}"], {})
    assert "hunter2" not in str(caught.value)
    load_config(demo, ["data.source=s3://bucket/x.csv?page=1&sign=2"], {})


@pytest.mark.parametrize(
    "source",
    [
        "s3://ann:hun ter2/hunter2@h/x.csv",
        "s3://h/x.csv#token=hunter2",
        "s3://h/x.csv;access_token=hunter2",
        "//ann:hunter2@h/x.csv",
        "h/x.csv?X-Amz-Signature=hunter2",
        "h/x.csv?clientsecret=hunter2",
        "h/x.csv?access_key=hunter2",
        "h/x.csv?session=hunter2",
    ],
)
def test_a_secret_in_an_unusual_address_is_refused_and_not_repeated(source: str) -> None:
    demo = project.REFERENCE / "configs/demo.yaml"
    with pytest.raises(ConfigError, match=r"data\.source is a URL with a password") as caught:
        load_config(demo, [f"data.source={source}"], {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "registry:5000/a/b@sha256:12",
        "a:1.2@sha256:12",
        "http://h:9000/a@b",
        "http://ann:$(PASSWORD)@h",
        "models:/demo@champion",
        "http://h: mail a@b",
    ],
)
def test_a_text_that_only_resembles_a_password_is_accepted(text: str) -> None:
    assert not PASSWORD_URL.search(text)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    demo = project.REFERENCE / "configs/demo.yaml"
    source = "data.source=s3://KEY:hunter2@bucket/x"
    with pytest.raises(ConfigError, match=r"data\.source is a URL with a password") as caught:
        load_config(demo, [source], {})

    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.source is 's3://bucket/x'") as caught:
        # this config also breaks another rule
        load_config(project.REFERENCE / "configs/digits.yaml", [source], {})

    assert "hunter2" not in str(caught.value)
    assert (
        load_config(demo, ["data.source=s3://bucket/a:b@c"], {}).config.data.source
        == "s3://bucket/a:b@c"
    )


PROGRAM = {
    "name": "slopes",
    "workload": "tests.rekindle.program.slopes",
    "data": {"source": "simulate://7"},
    "program": {"command": ["tests/programs/ddp.py"]},
}


def test_a_program_needs_a_workload_with_load(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", PROGRAM | {"workload": "tests.rekindle.release.lines"})
    with pytest.raises(ConfigError) as caught:
        load_config(file, [], {})
    assert str(caught.value).startswith(
        f'{file}: workload "tests.rekindle.release.lines" does not define load(path, facts)'
    )


def test_a_workload_with_only_load_needs_a_program(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "c.yaml", PROGRAM), [], {}).config
    assert "rekindle.program.agent" in str(render_manifest(config))

    with pytest.raises(ConfigError, match="has only `load`, so a program must train its model"):
        render_manifest(config.model_copy(update={"program": None}))


@pytest.mark.parametrize(
    "program, name",
    [
        ({"environment": {"WANDB_API_KEY": "hunter2"}}, "environment.WANDB_API_KEY"),
        ({"environment": {"HF_TOKEN": "hunter2{run_id}"}}, "environment.HF_TOKEN"),
        ({"command": ["train.py", "--api-key=hunter2"]}, "command: --api-key"),
        ({"command": ["sh", "-c", "./train --token hunter2 --fast"]}, "command: --token"),
        ({"resume": ["--password", "hunter2"]}, "resume: --password"),
    ],
)
def test_a_secret_of_a_program_reaches_neither_mlflow_nor_the_manifest(
    tmp_path: Path, program: dict[str, Any], name: str
) -> None:
    values = PROGRAM | {"program": {"command": ["tests/programs/ddp.py"], **program}}
    with pytest.raises(ConfigError, match=re.escape(name)) as caught:
        load_config(write(tmp_path / "c.yaml", values), [], {})
    assert "program.secrets" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_variables_of_a_program_that_only_resemble_secrets_are_accepted(tmp_path: Path) -> None:
    environment = {"TOKENIZERS_PARALLELISM": "false", "PAD_TOKEN": "<pad>", "HF_TOKEN": ""}
    command = ["tests/programs/ddp.py", "--token", "$HF_TOKEN", "--max-tokens=5"]
    values = PROGRAM | {"program": {"command": command, "environment": environment}}
    config = load_config(write(tmp_path / "c.yaml", values), [], {}).config
    assert config.program
    assert config.program.environment == environment


@pytest.mark.parametrize("backend", ["pytorchjob", "jobset", "trainjob"])
def test_a_program_gets_its_secrets_from_a_secret_of_the_namespace(
    tmp_path: Path, backend: str
) -> None:
    values = PROGRAM | {"cluster": {"backend": backend}}
    values["program"] = {"command": ["tests/programs/ddp.py"], "secrets": ["HF_TOKEN"]}
    config = load_config(write(tmp_path / "c.yaml", values), [], {}).config
    variables = [
        variable
        for template in render_manifest(config)["spec"]["templates"]
        if "train" in template["name"] and "resource" in template
        for spec in pod_specs(json.loads(template["resource"]["manifest"]))
        for container in spec["containers"]
        for variable in container.get("env", [])
        if variable["name"] == "HF_TOKEN"
    ]
    reference = {"secretKeyRef": {"name": "rekindle-program", "key": "HF_TOKEN"}}
    assert variables == [{"name": "HF_TOKEN", "valueFrom": reference}]


def test_a_secret_in_a_section_of_the_workload_is_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = tmp_path / "secretive_workload.py"
    workload.write_text(
        "from steps.digits import *\nclass Data(Data):\n    api_key: str = ''\n"
        "    pad_token: str = ''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = {"source": "sklearn://digits", "pad_token": "<pad>"}
    values = {"name": "demo", "workload": "secretive_workload", "data": data}
    load_config(write(tmp_path / "c.yaml", values), ["data.api_key=$(API_KEY)"], {})
    with pytest.raises(ConfigError, match=r"data\.api_key is a secret") as caught:
        load_config(tmp_path / "c.yaml", ["data.api_key=hunter2"], {})
    assert "hunter2" not in str(caught.value)
