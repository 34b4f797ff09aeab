"""A release: whether a model becomes one, its files, what it answers, and how the traffic comes to it and goes back."""
