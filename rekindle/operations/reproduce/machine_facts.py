"""Print the facts of this machine that the bits of a training depend on. The program machine_facts
runs in a separate process, because it imports torch.

    python -m rekindle.operations.reproduce.machine_facts '["steps.digits", {}, {}, ""]'

The argument is a JSON list: the module of the workload, the settings `model` and `train`, and the
family.
"""

import json
import sys

from argolocal.common.json_text import to_json
from rekindle.training.numerics import compute_fingerprint, prepare_device
from rekindle.training.spec import TrainingSpec


def main() -> None:
    local_spec = TrainingSpec.for_local_training(*json.loads(sys.argv[1]))
    print(to_json(compute_fingerprint(local_spec, prepare_device(local_spec))))


if __name__ == "__main__":
    main()
