"""The check of the kernels, as it runs on a machine without a GPU: every case is verified and none is timed."""

import json

import pytest
import torch

from holdfast.kernels import check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs small in the interpreter only")


def test_every_kernel_is_verified_and_nothing_timed(tmp_path, capsys):
    assert check.main(["--json", str(tmp_path / "check.json")]) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    names = " ".join(case["name"] for case in found["verified"])
    assert all(
        word in names for word in ("mixed", "pages of 1", "window", "softcap", "common", "norm", "silu", "rotate")
    )
    assert {case["dtype"] for case in found["verified"]} == {"float32", "bfloat16"}
    assert "timed" not in found
    assert "nothing was timed" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "same"), [(2e-5, True), (torch.nan, True), (0.0, False)])
def test_a_wrong_kernel_is_not_good(error, same):
    assert not check.Verified("x", "float32", error, 1e-5, same).good
