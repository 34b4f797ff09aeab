"""A program that writes its saves in the layout MODE. When the program continues, it checks that
all files that it reads belong to the same save.

    saves.py MODE FOLDER STEPS
"""

import json
import os
import sys
import time
import zipfile
from multiprocessing.connection import Client, Listener
from pathlib import Path

mode, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
INTERVAL = 10
# layout of the saves → file names of a save, and True if each rank writes its own files
MODES = {
    "ranks": (["step_{step}_rank_{rank}.npz"], True),
    "ranks in place": (["rank{rank}.npz"], True),
    "pair": (["model_{step}.npz", "optim_{step}.npz"], False),
    "pair in place": (["model.npz", "optim.npz"], False),
    "slots": (["ckpt_{slot}.npz"], False),
    "latest": (["latest.npz"], False),
}
names, is_by_rank = MODES[mode]


def write(path: Path, state: dict) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    with zipfile.ZipFile(draft, "w") as archive:
        archive.writestr("state.json", json.dumps(state))
        archive.writestr("filler", bytes([state["step"] % 251]) * 300_000)
    os.replace(draft, path)


def read(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("state.json"))


def advance(value: int, step: int) -> int:
    return (value * 31 + step) % 1_000_000_007


class Ring:
    """Makes all ranks make the same step."""

    def __init__(self) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            listener = Listener(address, backlog=world_size)
            self.others = [listener.accept() for _ in range(world_size - 1)]
            return
        end = time.monotonic() + 30
        while True:
            try:
                self.others = [Client(address)]
                return
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.05)

    def meet(self, step: int) -> None:
        try:
            if rank:
                self.others[0].send(step)
                messages = {self.others[0].recv()}
            else:
                messages = {other.recv() for other in self.others}
                for other in self.others:
                    other.send(step)
        except (OSError, EOFError):
            print("a peer is lost", flush=True)
            sys.exit(1)
        if messages - {step}:
            print(f"MIXED {messages} {step}", flush=True)


ring = Ring() if is_by_rank else None
states = {path.name: read(path) for path in folder.glob("*.npz")}
own_state = {}
for template in names:
    pattern = template.format(step="*", rank=rank, slot="*")
    found_states = [read(path) for path in folder.glob(pattern)]
    own_state[template] = max(
        found_states, key=lambda state: state["step"], default={"step": 0, "value": 1}
    )
state = own_state[names[0]]
print(
    f"start {start} rank {rank} of {world_size} at {[item['step'] for item in own_state.values()]}",
    flush=True,
)

if is_by_rank:
    newest = {}
    for item in states.values():
        newest[item["rank"]] = max(newest.get(item["rank"], 0), item["step"])
    if len(set(newest.values())) > 1:
        print(f"MIXED {newest}", flush=True)
elif len({item["step"] for item in own_state.values()}) > 1:
    print(f"MIXED {own_state}", flush=True)

value = state["value"]
for step in range(state["step"] + 1, steps + 1):
    time.sleep(0.03)
    if ring:
        ring.meet(step)
    value = advance(value, step)
    if step % INTERVAL == 0 and (is_by_rank or rank == 0):
        for number, name in enumerate(names):
            if number:
                time.sleep(0.05)
            path = folder / name.format(step=step, rank=rank, slot=step // INTERVAL % 2)
            write(path, {"step": step, "value": value, "rank": rank})
        for path in folder.glob("*step_*") if "{step}" in names[0] else []:
            if int(path.name.split("_")[1].split(".")[0]) < step - 3 * INTERVAL:
                path.unlink(missing_ok=True)

if rank == 0:
    (folder / "final.json").write_text(json.dumps({"step": steps, "value": value}))
