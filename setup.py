"""Puts the reference project into the wheel, as rekindle/reference; a clone uses the folders where
they are."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROJECT = ("pipelines", "steps", "configs", "images", "template")


class BuildWithReferenceProject(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in PROJECT:
                target = Path(self.build_lib, "rekindle", "reference", folder)
                shutil.copytree(
                    folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
                )


setup(cmdclass={"build_py": BuildWithReferenceProject})
