"""The costs of a run: prices of nodes, requests of pods, and the costs of trainings and steps."""
