"""`docs/api.md` names the paths, fields, headers and errors that there are."""

import re
from pathlib import Path

from fake_backend import World

from holdfast.router.config import PLACEMENT_HEADERS, PROGRAM_HEADERS
from holdfast.router.entry.http import AnswerHeaders
from holdfast.router.protocol.anthropic import MessagesBody
from holdfast.router.protocol.body import IGNORED
from holdfast.router.protocol.chat import ChatBody
from holdfast.router.protocol.completions import CompletionBody
from holdfast.router.protocol.errors import TABLE
from holdfast.router.protocol.responses import ResponsesBody
from holdfast.router.protocol.sessions import AppendBody, ForkBody, OpenBody, QueryBody, QuestionBody
from holdfast.router.protocol.turn import ReplyFields

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip(" |") for cell in line] for line in lines][1:]


def fields(name: str) -> set[str]:
    """The fields in the first column of a section's table."""
    return set(re.findall(r"`(\w+)`", " ".join(cells[0] for cells in rows(section(name)))))


def test_every_path_is_on_it_and_exists() -> None:
    told = {tuple(cells[0].strip("`").split(" ")) for cells in rows(section("Paths"))}
    assert told == World().operations()


def test_every_field_of_a_body_is_on_it_and_exists() -> None:
    told = fields("A chat completion")
    assert told == set(ChatBody.model_fields)
    assert set(CompletionBody.model_fields) - told == {"prompt", "echo"}


def test_every_field_of_a_response_is_on_it_and_exists() -> None:
    """Those that chat has too stand there; `max_tokens` is refused."""
    told = fields("A response")
    known = set(ResponsesBody.model_fields)
    assert told - known == {"conversation"}
    assert known - told <= set(ChatBody.model_fields)


def test_every_field_of_a_message_is_on_it_and_exists() -> None:
    told = fields("A message")
    assert told | {"service_tier"} == set(MessagesBody.model_fields)


def test_every_field_of_a_sessions_body_is_on_it_and_exists() -> None:
    told = fields("A session")
    sampling = set(ReplyFields.model_fields)
    known = {name for body in (OpenBody, AppendBody, QueryBody, QuestionBody, ForkBody) for name in body.model_fields}
    assert told <= known
    assert known - told <= sampling


def test_the_fields_that_are_taken_for_nothing_are_on_it() -> None:
    told = set(re.findall(r"`(\w+)`", section("Fields that are not known").split("**At the top**")[1].split("\n- ")[0]))
    assert told == IGNORED


def test_every_error_is_on_it() -> None:
    told = sorted(tuple(cell.strip("`") for cell in cells[:3]) for cells in rows(section("Errors")))
    assert told == sorted((str(row.status), row.type, row.code or "null") for row in TABLE.values())


def test_every_header_of_an_answer_is_on_it() -> None:
    told = {cells[0].strip("`") for cells in rows(section("Headers"))}
    at_times = {"same_draw": True, "replayed": True, "tools_as_text": True}
    headers = AnswerHeaders("r", age_s=0.0, server_timing="x", skipped="x", **at_times)
    sent = {name.decode() for name, _ in headers.encode()}
    some = {"age", "x-holdfast-repeat", "idempotent-replayed", "x-holdfast-tools"}  # of no answer to a first request
    limits = "x-ratelimit-*`, `anthropic-ratelimit-*"  # their names: test_quotas
    assert told == sent | {"retry-after", limits}
    body = {"model": "pocket", "input": "hello", "tools": [{"type": "web_search"}]}
    assert set(World().call("POST", "/v1/responses", json=body).headers) & told == sent - some


def test_the_ways_to_name_a_program_are_on_it() -> None:
    text = section("Which program is it?").lower()
    assert all(f"`{name}`" in text for name in (*PROGRAM_HEADERS, *PLACEMENT_HEADERS))


def test_the_first_pages_say_that_the_same_prompt_gets_the_same_answer() -> None:
    """Who comes from elsewhere would take it for a fault; so what varies it stands beside it."""
    for page in ("README.md", "docs/index.md"):
        [told] = [each for each in re.split(r"\n\n|\n- ", (ROOT / page).read_text()) if "same prompt" in each]
        assert {"`seed`", "`n`", "`prompt_seed: false`"} <= set(re.findall(r"`[^`]+`", told)), page
