"""The reference pipelines: each module's `build(config)` returns a Hera Workflow. Never imports torch."""
