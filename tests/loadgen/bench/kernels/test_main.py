"""The check of the kernels, as it runs on a machine without a GPU: every case is verified and none is timed."""

import json

import pytest
import torch

from holdfast.loadgen.bench.kernels import __main__ as check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs small in the interpreter only")


WORDS = ("mixed", "pages of 1", "window", "softcap", "sinks", "common", "as in a graph", "norm", "silu", "rotate")
WORDS += ("FP8 pages", "product of 16 rows", "NVFP4", "experts", "routing", "gated delta", "mamba2", "draw and verify")
WORDS += ("cutoffs",)
QUICK = ("softcap", "number of FP8", "store in FP8", "norm of", "product of 1 rows, ", "routing", "draw")


def test_quick_cases_are_verified_and_none_is_timed(tmp_path, monkeypatch, capsys):
    """Each kernel has a case. `tests/kernels` runs all kernels in the interpreter."""
    every = list(check.cases("cpu", large=False))
    assert all(any(word in case.name for case in every) for word in WORDS)
    quick = [case for case in every if any(word in case.name for word in QUICK)]
    monkeypatch.setattr(check, "cases", lambda device, large: quick)
    assert check.main(["--json", str(tmp_path / "check.json")]) == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert list(found["parts"]) == [case.name for case in quick]
    assert all(lines[name]["verdict"] == "ok" for name, lines in found["parts"].items())
    assert (found["wrong"], found["failed"], found["left_out"]) == ([], {}, [])
    assert "nothing was timed" in capsys.readouterr().out


def test_a_case_that_fails_or_is_wrong_is_told_and_the_others_are_verified(tmp_path, monkeypatch):
    def cases(device, large):
        def broken():
            raise RuntimeError("out of resource: shared memory")

        def bent():
            return lambda: torch.ones(3), lambda: torch.full((3,), 2.0)

        yield check.Case("broken", 1.0, broken)
        yield check.Case("bent", 1e-2, bent)

        def varying():
            calls = iter((torch.ones(3), torch.full((3,), 1.001)))
            return lambda: next(calls), lambda: torch.ones(3)

        yield check.Case("not a number", 1.0, lambda: (lambda: torch.full((3,), torch.nan), lambda: torch.ones(3)))
        yield check.Case("varying", 1.0, varying)
        yield check.Case("good", 1e-2, lambda: (lambda: torch.ones(3), lambda: torch.ones(3)))

    monkeypatch.setattr(check, "cases", cases)
    assert check.main(["--json", str(tmp_path / "check.json")]) == 1
    found = json.loads((tmp_path / "check.json").read_text())
    assert list(found["failed"]) == ["broken"]
    assert found["wrong"] == ["bent", "not a number", "varying"]
    assert found["parts"]["good"]["good"]["verdict"] == "ok"
