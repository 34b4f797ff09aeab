"""Sweeps: the choice of hyper-parameters, successive halving, and the training of trials."""
