"""Tests of programs that are written as the documentation of the libraries shows. Each program
reaches its result on three pods, also if pods or processes are killed."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from rekindle.program.checkpoints.folder import list_folder
from rekindle.storage import Store
from tests.rekindle.program.pods import PROGRAMS, Pod, Pods, StartPods
from tests.waiting import until

POD_COUNT = 3
LIBRARIES = ("tests.rekindle.program.loaded_libraries",)
LIGHTNING = (*LIBRARIES, "tests.rekindle.program.loaded_lightning")


@dataclass(frozen=True)
class Program:
    """A program of tests/programs. `command`: the command, with STEPS in place of the number of
    steps; `weights`: the file of the result that the steps determine; `is_deterministic` is False
    if the program ends with other weights when it continues by itself, without Rekindle; `preload`:
    modules that the pods have imported."""

    command: list[str]
    section: dict[str, Any]
    weights: str = "final.pt"
    is_deterministic: bool = True
    preload: Sequence[str] = LIBRARIES


CASES = {
    "ddp": Program(
        [str(PROGRAMS / "ddp.py"), "--checkpoint-dir", "{checkpoints}", "--steps", "STEPS"],
        {"result": "{checkpoints}/final.pt"},
        preload=(),
    ),
    "shell": Program(
        [str(PROGRAMS / "counter.sh"), "{checkpoints}", "STEPS"],
        {"result": "{checkpoints}/final.txt"},
        "final.txt",
        preload=(),
    ),
    "fsdp2": Program(
        [str(PROGRAMS / "fsdp2.py"), "--checkpoint-dir", "{checkpoints}", "--steps", "STEPS"],
        {"resume": ["--checkpoint", "{checkpoint}"], "result": "{checkpoints}/final.pt"},
    ),
    "accelerate": Program(
        [
            *(str(PROGRAMS / "accelerate_loop.py"), "--output-dir", "{checkpoints}"),
            *("--max-train-steps", "STEPS"),
        ],
        {
            "resume": ["--resume-from-checkpoint", "{checkpoint}"],
            "result": "{checkpoints}/final",
        },
        "model.safetensors",
    ),
    "huggingface": Program(
        [
            *(str(PROGRAMS / "bert_trainer.py"), "--output_dir", "{checkpoints}"),
            *("--max_steps", "STEPS", "--save_steps", "5", "--save_total_limit", "3"),
            *("--per_device_train_batch_size", "4", "--use_cpu", "True"),
            *("--report_to", "none", "--disable_tqdm", "True", "--logging_strategy", "no"),
        ],
        {
            "resume": ["--resume_from_checkpoint", "{checkpoint}"],
            "result": "{checkpoints}/final",
        },
        "model.safetensors",
    ),
    "lightning": Program(
        [
            *(str(PROGRAMS / "lightning_module.py"), "--checkpoint-dir", "{checkpoints}"),
            *("--nodes", "{nodes}", "--steps", "STEPS"),
        ],
        {"resume": ["--checkpoint", "{checkpoint}"], "result": "{checkpoints}/final.pt"},
        # the Trainer of Lightning 2.6 repeats an epoch after a restart between two epochs
        is_deterministic=False,
        preload=LIGHTNING,
    ),
}


@dataclass
class Run:
    """A run of a program on POD_COUNT pods."""

    program: Program
    steps: int
    pods: Pods
    agents: list[Pod]
    coordinator: Pod

    def kill_program(self, draw: random.Random) -> None:
        """Kill one process of the program on a pod."""
        agent = draw.choice(self.agents)
        for process in agent.program:
            process.kill()

    def kill_agent(self, draw: random.Random) -> None:
        """Kill a pod; the pod's disk is lost in half of the cases."""
        number = draw.randrange(POD_COUNT)
        self.pods.kill([self.agents[number]])
        if draw.random() < 0.5:
            for folder in self.pods.checkpoint_folders(self.agents[number].name):
                shutil.rmtree(folder)
        self.agents[number] = self.pods.agent(number)

    def kill_coordinator(self, draw: random.Random) -> None:
        self.pods.kill([self.coordinator])
        self.coordinator = self.pods.coordinator()

    def kill_everything(self, draw: random.Random) -> None:
        self.pods.kill([self.coordinator, *self.agents])
        self.coordinator = self.pods.coordinator()
        self.agents = [self.pods.agent(number) for number in range(POD_COUNT)]

    def find_saves(self) -> dict[str, set[tuple[str, int]]]:
        """Return the checkpoints on each pod, complete or incomplete; a file that was replaced
        counts as another file."""
        return {
            folder.name: {
                (unit.path, unit.inode if unit.is_file else 0)
                for unit in list_folder(folder).units.values()
            }
            for folder in self.pods.checkpoint_folders()
        }

    def wait_for_save(self) -> None:
        """Wait until a process starts to write a checkpoint."""
        earlier = self.find_saves()

        def has_new() -> bool:
            saves = self.find_saves()
            return any(saves[pod] - earlier.get(pod, set()) for pod in saves)

        until("a save", has_new, pause=0.001, evidence=self.pods.logs)

    def wait_for_second_saves(self) -> None:
        """Wait until each pod that saves has started to write its second checkpoint."""
        counts: dict[str, set[tuple[str, int]]] = {}

        def have_saved() -> bool:
            for pod, saves in self.find_saves().items():
                counts.setdefault(pod, set()).update(saves)
            numbers = [len(saves) for saves in counts.values() if saves]
            return bool(numbers) and min(numbers) > 1

        until("two saves", have_saved, pause=0.005, evidence=self.pods.logs)


KILLS: list[Callable[[Run, random.Random], None]] = [
    Run.kill_program,
    Run.kill_agent,
    Run.kill_coordinator,
    Run.kill_everything,
]


def start(start_pods: StartPods, name: str, steps: int) -> Run:
    program = CASES[name]
    command = [argument.replace("STEPS", str(steps)) for argument in program.command]
    pods = start_pods(
        command,
        program=program.section,
        preload=program.preload,
        workers=POD_COUNT,
        min_workers=POD_COUNT,
    )
    agents = pods.start(POD_COUNT)
    return Run(program, steps, pods, agents, pods.pods[0])


def read_weights(s3: Store, run: Run) -> bytes:
    """Wait for the end of a run, and return the weights of its result."""
    codes = [agent.wait() for agent in run.agents]
    assert codes == [0] * POD_COUNT, run.pods.logs()
    assert f"finished at step {run.steps}" in run.pods.logs()
    return s3.get(f"{run.pods.prefix}/model/result/{run.program.weights}")


@pytest.fixture(scope="module")
def undisturbed(
    s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], bytes]:
    """The weights of an undisturbed run of a program."""

    @cache
    def train(name: str, steps: int) -> bytes:
        folder = tmp_path_factory.mktemp("undisturbed") / name
        run = start(partial(Pods, s3_environment, folder), name, steps)
        try:
            weights = read_weights(Store.from_env(), run)
            assert run.pods.start_steps() == [0]
        finally:
            run.pods.close()
        return weights

    return train


# the fast tests of test_agent.py kill a pod of the same program
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_killed_process_costs_only_the_steps_since_the_last_save(
    name: str, start_pods: StartPods, s3: Store
) -> None:
    run = start(start_pods, name, steps=60)
    run.pods.wait_for(f"rank 0 of {POD_COUNT} starts")
    run.wait_for_second_saves()

    run.kill_program(random.Random(0))
    assert read_weights(s3, run)
    assert run.pods.start_steps()[-1] > 0, run.pods.logs()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", CASES)
def test_seeded_kills_do_not_change_the_result(
    name: str, seed: int, start_pods: StartPods, s3: Store, undisturbed: Callable[[str, int], bytes]
) -> None:
    draw = random.Random(f"{name} {seed}")
    expected = undisturbed(name, 150)
    run = start(start_pods, name, 150)
    kill = KILLS[seed % len(KILLS)]

    run.pods.wait_for(f"rank 0 of {POD_COUNT} starts")
    looks = iter(range(draw.randrange(150)))
    until("a random moment", lambda: next(looks, None) is None)
    if seed // len(KILLS) % 2:
        run.wait_for_save()

    kill(run, draw)
    weights = read_weights(s3, run)
    if run.program.is_deterministic:
        assert weights == expected, run.pods.logs()
