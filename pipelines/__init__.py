"""The reference pipelines. The function `build(config)` of each module returns a Hera Workflow. No
module imports torch."""
