"""Wrong wiring is an error when the pipeline is built, with the line of the user's file and a suggestion."""

import re
from pathlib import Path

import pytest

from rekindle import ConfigError, blocks, load_config, render_manifest
from rekindle.blocks.wiring import WiringError

CONFIG = Path(__file__).parents[2] / "golden/config.yaml"
HEAD = """\
from hera.workflows import DAG, Container, Parameter, Steps, Task

from rekindle import blocks


def scored():
    return blocks.evaluate(blocks.train(blocks.prepare()))


def build(config):
    with blocks.pipeline(config) as workflow:
"""

# lines of a pipeline; the last line, or the line marked with #!, is wrong → text of the error
WRONG = {
    "blocks.prepare().outputs.digset": 'prepare has no output "digset". Did you mean "digest"?',
    "blocks.prepare().digest": "digest is an output of prepare: write .outputs.digest.",
    "blocks.train(blocks.prepare()).outputs.report": 'train has no output "report". It has model.',
    "scored().outputs.metrics['acuracy']": 'metrics has no "acuracy". Did you mean "accuracy"?',
    "scored().outputs.verdict['ap']": 'verdict is not a mapping: remove ["ap"].',
    "blocks.train(None)": "None is not a block: pass the task that a block returned, such as blocks.prepare().",
    "blocks.evaluate(blocks.prepare())": 'prepare does not provide "model", which is needed here: pass it as model=...',
    "blocks.release(blocks.train(blocks.prepare()))": 'train does not provide "name"',
    "blocks.deploy(scored())": 'evaluate does not provide "model_uri"',
    "blocks.verify(blocks.release(scored()))": 'release does not provide "serve"',
    "blocks.evalute(None)": """module 'rekindle.blocks' has no attribute 'evalute'. Did you mean "evaluate"?""",
    "blocks.prepare(experimnt='a')": 'prepare has no input "experimnt". Did you mean "experiment"?',
    "blocks.train(blocks.prepare(), digset='a')": 'train has no input "digset". Did you mean "digest"?',
    "blocks.step('steps.prepare', with_item=[1])": 'prepare has no input "with_item". Did you mean "with_items"?',
    "blocks.step('steps.evaluate', workload='w')": "evaluate lacks dataset (an artifact), model (an artifact): pass",
    "blocks.step('steps.evalute')": 'Did you mean "steps.evaluate"?',
    "blocks.evaluate(scored(), dataset=blocks.prepare())": "is the task prepare-2: pass one of its outputs, as in",
    "blocks.evaluate(scored(), dataset=blocks.prepare().outputs.digest)": "is an artifact, and the parameter digest is",
    "blocks.evaluate(scored(), dataset='data/')": "is an artifact, and 'data/' is not: pass an artifact, as in TASK",
    "blocks.prepare(experiment=blocks.prepare().outputs.dataset)": "is a parameter, and dataset is an artifact: pass",
    "blocks.evaluate(scored(), confidence='high')": """the input "confidence" of evaluate-2 is 'high'""",
    "blocks.evaluate(scored(), resamples=scored().outputs.verdict)": "is a number, and the output verdict is not.",
    "blocks.train(blocks.prepare(), dataset=Parameter(name='d', value='d'))": "pass the artifact of a block, as in",
    "blocks.train(blocks.prepare(), train={'epochs': 3})": "train={'epochs': 3} is not a section",
    "blocks.train(blocks.prepare(), train=config.train.model_copy(update={'epoch': 3}))": "config.train has no epoch.",
    "blocks.train(blocks.prepare(), train=config.train.model_copy(update={'epochs': 'x'}))": "train.epochs is 'x': ",
    "scored().outputs.verdict == 'released'": 'verdict is never "released". Did you mean "release"?',
    "blocks.deploy(blocks.release(scored()), serve={'port': 3})": "serve={'port': 3} is not a section",
    "blocks.prepare(task='Data Set')": 'the task name "Data Set" is invalid',
    "blocks.prepare(task='data')\nblocks.prepare(task='data')": 'the task name "data" is already in use',
    "blocks.train(blocks.prepare(), task='a-name-that-pods-cannot-have-after-them')": "must have at most",
    "if scored().outputs.verdict == 'release':  #!\n    pass": "is known only at run time: pass it as",
    "scored().outputs.verdict == 3": "verdict is text: it cannot be compared with 3.",
    "scored().outputs.metrics['accuracy'] > 'much'": "is a number: it cannot be compared with 'much'.",
    "blocks.prepare(experiment='{{tasks.chose.outputs.result}}')": 'has no task "chose" before this one.',
    "with blocks.group('one'):\n    data = blocks.prepare()\nblocks.train(data)": "prepare is in one: use it there.",
    "with Steps(name='s'):\n    blocks.prepare()": "not in Steps: create it in the `with` of the pipeline",
    "with blocks.group('one', wen=True):  #!\n    pass": "got an unexpected keyword argument 'wen'",
    "with blocks.group('Ship it'):  #!\n    pass": 'the task name "Ship it" is invalid',
    "blocks.prepare('shop')": "takes 0 positional arguments but 1 was given",
    "config.train.epoch": """has no attribute 'epoch'. Did you mean "epochs"?""",
    "jugded()": "name 'jugded' is not defined",
}


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[re.sub(r"\W+", "-", lines)[:50] for lines in WRONG])
def test_wrong_wiring_is_reported_with_line_mistake_and_suggestion(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, words = list(WRONG.items())[number]
    source = HEAD + "".join(f"        {line}\n" for line in body.splitlines()) + "    return workflow\n"
    file = tmp_path / f"wrong_{number}.py"
    file.write_text(source)
    lines = source.splitlines()
    marked = (number for number, line in enumerate(lines, 1) if line.endswith("#!"))
    wrong = next(marked, len(lines) - 1)
    config = load_config(CONFIG, environment={}).config
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        render_manifest(config.model_copy(update={"pipeline": file.stem, "workload": "steps.digits"}))
    assert re.match(rf"(/.*/)?{file.name}:{wrong}: ", str(error.value)), error.value
    assert words in str(error.value)


def test_a_dag_of_blocks_that_runs_twice_is_rejected_with_the_remedy() -> None:
    from hera.workflows import DAG, Task

    message = r"the DAG branch runs several times \(a, b\).*instead, write a Python function that creates the blocks"
    with pytest.raises(WiringError, match=message), blocks.pipeline(load_config(CONFIG, environment={}).config):
        with DAG(name="branch"):
            blocks.prepare()
        Task(name="a", template="branch")
        Task(name="b", template="branch")


def test_a_block_outside_of_a_pipeline_is_rejected_with_the_remedy() -> None:
    with pytest.raises(WiringError, match=r"with blocks\.pipeline\(config\)"):
        blocks.prepare()


def test_settings_for_an_unused_kind_of_pod_are_rejected_with_a_suggestion() -> None:
    config = load_config(CONFIG, ["cluster.pods.trian.gpus=1"], environment={}).config
    message = r'pods\.trian is set, but no task has pods of this kind\. Did you mean "train"'
    with pytest.raises(WiringError, match=message), blocks.pipeline(config):
        blocks.prepare()
