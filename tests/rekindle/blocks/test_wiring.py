"""Wrong wiring is an error when the pipeline is built: the line of the user's file, what is wrong, the nearest name."""

import re
from pathlib import Path

import pytest

from rekindle import ConfigError, blocks, load_config, render_manifest
from rekindle.blocks.wiring import WiringError

CONFIG = Path(__file__).parents[2] / "golden/config.yaml"
HEAD = """\
from hera.workflows import DAG, Container, Parameter, Steps, Task

from rekindle import blocks


def judged():
    return blocks.evaluate(blocks.train(blocks.prepare()))


def build(config):
    with blocks.pipeline(config) as workflow:
"""

# lines of a pipeline, of which the last or the one marked with #! is wrong: the words of its error
WRONG = {
    "blocks.prepare().outputs.digset": 'prepare has no output "digset". Did you mean "digest"?',
    "blocks.prepare().digest": "digest is an output of prepare: write .outputs.digest.",
    "blocks.train(blocks.prepare()).outputs.report": 'train has no output "report". It has model.',
    "judged().outputs.metrics['acuracy']": 'metrics has no "acuracy". Did you mean "accuracy"?',
    "judged().outputs.verdict['ap']": 'verdict is no mapping, so it has no "ap": leave the brackets out.',
    "blocks.train(None)": "None is no block: give the task that a block returned, such as blocks.prepare().",
    "blocks.evaluate(blocks.prepare())": 'prepare hands on no "model", which is needed here: give it as model=...',
    "blocks.release(blocks.train(blocks.prepare()))": 'train hands on no "name"',
    "blocks.deploy(judged())": 'evaluate hands on no "model_uri"',
    "blocks.verify(blocks.release(judged()))": 'release hands on no "serve"',
    "blocks.evalute(None)": """module 'rekindle.blocks' has no attribute 'evalute'. Did you mean "evaluate"?""",
    "blocks.prepare(experimnt='a')": 'prepare has no input "experimnt". Did you mean "experiment"?',
    "blocks.train(blocks.prepare(), digset='a')": 'train has no input "digset". Did you mean "digest"?',
    "blocks.step('steps.prepare', with_item=[1])": 'prepare has no input "with_item". Did you mean "with_items"?',
    "blocks.step('steps.evaluate', workload='w')": "evaluate lacks dataset (an artifact), model (an artifact): give",
    "blocks.step('steps.evalute')": 'Did you mean "steps.evaluate"?',
    "blocks.evaluate(judged(), dataset=blocks.prepare())": "is the task prepare-2: give one of its outputs, as in",
    "blocks.evaluate(judged(), dataset=blocks.prepare().outputs.digest)": "is an artifact, and the parameter digest is",
    "blocks.evaluate(judged(), dataset='data/')": "is an artifact, and 'data/' is none: give an artifact, as in TASK",
    "blocks.prepare(experiment=blocks.prepare().outputs.dataset)": "is a parameter, and dataset is an artifact: give",
    "blocks.evaluate(judged(), confidence='high')": """the input "confidence" of evaluate-2 is 'high'""",
    "blocks.evaluate(judged(), resamples=judged().outputs.verdict)": "is a number, and the output verdict is none.",
    "blocks.train(blocks.prepare(), dataset=Parameter(name='d', value='d'))": "give the artifact of a block, as in",
    "blocks.train(blocks.prepare(), train={'epochs': 3})": "train={'epochs': 3} is no section",
    "blocks.train(blocks.prepare(), train=config.train.model_copy(update={'epoch': 3}))": "config.train has no epoch.",
    "blocks.train(blocks.prepare(), train=config.train.model_copy(update={'epochs': 'x'}))": "train.epochs is 'x': ",
    "judged().outputs.verdict == 'released'": 'verdict is never "released". Did you mean "release"?',
    "blocks.deploy(blocks.release(judged()), serve={'port': 3})": "serve={'port': 3} is no section",
    "blocks.prepare(task='Data Set')": 'the task "Data Set" needs another name',
    "blocks.prepare(task='data')\nblocks.prepare(task='data')": 'there is a task "data" already',
    "blocks.train(blocks.prepare(), task='a-name-that-pods-cannot-have-after-them')": "needs a name of at most",
    "if judged().outputs.verdict == 'release':  #!\n    pass": "is known only when the pipeline runs: give it as",
    "judged().outputs.verdict == 3": "verdict is text: it cannot be compared with 3.",
    "judged().outputs.metrics['accuracy'] > 'much'": "is a number: it cannot be compared with 'much'.",
    "blocks.prepare(experiment='{{tasks.chose.outputs.result}}')": 'has no task "chose" before this one.',
    "with blocks.group('one'):\n    data = blocks.prepare()\nblocks.train(data)": "prepare is in one: use it there.",
    "with Steps(name='s'):\n    blocks.prepare()": "not in Steps: make it in the `with` of the pipeline or of a group",
    "with blocks.group('one', wen=True):  #!\n    pass": "got an unexpected keyword argument 'wen'",
    "with blocks.group('Ship it'):  #!\n    pass": 'the task "Ship it" needs another name',
    "blocks.prepare('shop')": "takes 0 positional arguments but 1 was given",
    "config.train.epoch": """has no attribute 'epoch'. Did you mean "epochs"?""",
    "jugded()": "name 'jugded' is not defined",
}


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[re.sub(r"\W+", "-", lines)[:50] for lines in WRONG])
def test_wrong_wiring_names_the_line_what_is_wrong_and_what_it_could_be(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, words = list(WRONG.items())[number]
    source = HEAD + "".join(f"        {line}\n" for line in body.splitlines()) + "    return workflow\n"
    file = tmp_path / f"wrong_{number}.py"
    file.write_text(source)
    lines = source.splitlines()
    wrong = next((at for at, line in enumerate(lines, 1) if line.endswith("#!")), len(lines) - 1)
    config = load_config(CONFIG, environment={}).config
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        render_manifest(config.model_copy(update={"pipeline": file.stem, "workload": "steps.digits"}))
    assert re.match(rf"(/.*/)?{file.name}:{wrong}: ", str(error.value)), error.value
    assert words in str(error.value)


def test_a_dag_of_blocks_that_runs_twice_says_what_to_do_instead() -> None:
    from hera.workflows import DAG, Task

    said = r"the DAG branch runs several times \(a, b\).*call a Python function that makes the blocks instead"
    with pytest.raises(WiringError, match=said), blocks.pipeline(load_config(CONFIG, environment={}).config):
        with DAG(name="branch"):
            blocks.prepare()
        Task(name="a", template="branch")
        Task(name="b", template="branch")


def test_a_block_outside_of_a_pipeline_says_where_it_belongs() -> None:
    with pytest.raises(WiringError, match=r"with blocks\.pipeline\(config\)"):
        blocks.prepare()


def test_pods_of_no_task_are_an_error_with_the_nearest_kind() -> None:
    config = load_config(CONFIG, ["cluster.pods.trian.gpus=1"], environment={}).config
    said = r'pods\.trian is set, and no task has such pods\. Did you mean "train"'
    with pytest.raises(WiringError, match=said), blocks.pipeline(config):
        blocks.prepare()
