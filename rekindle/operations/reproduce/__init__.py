"""`rekindle reproduce`: train the model of a release again, as the release records it, and compare
the weights."""
