"""Commands about runs of the past."""
