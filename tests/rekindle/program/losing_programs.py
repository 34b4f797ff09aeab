"""The source code of programs that lose work in different ways, and of a program that continues
correctly."""

# the beginning of all programs, which defines `folder`, `checkpoint` ("" without a checkpoint) and
# a function `save`
START = """
import json, os, sys, time
from pathlib import Path

folder, checkpoint = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""

def save(step, name="step-{}.json"):
    path = folder / name.format(step)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"step": step}))
    os.replace(temporary, path)
"""

CONTINUES = """
first = json.loads(Path(checkpoint).read_text())["step"] if checkpoint else 0
for step in range(first + 1, 1000):
    time.sleep(0.1)
    save(step)
"""
NEVER_SAVES = """
print("step 1", flush=True)
time.sleep(60)
"""
ENDS_WITHOUT_SAVE = """
print("done")
"""
SAVES_UNKNOWN_NAME = """
save(1, "model.dat")
"""
SAVES_IN_PLACE = """
for step in range(8):
    (folder / "model.pkl").write_text("x" * (step + 10))
    time.sleep(0.4)
"""
SAVES_JSON_IN_PLACE = SAVES_IN_PLACE.replace("model.pkl", "state.json").replace('"x" *', "'1' *")
SAVES_ELSEWHERE = """
Path("snapshot.pt").write_text("weights")
"""
SAVES_TORN = """
for step in range(1, 1000):
    with open(folder / "latest.json", "w") as file:
        for part in range(10):
            file.write("x" * part)
            file.flush()
            time.sleep(0.05)
"""
IGNORES_RESUME = """
for step in range(1, 1000):
    time.sleep(0.1)
    save(step)
"""
BEGINS_AGAIN = """
if checkpoint:
    Path(checkpoint).read_text()
for step in range(1, 1000):
    time.sleep(0.1)
    save(step)
"""
FAILING_PROGRAM = """
raise ValueError("no data")
"""
