"""Sixty requests for tools in words that Pocket never saw: common requests to agents, and the correct calls.

Each request sees four tools, its own among them. Not here: the benchmark that uses them (`calls`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallTask:
    """A question, the declared tools, and the correct call."""

    ask: str
    tools: tuple[dict[str, Any], ...]
    expected: tuple[str, Mapping[str, Any]]


_KINDS: Mapping[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
}

# name, what it does, arguments; a kind with bars is a list of words to choose from, one with a mark may be left out
_TOOLS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("create_issue", "Open an issue in a repository", {"repository": "text", "title": "text", "labels": "texts?"}),
    ("run_sql", "Run a query against a database", {"database": "text", "query": "text", "limit": "whole?"}),
    ("send_mail", "Send an e-mail", {"to": "text", "subject": "text", "body": "text"}),
    ("book_room", "Book a meeting room", {"room": "text", "day": "text", "hours": "number"}),
    ("read_file", "Read a file of the workspace", {"path": "text", "first_line": "whole?", "last_line": "whole?"}),
    ("scale_service", "Set how many instances of a service run", {"service": "text", "instances": "whole"}),
    ("convert_currency", "Convert an amount of money", {"amount": "number", "source": "text", "target": "text"}),
    ("play_song", "Play a song", {"title": "text", "artist": "text?", "loud": "flag?"}),
    ("translate", "Translate a text", {"text": "text", "language": "german|french|polish|korean"}),
    ("set_thermostat", "Set the temperature of a room", {"room": "text", "degrees": "number"}),
    ("search_papers", "Look for scientific papers", {"topic": "text", "year": "whole?", "open_access": "flag?"}),
    ("restart_pod", "Restart a pod of a cluster", {"namespace": "text", "pod": "text", "force": "flag"}),
    ("order_pizza", "Order a pizza", {"size": "small|medium|large", "toppings": "texts"}),
    ("track_parcel", "Say where a parcel is", {"number": "text", "carrier": "text"}),
    ("add_reminder", "Remind somebody of something", {"what": "text", "minutes": "whole"}),
    ("compile_project", "Compile a project", {"target": "debug|release", "jobs": "whole?", "clean": "flag?"}),
    ("resize_image", "Change the size of an image", {"file": "text", "width": "whole", "height": "whole"}),
    ("find_recipe", "Find something to cook", {"ingredients": "texts", "vegetarian": "flag"}),
    ("grant_access", "Give a user access to a folder", {"user": "text", "folder": "text", "level": "read|write|admin"}),
    ("measure_distance", "Distance between two places", {"from_place": "text", "to_place": "text", "unit": "km|miles"}),
)

_ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Please open an issue in kestrel/engine: the docs build fails on Windows.",
     {"repository": "kestrel/engine", "title": "the docs build fails on Windows"}),
    ("File a ticket for repo quokka-web titled 'Login loops forever', label it bug and urgent.",
     {"repository": "quokka-web", "title": "Login loops forever", "labels": ["bug", "urgent"]}),
    ("An issue for lib/zstd-go please: memory leak in the decoder.",
     {"repository": "lib/zstd-go", "title": "memory leak in the decoder"}),
    ("How many users signed up? Ask the database analytics: select count(*) from signups",
     {"database": "analytics", "query": "select count(*) from signups"}),
    ("Run 'select id from invoices where paid = false' on billing, 20 rows are enough.",
     {"database": "billing", "query": "select id from invoices where paid = false", "limit": 20}),
    ("Query warehouse: show tables", {"database": "warehouse", "query": "show tables"}),
    ("Mail ada@example.org with the subject Standup and write: I am late today.",
     {"to": "ada@example.org", "subject": "Standup", "body": "I am late today."}),
    ("Send linus@example.com an e-mail, subject 'Patch', body 'Applied, thanks.'",
     {"to": "linus@example.com", "subject": "Patch", "body": "Applied, thanks."}),
    ("Write to team@example.net that the release is out; subject Release.",
     {"to": "team@example.net", "subject": "Release", "body": "the release is out"}),
    ("I need the room Turing on Thursday for 1.5 hours.", {"room": "Turing", "day": "Thursday", "hours": 1.5}),
    ("Book Aquarium next Monday, two hours.", {"room": "Aquarium", "day": "next Monday", "hours": 2}),
    ("Can we have the big hall on 4 March for 3 hours?", {"room": "the big hall", "day": "4 March", "hours": 3}),
    ("Show me src/parser/lexer.rs", {"path": "src/parser/lexer.rs"}),
    ("Open Makefile, lines 10 to 40.", {"path": "Makefile", "first_line": 10, "last_line": 40}),
    ("What is in config/routes.rb from line 7 on?", {"path": "config/routes.rb", "first_line": 7}),
    ("Scale checkout to 12 instances.", {"service": "checkout", "instances": 12}),
    ("We need only 3 instances of thumbnailer.", {"service": "thumbnailer", "instances": 3}),
    ("Bring search-api down to zero.", {"service": "search-api", "instances": 0}),
    ("How much is 250 dollars in yen?", {"amount": 250, "source": "dollars", "target": "yen"}),
    ("Convert 19.99 EUR to GBP.", {"amount": 19.99, "source": "EUR", "target": "GBP"}),
    ("Change 1200 krona to francs", {"amount": 1200, "source": "krona", "target": "francs"}),
    ("Play Paranoid Android by Radiohead.", {"title": "Paranoid Android", "artist": "Radiohead"}),
    ("Put on Hyperballad, and loud!", {"title": "Hyperballad", "loud": True}),
    ("I want to hear So What from Miles Davis", {"title": "So What", "artist": "Miles Davis"}),
    ("What is 'the cat sleeps' in German?", {"text": "the cat sleeps", "language": "german"}),
    ("Translate 'good luck' to Korean.", {"text": "good luck", "language": "korean"}),
    ("Say 'where is the station' in Polish", {"text": "where is the station", "language": "polish"}),
    ("Make the nursery 21.5 degrees.", {"room": "nursery", "degrees": 21.5}),
    ("It is cold: set the office to 23.", {"room": "office", "degrees": 23}),
    ("Cellar to 12 degrees please.", {"room": "cellar", "degrees": 12}),
    ("Find papers about sparse attention from 2024.", {"topic": "sparse attention", "year": 2024}),
    ("Are there open access articles on coral bleaching?", {"topic": "coral bleaching", "open_access": True}),
    ("Look for work on quantum error correction", {"topic": "quantum error correction"}),
    ("Restart pod web-7f9c in namespace staging by force", {"namespace": "staging", "pod": "web-7f9c", "force": True}),
    ("Gently restart redis-0 in prod.", {"namespace": "prod", "pod": "redis-0", "force": False}),
    ("The pod ingest-2 of namespace data hangs, kill it hard and restart.",
     {"namespace": "data", "pod": "ingest-2", "force": True}),
    ("A large pizza with olives and capers.", {"size": "large", "toppings": ["olives", "capers"]}),
    ("Order me a small one with mushrooms.", {"size": "small", "toppings": ["mushrooms"]}),
    ("Medium pizza: spinach, feta, onions.", {"size": "medium", "toppings": ["spinach", "feta", "onions"]}),
    ("Where is parcel 1Z999AA1 of UPS?", {"number": "1Z999AA1", "carrier": "UPS"}),
    ("Track JD0146 with DHL.", {"number": "JD0146", "carrier": "DHL"}),
    ("Has FedEx delivered 7712-3344 yet?", {"number": "7712-3344", "carrier": "FedEx"}),
    ("Remind me of the laundry in 45 minutes.", {"what": "the laundry", "minutes": 45}),
    ("In 5 minutes: tea!", {"what": "tea", "minutes": 5}),
    ("Remind us in 90 minutes to call the bank", {"what": "call the bank", "minutes": 90}),
    ("Compile a release with 8 jobs.", {"target": "release", "jobs": 8}),
    ("Do a clean debug build.", {"target": "debug", "clean": True}),
    ("Build it for release", {"target": "release"}),
    ("Resize banner.png to 1200 by 400.", {"file": "banner.png", "width": 1200, "height": 400}),
    ("Make logo.svg 64 wide and 64 high.", {"file": "logo.svg", "width": 64, "height": 64}),
    ("shrink holiday.jpg to 800x600", {"file": "holiday.jpg", "width": 800, "height": 600}),
    ("What can I cook with leeks and potatoes, without meat?",
     {"ingredients": ["leeks", "potatoes"], "vegetarian": True}),
    ("I have chicken and rice. Ideas?", {"ingredients": ["chicken", "rice"], "vegetarian": False}),
    ("A vegetarian dish with lentils", {"ingredients": ["lentils"], "vegetarian": True}),
    ("Give mira write access to /projects/atlas.", {"user": "mira", "folder": "/projects/atlas", "level": "write"}),
    ("jonas may read /shared/reports", {"user": "jonas", "folder": "/shared/reports", "level": "read"}),
    ("Make root2 an admin of /etc/vault.", {"user": "root2", "folder": "/etc/vault", "level": "admin"}),
    ("How far is it from Porto to Lisbon in km?", {"from_place": "Porto", "to_place": "Lisbon", "unit": "km"}),
    ("Miles between Boston and Albany?", {"from_place": "Boston", "to_place": "Albany", "unit": "miles"}),
    ("Distance Kyoto - Nara, kilometres", {"from_place": "Kyoto", "to_place": "Nara", "unit": "km"}),
)  # fmt: skip


def _tool(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    properties = {}
    for key, kind in arguments.items():
        kind = kind.removesuffix("?")
        properties[key] = {"type": "string", "enum": kind.split("|")} if "|" in kind else _KINDS[kind]
    required = [key for key, kind in arguments.items() if not kind.endswith("?")]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _tasks() -> Iterator[CallTask]:
    tools = [_tool(*row) for row in _TOOLS]
    for number, (ask, arguments) in enumerate(_ASKS):
        own = tools[number // 3]
        rng = random.Random(number)
        declared = [own, *rng.sample([tool for tool in tools if tool is not own], 3)]
        rng.shuffle(declared)
        yield CallTask(ask, tuple(declared), (own["function"]["name"], arguments))


TASKS: tuple[CallTask, ...] = tuple(_tasks())
