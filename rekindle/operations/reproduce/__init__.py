"""`rekindle reproduce`: train the model of a release again, with the inputs that the release
records, and compare the weights."""
