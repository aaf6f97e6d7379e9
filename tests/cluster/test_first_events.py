"""What `first_events` takes for the first text of a stream."""

import time

import pytest
from fake_backend import World
from first_events import FORMATS, first_text


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_text_of_each_format_is_found(name: str) -> None:
    with World().served() as address:
        host, _, port = address.removeprefix("http://").partition(":")
        began = time.monotonic()
        assert began < first_text((host, int(port)), FORMATS[name], "hello") < time.monotonic()
