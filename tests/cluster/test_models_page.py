"""docs/models.md agrees with our decoder's families, and `holdfast models FOLDER` says how one model runs."""

import ast
from pathlib import Path

import pytest
import transformers as tf

from holdfast.cluster import cli, models_page
from holdfast.replicas.model.description import FAMILIES

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_has_a_row_for_every_family_of_our_decoder(name):
    (row,) = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    kind, layers, drafts = models_page.described(name)
    assert [cell.strip() for cell in row[3:6]] == [f"`{kind}`", layers, drafts]


def test_families_through_transformers_are_those_that_are_tested():
    source = (ROOT / "tests/replicas/model/test_any_model.py").read_text()
    (tested,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FAMILIES"
    ]
    section = PAGE.partition("## Through transformers")[2].partition("## ")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    names = {name: name.replace(" ", "").replace("-", "_") for name in tested}  # "gemma 3" is `gemma3`
    assert rows == [name for name, model_type in names.items() if model_type not in FAMILIES]


def test_the_command_prints_the_families_or_how_models_run(tmp_path, capsys):
    assert cli.main(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in FAMILIES)
    tf.Qwen3_5TextConfig(num_hidden_layers=8).save_pretrained(tmp_path / "hybrid")
    tf.GPT2Config().save_pretrained(tmp_path / "gpt2")
    assert cli.main(["models", str(tmp_path / "hybrid"), str(tmp_path / "gpt2")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "on our decoder; 2 layers with attention, 6 linear ones" in first
    assert "gpt2, through transformers" in second


def test_a_refused_model_says_why(tmp_path, capsys):
    tf.Qwen3NextConfig(num_hidden_layers=4, hidden_act="relu").save_pretrained(tmp_path)
    assert cli.main(["models", str(tmp_path)]) == cli.MISUSE
    assert "our decoder does not compute the activation relu" in capsys.readouterr().err
    tf.T5Config().save_pretrained(tmp_path)
    with pytest.raises(Exception, match="encoder-decoder"):
        models_page.runs_on(str(tmp_path))
