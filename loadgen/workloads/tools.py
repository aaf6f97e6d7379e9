"""The tools of the scripted agents: their schemas, how a user asks for each, and what each returns.

Users say things as the shipped model learned to understand them, which any larger model does as well.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.loadgen.program import Json
from holdfast.loadgen.workloads.script import Call, Step
from holdfast.loadgen.workloads.words import INTEGERS, KINDS


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. ``takes`` and ``returns`` are ``name:kind`` words; ``asks`` are patterns over the names taken."""

    name: str
    about: str
    takes: str
    asks: tuple[str, ...]
    returns: str

    @property
    def schema(self) -> Json:
        """The tool as an OpenAI client declares it."""
        parameters = dict(word.split(":") for word in self.takes.split())
        properties = {name: {"type": "integer" if kind in INTEGERS else "string"} for name, kind in parameters.items()}
        declared = {"type": "object", "properties": properties, "required": list(parameters)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": declared},
        }

    def draw(self, rng: random.Random) -> tuple[str, Call]:
        """A call of this tool and the words that ask for it, without capital and full stop."""
        arguments: Json = {}
        for name, kind in (word.split(":") for word in self.takes.split()):
            value = KINDS[kind](rng)
            while value in arguments.values():
                value = KINDS[kind](rng)
            arguments[name] = value
        return rng.choice(self.asks).format(**arguments), Call(self.name, arguments)

    def result(self, arguments: Json) -> str:
        """The tool's result for ``arguments``, as JSON: the same for the same arguments, on any server."""
        key = json.dumps([self.name, arguments], sort_keys=True, ensure_ascii=False)
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        fields = (word.split(":") for word in self.returns.split())
        return json.dumps({name: KINDS[kind](rng) for name, kind in fields})


TRAVEL = (
    Tool("get_weather", "Get the current weather for a city.", "city:city",
         ("check the weather in {city}", "tell me the weather for {city}"),
         "temperature:days condition:weather humidity:count"),
    Tool("search_flights", "Search flights between two cities.", "origin:city destination:city",
         ("find flights from {origin} to {destination}", "search flights from {origin} to {destination}"),
         "flight:id price:count departure:clock"),
    Tool("book_hotel", "Book a hotel room.", "city:city check_in:date",
         ("book a hotel in {city} on {check_in}", "book me a hotel in {city} from {check_in}"),
         "hotel:noun booking_id:id price:count"),
    Tool("search_restaurants", "Search restaurants in a city.", "city:city",
         ("find restaurants in {city}", "search for restaurants in {city}"),
         "restaurant:noun rating:share table:clock"),
    Tool("create_itinerary", "Create a travel itinerary.", "city:city days:days",
         ("plan {days} days in {city}", "create an itinerary for {days} days in {city}"),
         "itinerary_id:id days:days status:status"),
)  # fmt: skip

REVIEW = (
    Tool("analyze_code", "Analyze the code of a file.", "path:path",
         ("analyze {path}", "analyze the code in {path}"), "issues:small complexity:share line:line"),
    Tool("run_tests", "Run the test suite.", "path:folder", ("run the tests in {path}", "run tests for {path}"),
         "passed:count failed:small seconds:share"),
    Tool("check_coverage", "Check the test coverage of a file.", "path:path",
         ("check the coverage of {path}", "check coverage of {path}"), "coverage:share missed:count"),
    Tool("lint_code", "Lint a file.", "path:path", ("lint {path}", "run the linter on {path}"),
         "warnings:small errors:small first:line"),
    Tool("review_pr", "Review a pull request.", "pr_number:number",
         ("review PR {pr_number}", "review pull request {pr_number}"), "comments:small verdict:verdict file:path"),
)  # fmt: skip

DATA = (
    Tool("query_db", "Run a query against the database.", "query:sql",
         ("run the query {query}", "query the database: {query}"), "rows:count total:number"),
    Tool("create_chart", "Create a chart from a dataset.", "dataset:noun chart_type:chart",
         ("create a {chart_type} chart of {dataset}", "plot {dataset} as a {chart_type} chart"),
         "chart_id:id points:count"),
    Tool("export_data", "Export a dataset to a file.", "dataset:noun format:format",
         ("export {dataset} as {format}", "save {dataset} as {format}"), "path:path rows:count"),
    Tool("run_pipeline", "Run a data pipeline.", "pipeline:symbol",
         ("run the {pipeline} pipeline", "start the pipeline {pipeline}"), "run_id:id status:status started:clock"),
    Tool("compute_stats", "Compute statistics of a column.", "dataset:noun column:column",
         ("compute the stats of {column} in {dataset}", "summarize {column} from {dataset}"),
         "mean:share median:share max:number"),
)  # fmt: skip

CODING = (
    Tool("read_file", "Read the contents of a file.", "path:path", ("read {path}", "show me {path}"),
         "content:line lines:count"),
    Tool("search_code", "Search the code base for a text pattern.", "query:symbol",
         ("search the code for {query}", "find {query} in the code"), "file:path line:count text:line"),
    Tool("write_file", "Write content to a file.", "path:path content:sentence",
         ('write "{content}" to {path}', 'create {path} with the content "{content}"'), "status:status bytes:count"),
    Tool("run_command", "Run a command.", "command:command", ("run `{command}`", "execute `{command}`"),
         "exit_code:small output:line"),
    Tool("get_diagnostics", "Get compiler and linter messages for a file.", "path:path",
         ("get the diagnostics for {path}", "get diagnostics for {path}"), "errors:small message:line"),
)  # fmt: skip

COMMAND = CODING[3]
"""The one tool of an agent that works in a shell."""

WEB_SEARCH = Tool("web_search", "Search the web.", "query:topic", ("search the web for {query}", "look up {query}"),
                  "title:sentence url:path snippet:line")  # fmt: skip

EVERY = {tool.name: tool for tool in (*TRAVEL, *REVIEW, *DATA, *CODING, WEB_SEARCH)}


def result(tool: str, arguments: Json) -> str:
    """The result of ``tool``; for an unknown tool, an error."""
    if tool not in EVERY:
        return json.dumps({"error": "unknown tool", "tool": tool})
    return EVERY[tool].result(arguments)


def step(tools: Sequence[Tool], rng: random.Random) -> Step:
    """A message that asks for ``chosen`` in this order; the closing text quotes what they return."""
    asks, calls = zip(*(tool.draw(rng) for tool in tools), strict=True)
    opening = rng.choice(("", "first, ", "please ")) if len(asks) > 1 else ""
    text = opening + rng.choice((", then ", " and then ", ", after that ")).join(asks)
    return Step(text[:1].upper() + text[1:] + ".", calls, " ".join(_report(call) for call in calls))


def _report(call: Call) -> str:
    fields = json.loads(result(call.tool, call.arguments))
    return "The " + ", ".join(f"{name.replace('_', ' ')} is {value}" for name, value in fields.items()) + "."
