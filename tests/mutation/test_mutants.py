"""The generated mutants cover all decisions of a module, but not the texts in the module."""

from pathlib import Path

from tests.mutation.equivalent import REASONS
from tests.mutation.mutants import draw_mutants, find_mutants
from tests.mutation.targets import TARGETS

ROOT = Path(__file__).parents[2]

SOURCE = '''"""Not 1, nor 2."""
LIMIT = 3
if TYPE_CHECKING:
    import other

def decide(value: int, other: bool = False) -> int:
    """Not 4."""
    if value < LIMIT and not other:
        raise ValueError(f"{value + 1} is below {LIMIT}")
    say("at least", 5)
    first(value, other)
    return value * 2

class Case:
    def __init__(self):
        self.value = None

    def __repr__(self):
        return str(6)

    def set(self, value):
        self.value = value
'''
CHANGES = {
    "LIMIT = 3": {"LIMIT = 2", "LIMIT = 4"},
    "def decide(value: int, other: bool = False) -> int:": {
        "def decide(value: int, other: bool = True) -> int:"
    },
    "if value < LIMIT and not other:": {
        "if value <= LIMIT and not other:",
        "if value >= LIMIT and not other:",
        "if value < LIMIT or not other:",
        "if value < LIMIT and other:",
        "if False:",
    },
    'raise ValueError(f"{value + 1} is below {LIMIT}")': {"pass"},
    "first(value, other)": {"pass", "first(other, value)"},
    "return value * 2": {"return value / 2", "return value * 1", "return value * 3", "return None"},
    "self.value = value": {"pass"},
}


def test_each_mutant_changes_one_decision() -> None:
    changes: dict[str, set[str]] = {}
    for mutant in find_mutants("module.py", SOURCE):
        changes.setdefault(mutant.before, set()).add(mutant.after)
        assert mutant.text.count("\n") == SOURCE.count("\n")
        assert SOURCE.splitlines()[mutant.line - 1].strip() == mutant.before
    assert changes == CHANGES


def test_edits_of_other_lines_of_a_module_do_not_change_the_sampled_mutants() -> None:
    drawn = draw_mutants({"module.py": SOURCE}, 7, 5)
    assert len(drawn) == 5
    assert (
        drawn
        == draw_mutants({"module.py": SOURCE}, 7, 5)
        != draw_mutants({"module.py": SOURCE}, 8, 5)
    )
    grown = draw_mutants({"module.py": SOURCE + "\n\ndef other():\n    pass\n"}, 7, 5)
    assert [(mutant.line, mutant.after) for mutant in grown] == [
        (mutant.line, mutant.after) for mutant in drawn
    ]


def test_the_targets_name_existing_modules_and_tests() -> None:
    missing = []
    for target in TARGETS.values():
        for argument in (*target.modules, *target.tests):
            file, _, test = argument.partition("::")
            if file.startswith("--"):
                continue
            if not (ROOT / file).exists() or (test and test not in (ROOT / file).read_text()):
                missing.append(argument)

    assert missing == []


def test_the_reasons_for_equivalent_mutants_name_lines_of_the_targets() -> None:
    sources = {
        Path(name).name: (ROOT / name).read_text()
        for target in TARGETS.values()
        for name in target.modules
    }
    outdated = [line for module, line, _ in REASONS if line not in sources[module]]
    assert outdated == []
