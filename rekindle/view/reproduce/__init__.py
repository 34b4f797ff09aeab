"""`rekindle reproduce`: train the model of a release again, from the release alone, and compare the weights."""
