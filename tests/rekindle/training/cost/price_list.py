"""A price list with prices of a CPU, on demand and as spot, and of a GPU."""

PRICES = {
    "currency": "EUR",
    "default": "cpu",
    "spot": [{"labels": {"spot": "yes"}}],
    "classes": {
        "cpu": {
            "on_demand": {"cpu_hour": 3600, "gib_hour": 0},
            "spot": {"cpu_hour": 900, "gib_hour": 0},
        },
        "gpu": {
            "selector": {"resource": "gpu/gpu"},
            "on_demand": {"cpu_hour": 0, "gib_hour": 0, "gpu_hour": 3600},
        },
    },
}  # a second of a CPU costs 1 on demand, and 0.25 as spot
