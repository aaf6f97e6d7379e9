"""Which instructions our CPU kernels use where nobody names any."""

from collections.abc import Iterator

import pytest
import torch

from holdfast.kernels import native


@pytest.fixture
def every_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor that has all instructions, and afterwards the real one."""
    needed = {name for names in native._NEEDS.values() for name in names}
    native.features.cache_clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(needed, True))
    monkeypatch.setattr(native, "_tiles_allowed", lambda: True)
    yield
    monkeypatch.undo()
    native.features.cache_clear()
    native.limit("auto")


def test_amx_is_used_only_where_the_operator_names_it(every_level: None) -> None:
    assert native.limit("auto") == "avx512_bf16"
    assert not any(native.features(native.level())[name] for name in native._NEEDS["amx"] if "amx" in name)
    assert native.limit("amx") == "amx"
    assert native.features(native.level())["amx_tile"]
