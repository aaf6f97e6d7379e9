"""How peers are started."""

import shlex
import sys
from pathlib import Path

import pytest

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import peers
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


def test_llama_cpp_takes_a_gguf_file_and_finishes_what_it_began() -> None:
    words = " ".join(peers.llama_cpp(Wanted("/m/pocket.gguf", venv=Path("/v"), ngram=True)).words)
    assert "/v/bin/python -m llama_cpp.server --model /m/pocket.gguf" in words
    assert "--interrupt_requests false" in words
    assert "prompt-lookup-decoding" in words
    assert "--n_gpu_layers -1" in " ".join(peers.llama_cpp(Wanted("m.gguf", gpu=True)).words)
    with pytest.raises(ConfigError, match=r"gguf_file MODEL --out"):
        peers.llama_cpp(Wanted("/m/pocket"))


def test_what_a_peer_cannot_be_told_is_refused() -> None:
    for why, given in (("own context", {"context": 99}), ("parser of tool calls", {"tool_parser": "hermes"})):
        with pytest.raises(ConfigError, match=why):
            peers.transformers(Wanted("m", **given))
    with pytest.raises(ConfigError, match="parser of tool calls"):
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
