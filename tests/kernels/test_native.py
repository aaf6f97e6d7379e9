"""Which instructions our CPU kernels use, and what is said where they or a library are missing."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from c_kernels import ABLE

from holdfast.kernels import attention, attention_plan, layer, linear, linear_state, native
from holdfast.replicas.speculation import ngrams

LIBRARIES = {
    "attention": attention,
    "attention_plan": attention_plan,
    "product": linear,
    "layer": layer,
    "linear_state": linear_state,
    "ngrams": ngrams,
}


@pytest.fixture(autouse=True)
def _afterwards_the_real_processor() -> Iterator[None]:
    yield
    native.limit("auto")


def test_amx_is_used_only_where_the_operator_names_it(monkeypatch) -> None:
    """On a processor that has all instructions."""
    has = {name for names in native._NEEDS.values() for name in names} | {"amx_int8"}
    with monkeypatch.context() as every:
        every.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has, True))
        every.setattr(native, "_tiles_allowed", lambda: True)
        assert native.limit("auto") == native.level() == "avx512_bf16"
        assert native.allowed("avx512_bf16")
        assert not native.allowed("amx", ("amx_int8",))
        assert native.limit("amx") == native.level() == "amx"
        assert native.allowed("amx", ("amx_int8",))
        assert not native.allowed("amx", ("amx_bf16",))


def test_a_level_that_the_processor_lacks_is_refused(monkeypatch) -> None:
    with monkeypatch.context() as plain:
        plain.setattr(native, "_has", lambda level: level in ("avx2", "torch"))
        with pytest.raises(ValueError, match="no avx512, only avx2, torch"):
            native.limit("avx512")
        assert native.limit("torch") == native.level() == "torch"


@pytest.mark.skipif(not ABLE, reason="the kernels are for x86-64 with AVX2, on Linux")
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_of_another_source_is_not_used(name, tmp_path) -> None:
    built = LIBRARIES[name].LIBRARY
    if built.missing:
        pytest.skip("the library is not built")
    other = native.Library(name, tmp_path)
    assert "is not built; `pip install -e .`" in other.missing
    shutil.copy(built.path, tmp_path)
    assert native.Library(name, tmp_path).missing == ""
    other.source.write_text("int changed;")
    assert "was built from another" in native.Library(name, tmp_path).missing
