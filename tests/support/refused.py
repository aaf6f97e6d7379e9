"""A configuration that is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.replicas.errors import ConfigError


@contextmanager
def refused(field: str, words: str = "") -> Iterator[None]:
    """What is inside raises a ConfigError that names this field, with these words in its message."""
    with pytest.raises(ConfigError) as caught:
        yield
    assert caught.value.field == field
    assert words in caught.value.message
