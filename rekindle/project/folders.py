"""The folders of the packages rekindle and argolocal (`ENGINE`) and of the reference project
(`REFERENCE`)."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ENGINE = (PACKAGE, PACKAGE.with_name("argolocal"))
# this folder exists in a wheel; in a clone, the reference project is next to the package
BUNDLED = PACKAGE / "reference"
REFERENCE = BUNDLED if BUNDLED.is_dir() else PACKAGE.parent
