"""All rendered manifests satisfy checkov, except for rules that are skipped with a reason."""

import pytest

from tests.scan import findings


@pytest.mark.slow
def test_all_findings_of_checkov_are_explained() -> None:
    assert findings() == []
