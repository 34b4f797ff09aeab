"""The tasks of our steps: prepare → train → evaluate → release → deploy → verify."""
