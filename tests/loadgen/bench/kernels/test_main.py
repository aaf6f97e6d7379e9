"""The check of the kernels, as it runs on a machine without a GPU: every case is verified and none is timed."""

import json

import pytest
import torch

from holdfast.loadgen.bench.kernels import __main__ as check
from holdfast.loadgen.bench.kernels.correctness import Verified

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs small in the interpreter only")


def test_every_kernel_is_verified_and_nothing_timed(tmp_path, capsys):
    assert check.main(["--json", str(tmp_path / "check.json")]) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    names = list(found["parts"])
    words = ("mixed", "pages of 1", "window", "softcap", "sinks", "common", "as in a graph")
    words += ("norm", "silu", "rotate", "product")
    for dtype in ("bfloat16", "float32"):
        assert all(any(word in name and dtype in name for name in names) for word in words)
    assert names[-2:] == ["draw and verify", "cutoffs of top_k, top_p and min_p"]
    assert all(found["parts"][name][name]["verdict"] == "ok" for name in names)
    assert (found["wrong"], found["failed"], found["left_out"]) == ([], {}, [])
    assert "ceilings" not in names
    assert "nothing was timed" in capsys.readouterr().out


def test_a_case_that_fails_or_is_wrong_is_told_and_the_others_are_verified(tmp_path, monkeypatch):
    def cases(device, large):
        def broken():
            raise RuntimeError("out of resource: shared memory")

        def bent():
            return lambda: torch.ones(3), lambda: torch.full((3,), 2.0)

        yield check.Case("broken", 1.0, broken)
        yield check.Case("bent", 1e-2, bent)
        yield check.Case("good", 1e-2, lambda: (lambda: torch.ones(3), lambda: torch.ones(3)))

    monkeypatch.setattr(check, "cases", cases)
    assert check.main(["--json", str(tmp_path / "check.json")]) == 1
    found = json.loads((tmp_path / "check.json").read_text())
    assert list(found["failed"]) == ["broken"]
    assert found["wrong"] == ["bent"]
    assert found["parts"]["good"]["good"]["verdict"] == "ok"


@pytest.mark.parametrize(("error", "same"), [(2e-5, True), (torch.nan, True), (0.0, False)])
def test_a_wrong_kernel_is_not_good(error, same):
    assert not Verified(error, 1e-5, same).good
