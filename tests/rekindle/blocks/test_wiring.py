"""A wrong connection between blocks is an error when the pipeline is built, with the line of the
user's file and a suggestion."""

import re
import sys
from pathlib import Path

import pytest
from hera.workflows import Task, script

from argolocal.validate import lint
from rekindle import ConfigError, blocks, load_config, render_manifest
from rekindle.blocks.wiring import WiringError

CONFIG = Path(__file__).parents[2] / "golden/config.yaml"
HEAD = """\
from hera.workflows import DAG, Container, Parameter, Steps, Task, script

from rekindle import blocks


def scored():
    return blocks.evaluate(blocks.train(blocks.prepare()))


@script(constructor="inline", image="python:3.11-slim")
def tell(text: str):
    print(text)


def build(config):
    with blocks.pipeline(config) as workflow:
"""

CARD = """\
from rekindle import Artifact, StepInputs, StepOutputs


class Inputs(StepInputs):
    small: dict[str, float]
    count: int = 3
    shown: bool = False
    names: list[str] = []


class Outputs(StepOutputs):
    card: Artifact


def run(inputs):
    return Outputs(card=inputs.workdir)
"""

# lines of a pipeline; the last line, or the line marked with #!, is wrong → text of the error
WRONG_PIPELINES = {
    "blocks.prepare().outputs.digset": 'prepare has no output "digset". Did you mean "digest"?',
    "blocks.prepare().digest": "digest is an output of prepare: write .outputs.digest.",
    "blocks.train(blocks.prepare()).outputs.report": 'train has no output "report". It has model.',
    "scored().outputs.metrics['acuracy']": 'metrics has no "acuracy". Did you mean "accuracy"?',
    "scored().outputs.verdict['ap']": 'verdict is not a mapping: remove ["ap"].',
    "blocks.train(None)": (
        "None is not a block: pass the task that a block returned, such as blocks.prepare()."
    ),
    "blocks.evaluate(blocks.prepare())": (
        'prepare does not provide "model", which is required: pass it as model=...'
    ),
    "blocks.release(blocks.train(blocks.prepare()))": 'train does not provide "name"',
    "blocks.deploy(scored())": 'evaluate does not provide "model_uri"',
    "blocks.verify(blocks.release(scored()))": 'release does not provide "serve"',
    "blocks.evalute(None)": (
        """module 'rekindle.blocks' has no attribute 'evalute'. Did you mean "evaluate"?"""
    ),
    "blocks.prepare(experimnt='a')": 'prepare has no input "experimnt". Did you mean "experiment"?',
    "blocks.train(blocks.prepare(), digset='a')": (
        'train has no input "digset". Did you mean "digest"?'
    ),
    "blocks.step('steps.prepare', with_item=[1])": (
        'prepare has no input "with_item". Did you mean "with_items"?'
    ),
    "blocks.step('steps.evaluate', workload='w')": (
        "evaluate lacks dataset (an artifact), model (an artifact): pass"
    ),
    "blocks.step('steps.evalute')": 'Did you mean "steps.evaluate"?',
    "blocks.evaluate(scored(), dataset=blocks.prepare())": (
        "is the task prepare-2: pass one of its outputs, as in"
    ),
    "blocks.evaluate(scored(), dataset=blocks.prepare().outputs.digest)": (
        "is an artifact, and the parameter digest is"
    ),
    "blocks.evaluate(scored(), dataset='data/')": (
        "is an artifact, and 'data/' is not: pass an artifact, as in TASK"
    ),
    "blocks.prepare(experiment=blocks.prepare().outputs.dataset)": (
        "is a parameter, and dataset is an artifact: pass"
    ),
    "blocks.evaluate(scored(), confidence='high')": (
        """the input "confidence" of evaluate-2 is 'high'"""
    ),
    "blocks.evaluate(scored(), resamples=scored().outputs.verdict)": (
        "is an integer, and the output verdict is text."
    ),
    "blocks.train(blocks.prepare(), dataset=Parameter(name='d', value='d'))": (
        "pass the artifact of a block, as in"
    ),
    "blocks.train(blocks.prepare(), train={'epochs': 3})": (
        "train is {'epochs': 3}, not the section `train`: pass"
    ),
    "blocks.train(blocks.prepare(), train=config.train.model_copy(update={'epoch': 3}))": (
        "config.train has no epoch."
    ),
    "blocks.train(blocks.prepare(), train=config.train.model_copy(update={'epochs': 'x'}))": (
        "train.epochs is 'x': "
    ),
    "scored().outputs.verdict == 'released'": (
        'verdict is never "released". Did you mean "release"?'
    ),
    "blocks.deploy(blocks.release(scored()), serve={'port': 3})": (
        "serve is {'port': 3}, not the section `serve`: pass"
    ),
    "blocks.prepare(task='Data Set')": 'the task name "Data Set" is invalid',
    "blocks.prepare(task='data')\nblocks.prepare(task='data')": (
        'the task name "data" is already in use'
    ),
    "blocks.train(blocks.prepare(), task='a-name-that-pods-cannot-have-after-them')": (
        "must have at most"
    ),
    "if scored().outputs.verdict == 'release':  #!\n    pass": (
        "is known only at run time: pass it as"
    ),
    "scored().outputs.verdict == 3": "verdict is text: it cannot be compared with 3.",
    "scored().outputs.metrics['accuracy'] > 'much'": (
        "is a number: it cannot be compared with 'much'."
    ),
    "blocks.prepare(experiment='{{tasks.chose.outputs.result}}')": (
        'has no task "chose" before this one.'
    ),
    "with blocks.group('one'):\n    data = blocks.prepare()\nblocks.train(data)": (
        "prepare is in one: use its outputs"
    ),
    "with Steps(name='s'):\n    blocks.prepare()": (
        "not in Steps: create it in the `with` of the pipeline"
    ),
    "with blocks.group('one', wen=True):  #!\n    pass": "got an unexpected keyword argument 'wen'",
    "with blocks.group('Ship it'):  #!\n    pass": 'the task name "Ship it" is invalid',
    "blocks.prepare('shop')": "takes 0 positional arguments but 1 was given",
    "config.train.epoch": """has no attribute 'epoch'. Did you mean "epochs"?""",
    "jugded()": "name 'jugded' is not defined",
    # types of outputs
    "blocks.step('card', small=scored().outputs.verdict)": (
        "of card is a mapping, and the output verdict is text."
    ),
    "blocks.step('card', small=blocks.prepare().outputs.rows)": (
        "is a mapping, and the output rows is an integer."
    ),
    "blocks.step('card', small={}, names=blocks.prepare().outputs.digest)": (
        "is a list, and the output digest is text."
    ),
    "blocks.step('card', small={}, shown=blocks.prepare().outputs.rows)": (
        "is true or false, and the output rows is"
    ),
    "blocks.step('card', small={'ap': 'high'})": (
        "the input \"small\" of card is {'ap': 'high'}: Input should be"
    ),
    "blocks.step('card', small={}, count='many')": (
        "the input \"count\" of card is 'many': Input should be a valid int"
    ),
    "blocks.evaluate(scored(), resamples=3)": "is 3: Input should be greater than or equal to 50.",
    "scored().outputs.metrics > 3": (
        "metrics is a mapping: it cannot be compared with 3. Compare one of its values, as"
    ),
    "scored().outputs.verdict == scored().outputs.metrics['accuracy']": (
        "cannot be compared: one is a number, the othe"
    ),
    "scored().outputs.verdict and 'yes'": (
        "the value of verdict is known only at run time: pass a comparison as `when="
    ),
    # conditions
    "blocks.step('card', small={}, when=scored().outputs.verdict)": (
        "`when` of card is the output verdict: compare it"
    ),
    "blocks.step('card', small={}, when=scored().outputs.metrics['accuracy'])": (
        'is the output metrics["accuracy"]: '
    ),
    "blocks.step('card', small={}, when='yes')": (
        "`when` of card is 'yes': it must be a condition, such as TASK"
    ),
    "blocks.step('card', small={}, when=3)": (
        "`when` of card is 3: it must be a condition, such as TASK"
    ),
    "blocks.prepare(when=scored().outputs.verdict == 'keep')": (
        "does not accept `when`: it is an option of"
    ),
    "with blocks.group('one', when=blocks.prepare()):  #!\n    pass": (
        "`when` of one is the task prepare: it must be a"
    ),
    "with blocks.group('one', when=True):  #!\n    pass": (
        "`when` of one is True: it must be a condition, such as TASK"
    ),
    "blocks.ship(scored(), when=True)": "True is not a condition: combine comparisons of outputs",
    "(scored().outputs.verdict == 'keep') | 'yes'": (
        "'yes' is not a condition: combine comparisons of outputs"
    ),
    "not (scored().outputs.verdict == 'keep')": "is known only at run time: pass it as `when=`",
    # loops
    "blocks.step('card', small={}, with_items=scored().outputs.metrics)": (
        "is known only at run time, as with_param."
    ),
    "blocks.step('card', small={}, with_items='abc')": (
        "with_items of card is 'abc': it must be a list."
    ),
    "blocks.step('card', small={}, with_items=3)": "with_items of card is 3: it must be a list.",
    "blocks.step('card', small={}, with_param=blocks.prepare().outputs.dataset)": (
        "with_param of card is the artifact"
    ),
    "blocks.step('card', small={}, with_param=blocks.prepare().outputs.digest)": (
        "digest, which is not a list: pass an"
    ),
    "blocks.step('card', small={}, with_sequence=3)": (
        "with_sequence of card is 3: Input should be a valid dictionary"
    ),
    # values and names
    "blocks.release(scored(), verdict='relase')": (
        "should be 'release', 'keep' or 'same'. Did you mean \"release\"?"
    ),
    "blocks.prepare(data={'sorce': 's3://a/b.csv'})": (
        'data.sorce is not a known key. Did you mean "source"?'
    ),
    "blocks.prepare(workload='steps.digts')": 'Did you mean "steps.digits"?',
    "blocks.evaluate(scored(), workload='powr')": 'workload "powr" cannot be imported',
    "blocks.evaluate(scored(), minimum={'acuracy': 1})": (
        'does not define this metric. Did you mean "accuracy"?'
    ),
    "blocks.step('crad', small={})": 'Did you mean "card"?',
    "blocks.step(3)": 'step "3" cannot be imported: it must be the dotted name of a module',
    "blocks.deploy(blocks.release(scored()), server=config.serve)": (
        "argument 'server'. Did you mean \"serve\"?"
    ),
    "blocks.train(blocks.prepare(), trian=config.train)": (
        'train has no input "trian". Did you mean "train"?'
    ),
    "blocks.train(blocks.prepare(), model=config.train)": (
        "model is a TrainConfig, not the section `model`: pass"
    ),
    "blocks.job(blocks.prepare(), 'XGBoostJb', 'card', {'Master': 1})": (
        'Did you mean "XGBoostJob"?'
    ),
    "blocks.job(blocks.prepare(), 'XGBoostJob', 'card', {'Mster': 1}, small={})": (
        'Did you mean "Master"?'
    ),
    "blocks.job(blocks.prepare(), 'XGBoostJob', 'card', {'Master': 1}, dataset='x')": (
        "a training gets its dataset by key: pass the artifact of a block"
    ),
    "blocks.job(blocks.prepare(), 'XGBoostJob', 'card', 3, small={})": (
        "the replicas are 3: they must be numbers by ro"
    ),
    "blocks.step('card', small={}, task='cardd', after=['prepar'])\n": (
        "cardd cannot run after 'prepar': this task"
    ),
    "blocks.step('card', small={}, pod=3)": (
        "the kind of pod is 3: it must be a key of cluster.pods"
    ),
    # blocks in the place of outputs, and the reverse
    "blocks.train(blocks.prepare(), start=scored())": (
        'input "start" of train-2 is the task evaluate: pass one of its'
    ),
    "blocks.train(blocks.prepare(), digest=blocks.prepare())": (
        "is the task prepare-2: pass one of its outputs, as in"
    ),
    "blocks.ship(scored().outputs.verdict)": (
        "the output verdict is not a block: pass the task that a block returned"
    ),
    "blocks.evaluate(blocks.train(blocks.prepare()).outputs.model)": (
        "the artifact model is not a block: pass the task"
    ),
    "blocks.train(config)": (
        "a Config is not a block: pass the task that a block returned, such as blocks.prepare()."
    ),
    "blocks.decide(scored)": (
        "the function scored is not a block: pass the task that a block returned"
    ),
    "m = blocks.train(blocks.prepare(), run_id=7)  #!\nblocks.evaluate(m)": (
        'the input "run_id" of train is 7: Input'
    ),
    "m = blocks.train(blocks.prepare(), digest=['a'])  #!\nblocks.evaluate(m)": (
        "the input \"digest\" of train is ['a'"
    ),
    "m = blocks.train(blocks.prepare(), run_id=blocks.prepare().outputs.dataset)  #!\nblocks.evaluate(m)": (
        "is an arti"
    ),
    # plain Hera tasks
    "tell(name='tell', arguments={'text': blocks.prepare()})  #!\nblocks.prepare()": (
        'the argument "text" of tell is t'
    ),
    "data = blocks.prepare()\nwith blocks.at_exit():\n    tell(name='t', arguments={'text': data.outputs.rows})  #!": (
        "prepare is in main: use its outputs in main."
    ),
    "Task(name='t', template='tell', arguments={'text': '{{tasks.prepar.outputs.result}}'})  #!\nblocks.prepare()": (
        'has no task "prepar" before this one. Did you mean "prepare"?'
    ),
    "Task(name='t', template='tell', with_sequence=3)  #!\nblocks.prepare()": (
        "with_sequence of t is 3: Input should b"
    ),
}
# a file → the wrong line, and text of the error
WRONG_FILES = {
    "def build():\n    pass\n": (1, "build must be a function of the config: def build(config)."),
    "def build(config, more):\n    pass\n": (
        1,
        "build must be a function of the config: def build(config).",
    ),
    "def build(config):\n    pass\n": (
        1,
        "build returns NoneType: it must end with `return workflow`",
    ),
    "def build(config):\n    return blocks.pipeline(config)\n": (
        1,
        "build returns _GeneratorContextManager: it must",
    ),
    "def build(config):\n    with blocks.pipeline('demo') as w:\n        return w\n": (
        2,
        "blocks.pipeline gets 'demo': ",
    ),
    "def build(config):\n    with blocks.pipeline() as w:\n        return w\n": (
        2,
        "missing 1 required positional arg",
    ),
    "def build(config):\n    with blocks.pipeline(config, lables={}) as w:\n        return w\n": (
        2,
        "keyword arg",
    ),
}


def error_of(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of building a pipeline in the folder of a project."""
    config = load_config(CONFIG, environment={}).config
    (pipeline.parent / "card.py").write_text(CARD)
    monkeypatch.delitem(sys.modules, "card", raising=False)
    monkeypatch.chdir(pipeline.parent)
    monkeypatch.setenv("REKINDLE_PATH", str(pipeline.parent))

    with pytest.raises(ConfigError) as error:
        render_manifest(
            config.model_copy(
                update={"pipeline": pipeline.stem, "workload": "steps.digits", "families": []}
            )
        )

    text = str(error.value)
    assert len(text) < 500, text
    assert not re.search(r"\n|pydantic|re\.compile|object at 0x", text), text
    return text


@pytest.mark.parametrize(
    "number",
    range(len(WRONG_PIPELINES)),
    ids=[re.sub(r"\W+", "-", lines)[:50] for lines in WRONG_PIPELINES],
)
def test_wrong_wiring_is_reported_with_line_mistake_and_suggestion(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, words = list(WRONG_PIPELINES.items())[number]
    source = (
        HEAD + "".join(f"        {line}\n" for line in body.splitlines()) + "    return workflow\n"
    )
    file = tmp_path / f"wrong_{number}.py"
    file.write_text(source)
    lines = source.splitlines()
    marked = (number for number, line in enumerate(lines, 1) if line.endswith("#!"))
    wrong = next(marked, len(lines) - 1)
    text = error_of(file, monkeypatch)
    assert re.match(rf"(/.*/)?{file.name}:{wrong}: ", text), text
    assert words in text


@pytest.mark.parametrize("number", range(len(WRONG_FILES)))
def test_a_file_that_is_not_a_pipeline_is_reported_with_its_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, (line, words) = list(WRONG_FILES.items())[number]
    file = tmp_path / f"not_a_pipeline_{number}.py"
    file.write_text(f"from rekindle import blocks\n{body}")
    text = error_of(file, monkeypatch)
    assert re.match(rf"(/.*/)?{file.name}:{line + 1}: ", text), text
    assert words in text, text


def test_a_hera_task_that_reads_an_output_runs_after_the_task_with_this_output() -> None:
    @script(image="python:3.11-slim", constructor="inline")
    def tell(text: str) -> None:
        print(text)

    def task(name: str, text: str, **options: str) -> Task:
        return tell(name=name, arguments={"text": text}, **options)  # pyright: ignore

    with blocks.pipeline(load_config(CONFIG, environment={}).config) as workflow:
        data = blocks.prepare()
        evaluation = blocks.evaluate(blocks.train(data))
        task("first", data.outputs.digest)
        by_hand = task("second", data.outputs.digest)
        data.next(by_hand)
        task("third", evaluation.outputs.verdict, depends="first.Failed || second.Failed")
        task("last", "x", when=evaluation.outputs.verdict == "keep")  # pyright: ignore

        with blocks.group("late"):
            task("inner", data.outputs.digest)

    templates = {template["name"]: template for template in workflow.to_dict()["spec"]["templates"]}
    depends = {task["name"]: task.get("depends") for task in templates["main"]["dag"]["tasks"]}
    assert {name: depends[name] for name in ("first", "second", "late")} == dict.fromkeys(
        ("first", "second", "late"), "prepare"
    )
    assert depends["third"] == "(first.Failed || second.Failed) && evaluate"
    assert depends["last"] == "evaluate"
    (inner_task,) = templates["late"]["dag"]["tasks"]
    assert "? inputs.parameters.digest :" in inner_task["arguments"]["parameters"][0]["value"]
    assert [str(finding) for finding in lint(workflow.to_dict()) if finding.fatal] == []


def test_a_dag_of_blocks_that_runs_twice_is_rejected_with_the_remedy() -> None:
    from hera.workflows import DAG

    message = (
        r"the DAG branch runs several times \(a, b\).*instead, write a Python function that creates"
        r" the blocks"
    )
    with (
        pytest.raises(WiringError, match=message),
        blocks.pipeline(load_config(CONFIG, environment={}).config),
    ):
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
