"""Verification of the files of a dataset and of the weights of a model, which come from the object
store."""
