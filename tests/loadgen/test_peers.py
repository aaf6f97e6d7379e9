"""How peers are started."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import llama_server, peers
from holdfast.loadgen.peers import Wanted
from holdfast.replicas.errors import ConfigError


def test_the_printed_line_can_be_pasted(capsys: pytest.CaptureFixture) -> None:
    assert holdfast(["bench", "serve-peer", "vllm", "/a model", "--venv", "/v", "--ngram", "--port", "9"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("/v/bin/vllm") :][:3] == ["/v/bin/vllm", "serve", "/a model"]
    assert "VLLM_TARGET_DEVICE=cpu" in words
    assert words[words.index("--port") + 1] == "9"
    assert "ngram" in words[words.index("--speculative-config") + 1]
    assert words[words.index("--tool-call-parser") + 1] == "hermes"
    assert words[words.index("--max-model-len") + 1] == "8192"
    more = ["--context", "99", "--tool-parser", "llama3_json"]
    assert holdfast(["bench", "serve-peer", "vllm", "m", *more]) == 0
    changed = capsys.readouterr().out
    assert "--max-model-len 99" in changed
    assert "--tool-call-parser llama3_json" in changed
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(words)


def test_as_it_comes_a_peer_has_no_drafts_and_on_a_gpu_no_cpu_settings() -> None:
    assert "ngram" not in " ".join(peers.vllm(Wanted("m")).words)
    assert "cpu" not in " ".join(peers.vllm(Wanted("m", gpu=True)).words).lower()
    assert "--continuous-batching" in peers.transformers(Wanted("m")).command
    with pytest.raises(ConfigError, match="no n-gram"):
        peers.transformers(Wanted("m", ngram=True))


@pytest.mark.parametrize("nested", [False, True])
def test_transformers_batches_no_linear_attention(nested: bool, tmp_path: Path) -> None:
    text = {"layer_types": ["linear_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    assert "--continuous-batching" not in peers.transformers(Wanted(str(tmp_path))).command


def test_llama_cpp_takes_a_gguf_file_and_its_own_server(capsys: pytest.CaptureFixture) -> None:
    assert holdfast(["bench", "serve-peer", "llama.cpp", "/m/pocket.gguf", "--venv", "/v", "--ngram"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("/v/bin/python") + 1] == llama_server.__file__
    assert words[words.index("--model") + 1] == "/m/pocket.gguf"
    assert {"--ngram", "--slots"} < set(words)
    assert "--gpu" not in words
    assert "--gpu" in peers.llama_cpp(Wanted("m.gguf", gpu=True)).words
    with pytest.raises(ConfigError, match=r"gguf_file MODEL --out"):
        peers.llama_cpp(Wanted("/m/pocket"))


def wheel() -> SimpleNamespace:
    """The names of `xllamacpp` that the server is started with; nothing else, so that another name is an error."""
    names = ("model", "cpuparams", "cpuparams_batch", "speculative")
    made = SimpleNamespace(**{name: SimpleNamespace() for name in names})
    made.speculative.ngram_mod = SimpleNamespace()
    return SimpleNamespace(
        CommonParams=lambda: made,
        llama_flash_attn_type=SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_ENABLED="on"),
        common_speculative_type=SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_MOD="mod"),
    )


def test_every_slot_of_llama_cpp_has_the_whole_context_and_every_core() -> None:
    options = ["--model", "m.gguf", "--context", "100", "--slots", "3"]
    plain = llama_server.parameters(wheel(), llama_server.parser().parse_args(options))
    assert (plain.n_parallel, plain.n_ctx) == (3, 300)
    assert plain.cpuparams.n_threads == plain.cpuparams_batch.n_threads == len(os.sched_getaffinity(0))
    assert not hasattr(plain.speculative, "types")
    drafting = llama_server.parameters(wheel(), llama_server.parser().parse_args([*options, "--ngram"]))
    assert drafting.speculative.types == ["mod"]
    assert drafting.speculative.ngram_mod.n_max == llama_server.DRAFTED


def test_its_server_needs_nothing_of_holdfast() -> None:
    asked = [sys.executable, "-I", "-S", llama_server.__file__, "--help"]  # neither packages nor this checkout
    assert "GGUF" in subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def test_what_a_peer_cannot_be_told_is_refused() -> None:
    for why, given in (("own context", {"context": 99}), ("parser of tool calls", {"tool_parser": "hermes"})):
        with pytest.raises(ConfigError, match=why):
            peers.transformers(Wanted("m", **given))
    with pytest.raises(ConfigError, match="by itself"):
        peers.llama_cpp(Wanted("m.gguf", tool_parser="hermes"))
    with pytest.raises(ConfigError, match="context"):
        Wanted("m", context=0)


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="unknown peer"):
        peers.main("sglang", Wanted("m"), start=False)
    with pytest.raises(ConfigError, match="installed there"):
        peers.main("vllm", Wanted("m", venv=Path("/nowhere")), start=True)
    missing = peers.Peer((sys.executable,), module="no_such_module")
    assert not peers._installed(missing)
    assert peers._installed(peers.Peer((sys.executable,), module="json"))
