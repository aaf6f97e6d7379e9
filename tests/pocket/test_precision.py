"""The command that measures the accuracy of dtypes. These tests set no bar for it."""

import json

import pytest

from pocket import precision


def test_a_dtype_against_itself_and_another(tmp_path, capsys):
    out = tmp_path / "found.json"
    options = ["--count", "2", "--threads", "1", "--dtypes", "float32,float32,int8,nvfp4", "--json", str(out)]
    assert precision.main(options) == 0
    _, same, other, four = json.loads(out.read_text())["dtypes"]
    assert (same["same_turns"], same["tasks"], same["logit_error"], same["same_likeliest"]) == (2, 2, 0.0, 1.0)
    assert same["same_calls"] == same["calling"]
    assert 0.001 < other["logit_error"] < 0.2
    assert 1.0 < other["perplexity"] < 5.0
    assert 0.02 < four["logit_error"] < 0.5
    assert "int8" in capsys.readouterr().out


def test_an_unknown_dtype_is_named(capsys):
    with pytest.raises(SystemExit):
        precision.main(["--dtypes", "float32,int3"])
    assert "int3" in capsys.readouterr().err
