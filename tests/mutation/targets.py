"""The modules to mutate, and the fast tests that must detect the mutants."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The modules of one target, and the pytest arguments that select their tests."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


TRAINING = "rekindle/training"
TESTS = "tests/rekindle/training"
TARGETS = {
    "gate": Target(
        (
            "rekindle/gate.py",
            *(f"rekindle/release/{name}.py" for name in ("evaluation", "examples", "bootstrap")),
        ),
        (
            "tests/rekindle/test_gate.py",
            *(f"tests/rekindle/release/test_{name}.py" for name in ("evaluation", "bootstrap")),
        ),
    ),
    "reduction": Target(
        (f"{TRAINING}/group/tree.py", f"{TRAINING}/group/reduction.py"),
        tuple(f"{TESTS}/group/test_{name}.py" for name in ("tree", "reduction", "group")),
    ),
    "checkpoint": Target(
        tuple(
            f"{TRAINING}/checkpoint/{name}.py"
            for name in ("manager", "manifest", "checkpoint_retention", "interval")
        ),
        (
            *(
                f"{TESTS}/checkpoint/test_{name}.py"
                for name in ("interval", "manifest", "checkpoint_retention", "manager", "durable")
            ),
            "--deselect",
            f"{TESTS}/checkpoint/test_durable.py::test_a_failing_store_neither_delays_training_nor_loses_state",
        ),
    ),
    "membership": Target(
        (f"{TRAINING}/membership/state_machine.py",),
        tuple(
            f"{TESTS}/membership/test_{name}.py"
            for name in ("state_machine", "timeouts", "random_events")
        ),
    ),
    "promotion": Target(
        ("rekindle/release/promotion.py",), ("tests/rekindle/release/test_promotion.py",)
    ),
    "cache": Target(
        ("rekindle/cache/key.py", "rekindle/cache/code.py", "rekindle/cache/entries.py"),
        (
            *(f"tests/rekindle/cache/test_{name}.py" for name in ("code", "key", "entries")),
            "--deselect",
            "tests/rekindle/cache/test_key.py::test_the_key_changes_exactly_with_code_inputs_data_or_image",
        ),
    ),
    "scheduler": Target(
        ("argolocal/engine/scheduler.py",),
        ("tests/argolocal/engine", "tests/argolocal/state/test_locks.py"),
    ),
}
