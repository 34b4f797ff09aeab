"""What a stranger can send is refused in a sentence, whatever it is: the short part of `make fuzz`."""

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

CASES = {"archives": 600, "s3 requests": 1000, "manifests": 300, "http bodies": 3000, "mlflow heads": 3000}
CASES |= {
    "coordinator lines": 600,
    "checkpoints": 600,
    "snapshots": 300,
    "yaml texts": 300,
    "expressions": 100,
    "web answers": 300,
}


@pytest.mark.parametrize("name", TARGETS)
def test_generated_bytes_do_no_harm(name: str) -> None:
    assert run(name, seed=18, count=CASES[name])[0] == CASES[name]
