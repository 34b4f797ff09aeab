"""A program for a job of any framework: rank 0 adds up the numbers of all ranks, and makes 20
steps. If the program starts without a checkpoint, it waits at step 10 until a pod is killed.

sums.py KIND FOLDER NODE_RANK [CHECKPOINT]
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

kind, folder, node, *checkpoints = sys.argv[1:]
env = os.environ

# read the environment variables that the operator of each framework sets
host = "127.0.0.1"
port = "0"
rank = 0
world_size = 1
if kind == "XGBoostJob":
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    host, port = env["MASTER_ADDR"], env["MASTER_PORT"]
elif kind == "JAXJob":
    rank, world_size = int(env["PROCESS_ID"]), int(env["NUM_PROCESSES"])
    host, port = env["COORDINATOR_ADDRESS"], env["COORDINATOR_PORT"]
elif kind == "PaddleJob":
    rank, world_size = int(node), int(env["PADDLE_NNODES"])
    host, port = env["PADDLE_MASTER"].split(":")
elif kind == "MPIJob":
    assert Path(env["OMPI_MCA_orte_default_hostfile"]).read_text()
elif kind == "TFJob":
    config = json.loads(env["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    if task["type"] == "ps":
        print(f"node {node} serves", flush=True)
        while True:
            signal.pause()
    order = cluster["chief"] + cluster["worker"]
    rank, world_size = order.index(cluster[task["type"]][task["index"]]), len(order)
    host, port = order[0].split(":")

step = json.loads(Path(checkpoints[0], "state.json").read_text())["step"] if checkpoints else 0
print(f"node {node}: rank {rank} of {world_size} starts at step {step}", flush=True)
assert rank == int(node)

if rank:
    while True:
        try:
            link = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.02)
    link.send(bytes([rank + 1]))
    if not link.recv(1):
        raise ConnectionError("rank 0 has ended")
    sys.exit()

server = socket.create_server((host, int(port)))
links = [server.accept()[0] for _ in range(world_size - 1)]
total = 1 + sum(link.recv(1)[0] for link in links)
while step < 20:
    step += 1
    if step % 5 == 0:
        checkpoint = Path(folder, f"step-{step}")
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text(json.dumps({"step": step}))
        (checkpoint / "done").touch()
    if step == 10 and not checkpoints:
        signal.pause()

Path(folder, "final.json").write_text(json.dumps({"total": total}))
for link in links:
    link.send(b".")
