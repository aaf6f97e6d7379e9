"""What a user is shown and asked to paste, and what the first request makes of a server that fails it."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_server import Answer, Asked, models, stub_server

from holdfast.cluster import warmup
from holdfast.cluster.config import Settings
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import UnavailableError
from holdfast.router.protocol.chat import ChatBody
from holdfast.router.protocol.completions import CompletionBody
from holdfast.router.tenants import Tenant, hash_key


def curl_words(text: str) -> list[str]:
    return shlex.split(next(line for line in text.splitlines() if line.startswith("curl ")))


def test_the_line_to_paste_asks_for_a_tool_call() -> None:
    words = curl_words(warmup.banner("http://127.0.0.1:8000", "pocket", 12.3))
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["temperature"] == 0
    assert len(body["tools"]) == 2
    assert ChatBody.model_validate(body).model == "pocket"
    assert not any("Authorization" in word for word in words)


def test_it_says_where_to_look_and_how_to_talk() -> None:
    assert "http://127.0.0.1:8000/#try   or `holdfast chat`" in warmup.banner("http://127.0.0.1:8000", "pocket", 1.0)
    other = warmup.banner("http://127.0.0.1:8001", "pocket", 1.0, page=False)
    assert "`holdfast top --url http://127.0.0.1:8001`" in other
    assert "#try" not in other


@pytest.fixture
def plain(tmp_path: Path) -> Settings:
    """Settings with a copy of Pocket that has no chat template."""
    folder = Path(shutil.copytree(WEIGHTS, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    return Settings(engine=EngineConfig(model=str(folder)))


def test_a_model_without_a_chat_template_is_asked_for_a_completion(plain: Settings) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(request: Asked) -> Answer:
        if request.method == "GET":
            return models()
        asked.append((request.path, request.body))
        return Answer.of(b"{}")

    with stub_server(answer) as stub:
        assert warmup.first_request(plain, stub.url)
    ((path, body),) = asked
    assert path == "/v1/completions"
    assert CompletionBody.model_validate(body).prompt
    words = curl_words(warmup.banner("http://127.0.0.1:8000", "plain", 1.0, chats=warmup.chats(plain)))
    assert "http://127.0.0.1:8000/v1/completions" in words
    assert CompletionBody.model_validate_json(words[words.index("-d") + 1]).prompt
    assert not any("chat" in word for word in words)
    template = Settings(engine=replace(plain.engine, chat_template=str(WEIGHTS / "chat_template.jinja")))
    assert warmup.chats(template)


def test_it_says_that_tools_are_told_in_the_system_prompt() -> None:
    told = warmup.banner("http://127.0.0.1:8000", "plain", 1.0, tools_as_text=True)
    assert "engine.chat_template" in told
    assert "engine.chat_template" not in warmup.banner("http://127.0.0.1:8000", "pocket", 1.0)


def test_with_keys_the_line_has_a_place_for_one() -> None:
    words = curl_words(warmup.banner("http://127.0.0.1:8000", "pocket", 12.3, needs_key=True))
    assert "Authorization: Bearer YOUR_KEY" in words


def cannot_answer(asked: Asked) -> Answer:
    """Healthy, and serves a model that cannot answer."""
    return models() if asked.method == "GET" else Answer.of(b'{"error": {"message": "out of cells"}}', 500)


@pytest.fixture
def broken() -> Iterator[str]:
    with stub_server(cannot_answer) as stub:
        yield stub.url


def test_a_first_request_that_fails_says_why(broken: str) -> None:
    with pytest.raises(UnavailableError, match="out of cells"):
        warmup.first_request(Settings(), broken)


def test_with_keys_only_the_health_is_asked_for(broken: str) -> None:
    tenant = Tenant("acme", (hash_key("k"),))
    assert warmup.first_request(Settings(tenants=(tenant,)), broken)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(UnavailableError):
        warmup.first_request(Settings(), "http://127.0.0.1:1")
