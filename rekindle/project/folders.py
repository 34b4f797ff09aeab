"""The folders of the packages rekindle and argolocal (`ENGINE_FOLDERS`) and of the reference
project (`REFERENCE`)."""

from pathlib import Path

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
ENGINE_FOLDERS = (PACKAGE_FOLDER, PACKAGE_FOLDER.with_name("argolocal"))
# folder of the reference project in a wheel; in a clone, the reference project is next to the
# package
BUNDLED_FOLDER = PACKAGE_FOLDER / "reference"
REFERENCE = BUNDLED_FOLDER if BUNDLED_FOLDER.is_dir() else PACKAGE_FOLDER.parent
