"""Nothing that is rendered is less safe than checkov asks for, without a reason."""

import pytest

from tests.scan import findings


@pytest.mark.slow
def test_checkov_finds_nothing_in_what_is_rendered_that_has_no_reason() -> None:
    assert findings() == []
