"""A program without torch for sweeps. The program finds the slope of y = 2 x by 20 steps of
gradient descent, saves after each fifth step, and reports its progress as KEP-2779 defines it.

line.py FOLDER RATE [--pause RATE] [--mlflow] [--resume CHECKPOINT]
"""

import argparse
import json
import os
import signal
import urllib.request
from pathlib import Path

STEPS = 20
SAVE_STEPS = 5
MAX_RATE = 1.0

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("rate", type=float)
parser.add_argument("--pause", type=float, help="the run with this rate waits at step 10")
parser.add_argument("--mlflow", action="store_true", help="log logged_error to MLflow")
parser.add_argument("--resume", type=Path)
args = parser.parse_args()


def report(**metrics: float) -> None:
    status = {
        "progressPercentage": 100 * step // STEPS,
        "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
    }
    token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
    request = urllib.request.Request(
        os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
        json.dumps({"trainerStatus": status}).encode(),
        {"Authorization": f"Bearer {token}"},
    )
    urllib.request.urlopen(request).close()


def save(checkpoint: Path) -> None:
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text(json.dumps({"step": step, "slope": slope}))
    (checkpoint / "done").touch()


step = 0
slope = 0.0
if args.resume:
    state = json.loads((args.resume / "state.json").read_text())
    step = state["step"]
    slope = state["slope"]
print(f"rate {args.rate:g} starts at step {step}", flush=True)
if args.rate > MAX_RATE:
    raise ValueError(f"the rate {args.rate:g} is more than {MAX_RATE:g}")

while step < STEPS:
    step += 1
    slope -= args.rate * (slope - 2)
    if step % SAVE_STEPS == 0:
        save(args.folder / f"step-{step}")
        report(step=step, error=abs(slope - 2))
    if step == STEPS // 2 and args.pause == args.rate and not args.resume:
        signal.pause()

# send two reports in quick succession, which must not lose a metric
report(final_error=abs(slope - 2))
report(step=step, tokens=1000)
if args.mlflow:
    import mlflow

    mlflow.log_metric("logged_error", abs(slope - 2))
(args.folder / "final.json").write_text(json.dumps({"slope": slope}))
