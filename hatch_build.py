"""Puts the reference project into the wheel, as rekindle/reference; a clone uses the folders where they are."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROJECT = ("pipelines", "steps", "configs", "images")


class ReferenceProject(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        files = (path for folder in PROJECT for path in Path(self.root, folder).rglob("*"))
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts:
                build_data["force_include"][str(path)] = f"rekindle/reference/{path.relative_to(self.root)}"
