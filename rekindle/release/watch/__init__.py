"""What watches a release: the canary, the scores it gives, and drift."""
