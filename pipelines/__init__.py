"""The reference pipelines: `build(config)` of each module returns a Hera Workflow. No module
imports torch."""
