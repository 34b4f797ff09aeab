"""Write the records of a training that is complete."""

EVENTS = [
    {"t": 100.0, "event": "run", "device": "cpu", "steps": 40},
    {"t": 100.0, "event": "join", "worker": "1", "name": "fraud-train-worker-0", "step": -1},
    {"t": 100.0, "event": "join", "worker": "2", "name": "fraud-train-worker-1", "step": -1},
    {
        "t": 101.0,
        "event": "generation",
        "members": ["fraud-train-worker-0", "fraud-train-worker-1"],
        "step": -1,
    },
    {"t": 101.0, "event": "restored", "step": 0, "tier": "none"},
    {"t": 102.0, "event": "step", "step": 10},
    {
        "t": 102.5,
        "event": "lost",
        "worker": "2",
        "name": "fraud-train-worker-1",
        "why": "connection",
    },
    {"t": 102.5, "event": "open", "generation": 2, "hard": True},
    {"t": 102.6, "event": "generation", "members": ["fraud-train-worker-0"], "step": 15},
]
COMPLETE = {"t": 105.1, "event": "complete", "step": 40}
VERDICT = {
    "t": 103.6,
    "event": "verdict",
    "code": 78,
    "message": "worker-0: the gradient is not finite",
}
