"""The benchmark of steps, on Pocket and on folders that it cannot measure. What it measures is not judged here."""

import json

import numpy as np
import pytest
import transformers as tf

from holdfast.loadgen.bench import forwards
from holdfast.replicas.errors import ConfigError


def test_it_prints_and_writes_every_shape(tmp_path, capsys):
    out = tmp_path / "steps.json"
    options = [
        "--model",
        "pocket",
        "--cells",
        "32768",
        "--repeat",
        "1",
        "--threads",
        "1",
        "--only",
        "decode, 300 cached",
    ]
    assert forwards.main([*options, "--scattered", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["dtype"] == "float32"
    assert [step["name"] for step in written["steps"]] == ["decode, 300 cached", "8 decode, 300 cached"]
    for step in written["steps"]:
        assert step["over_chain"] == pytest.approx(step["step_ms"] / step["chain_ms"])
        assert step["over_weights"] == pytest.approx(step["step_ms"] / step["weights_ms"])
    assert "8 decode, 300 cached" in capsys.readouterr().out


def test_a_family_of_others_is_declined(tmp_path, capsys):
    tf.GPTNeoXConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert forwards.main(["--model", str(tmp_path)]) == 2
    assert "does not know" in capsys.readouterr().err


@pytest.mark.parametrize("scattered", [False, True])
def test_a_plan_gives_every_sequence_pages_of_its_own(scattered):
    shape = forwards.StepShape("some", 3, 4, 30)
    plan = forwards.step_plan(shape, 16, 12, scattered)
    pages = np.concatenate([write.pages for write in plan.writes])
    assert len(set(pages.tolist())) == len(pages) == 9
    assert (np.diff(pages) == 1).all() != scattered
    assert [(chunk.start, len(chunk.tokens), chunk.draw.drafts) for chunk in plan.chunks] == [(30, 4, 3)] * 3


def test_a_plan_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="needs 144 cells"):
        forwards.step_plan(forwards.StepShape("some", 3, 4, 30), 16, 8, scattered=False)
