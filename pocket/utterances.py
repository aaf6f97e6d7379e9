"""Texts of conversations: requests for a tool, with the arguments that they determine, and turns without a tool.

A `Request` is a user's sentence and its call. Turns without a tool are small talk, descriptions of the model, system
prompts, and refusals.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from pocket.kinds import KINDS, Value
from pocket.tools import Json, Parameter, Tool, in_words
from pocket.words import Lexicon, listed

_QUOTED_KINDS = frozenset(("text", "command", "sql", "expression"))
_OPENINGS = (
    "",
    "",
    "",
    "",
    "",
    "please ",
    "can you ",
    "could you ",
    "I need you to ",
    "I want to ",
    "I'd like to ",
    "would you ",
    "now ",
    "help me ",
    "hey, ",
    "Hi! ",
    "next, ",
    "go ahead and ",
    "ok, ",
)
_CLOSINGS = ("", "", "", "", "", " please", " for me", ", thanks", ", please", " now")
_BY_NAME = ("use {n}", "call {n}", "run {n}", "call the {n} tool", "use the tool {n}")
_SHELL_INTENTS: tuple[tuple[str, str], ...] = (
    ("list the files in {d};what is in the folder {d};show me what {d} contains", "ls {d}"),
    ("show the contents of {p};print {p};what does {p} contain", "cat {p}"),
    ("count the lines of {p};how many lines does {p} have", "wc -l {p}"),
    ("search for {w} in {d};find every mention of {w} under {d}", "grep -rn {w} {d}"),
    ("delete {p};remove the file {p}", "rm {p}"),
    ("make a folder {d};create the directory {d}", "mkdir -p {d}"),
    ("run the script {p};start {p} with python", "python {p}"),
    ("run the tests in {d};are the tests in {d} green", "pytest -q {d}"),
    ("install the package {w};install {w}", "pip install {w}"),
    ("what is the git status;show the git status;what has changed in git", "git status"),
    ("which directory am I in;where am I", "pwd"),
    ("how much disk space is free;check the free disk space", "df -h"),
    ("switch to the branch {w};check out the branch {w}", "git checkout {w}"),
    ("copy {p} to {d}", "cp {p} {d}"),
    ("move {p} to {d}", "mv {p} {d}"),
    ("show the first {n} lines of {p}", "head -n {n} {p}"),
    ("show the last {n} lines of {p}", "tail -n {n} {p}"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """A user's sentence (no opening, no full stop) and its call, with arguments in the order of the text."""

    text: str
    tool: Tool
    arguments: Json
    question: bool = False


def mention(value: Value) -> str:
    """``value`` as part of a sentence."""
    if isinstance(value, list):
        return ", ".join(value[:-1]) + " and " + value[-1]
    return str(value)


def clause(p: Parameter, value: Value, rng: random.Random, *, by_kind: bool) -> str:
    """A phrase that states one argument, in the wording of its kind or with the parameter's name."""
    words, text = p.words, mention(value)
    if p.kind == "boolean":
        on = ("with {w} on", "enable {w}", "{w} enabled", "{w}: yes", "with {w} true", "set {w} to true")
        off = (
            "with {w} off",
            "disable {w}",
            "{w} disabled",
            "{w}: no",
            "with {w} false",
            "set {w} to false",
            "without {w}",
        )
        return rng.choice(on if value else off).format(w=words)
    if by_kind and p.kind != "enum" and KINDS[p.kind].clauses:
        return rng.choice(KINDS[p.kind].clauses).format(v=text)
    if p.kind in _QUOTED_KINDS or (p.kind == "query" and rng.random() < 0.5):
        return rng.choice(('with {w} "{v}"', "{w} '{v}'", '{w}: "{v}"', 'with the {w} "{v}"')).format(w=words, v=text)
    patterns = [
        "with {w} {v}",
        "{w} {v}",
        "{w}: {v}",
        "with the {w} {v}",
        "use {v} as {w}",
        "using {w} {v}",
        "{w} = {v}",
        "set {w} to {v}",
        "{w} is {v}",
    ]
    if p.kind in ("integer", "number"):
        patterns += ["{v} {w}", "with {v} {w}", "{w} of {v}"]
    if p.kind == "enum":
        patterns += ["{v} {w}", "with {v} {w}", "{w} should be {v}"]
    if rng.random() < 0.05:
        words = p.name
    return rng.choice(patterns).format(w=words, v=text)


def chosen_arguments(tool: Tool, rng: random.Random, lex: Lexicon, forced: set[int]) -> Json:
    """Values for all required, all forced and some optional parameters. No two strings are equal."""
    arguments: Json = {}
    for index, p in enumerate(tool.parameters):
        if p.required or index in forced or rng.random() < 0.3:
            value = p.draw(rng, lex)
            while value in arguments.values() and p.kind not in ("boolean", "enum"):
                value = p.draw(rng, lex)
            arguments[p.name] = value
    return arguments


def ask(tool: Tool, rng: random.Random, lex: Lexicon) -> Request:
    """A request for ``tool`` whose text holds every argument."""
    if tool.parameters[0].kind == "command" and "{0}" in tool.requests[0] and rng.random() < 0.5:
        return _shell_request(tool, rng, lex)
    pattern = rng.choice(tool.requests)
    if rng.random() < 0.06:
        pattern = rng.choice(_BY_NAME).format(n=tool.name)
    placed = [int(digit) for digit in re.findall(r"\{(\d)\}", pattern)]
    arguments = chosen_arguments(tool, rng, lex, set(placed))
    values = [mention(arguments[p.name]) if p.name in arguments else "" for p in tool.parameters]
    text = pattern.format(*values) if placed else pattern
    clauses, rest = stated(tool, arguments, rng, set(placed))
    stated_arguments = {tool.parameters[i].name: arguments[tool.parameters[i].name] for i in placed} | rest
    question = bool(re.match(r"(what|how|is|which|where|who|do|are|any) ", pattern)) or "what's" in pattern
    return Request(text + clauses, tool, stated_arguments, question)


def stated(tool: Tool, arguments: Json, rng: random.Random, placed: set[int]) -> tuple[str, Json]:
    """Clauses for the arguments that the sentence lacks, sometimes shuffled, and these arguments in that order."""
    rest = [p for i, p in enumerate(tool.parameters) if i not in placed and p.name in arguments]
    kinds = [p.kind for p in tool.parameters if p.name in arguments]
    if rng.random() < 0.3:
        rng.shuffle(rest)
    text = ""
    for p in rest:
        telling = len(tool.parameters) == 1 or tells_kind(p)
        by_kind = telling and kinds.count(p.kind) == 1 and rng.random() < 0.4
        joint = rng.choice((" ", " ", ", ", ", ", " and " if text else " "))
        text += joint + clause(p, arguments[p.name], rng, by_kind=by_kind)
    return text, {p.name: arguments[p.name] for p in rest}


def tells_kind(p: Parameter) -> bool:
    """Whether the parameter's name shows its kind, so that a clause can omit the name."""
    return p.kind == "enum" or p.name.endswith(("_id", *KINDS[p.kind].names))


def _shell_request(tool: Tool, rng: random.Random, lex: Lexicon) -> Request:
    """A request in words whose usual answer is a shell command."""
    intents, command = rng.choice(_SHELL_INTENTS)
    slots = {
        "d": KINDS["folder"].draw(rng, lex),
        "p": KINDS["path"].draw(rng, lex),
        "w": lex.noun(rng),
        "n": rng.randint(1, 99),
    }
    text = rng.choice(intents.split(";"))
    question = text.startswith(("what ", "how ", "which ", "where ", "are "))
    arguments = {tool.parameters[0].name: command.format(**slots)}
    return Request(text.format(**slots), tool, arguments, question)


def sentence(request: Request, rng: random.Random) -> str:
    """The request as a user's whole message."""
    text = request.text
    starts_with_value = mention_starts(request)
    if request.question:
        text = rng.choice(("", "", "", "hi, ", "hey, ", "quick question: ", "tell me, ")) + text
        end = rng.choice(("?", "?", "?", ""))
    else:
        opening = "" if starts_with_value else rng.choice(_OPENINGS)
        text = opening + text
        is_question = opening in ("can you ", "could you ", "would you ")
        quoted = any(p.kind in _QUOTED_KINDS for p in request.tool.parameters)
        text += "" if quoted else rng.choice(_CLOSINGS)
        end = "?" if is_question else ("" if quoted else rng.choice((".", ".", "", "!")))
    if not (starts_with_value and text == request.text) and rng.random() < 0.75:
        text = text[:1].upper() + text[1:]
    return text + end


def mention_starts(request: Request) -> bool:
    """Whether the text begins with an argument, whose case must stay."""
    return any(request.text.startswith(mention(v)) for v in request.arguments.values() if not isinstance(v, bool))


def follow_up(tool: Tool, rng: random.Random) -> str:
    """A request for ``tool`` on something already known: ``cancel it``."""
    head = in_words(tool.name).split(" ", 1)
    thing = head[1] if len(head) > 1 else "one"
    return rng.choice(("{v} it", "{v} that {t}", "{v} this {t}", "{v} the {t}")).format(
        v=tool.requests[0].split(" the ")[0] if " the " in tool.requests[0] else head[0], t=thing
    )


# ---- without a tool ----

SMALL_TALK: tuple[tuple[str, str], ...] = (
    (
        "Hello;Hi;Hey;Hi there;Hello!;Hey there;Good morning;Good evening;Hello there!",
        "Hello! How can I help you?",
    ),
    (
        "How are you?;How are you doing?;How is it going?;how are you today",
        "I am doing well, thank you. What can I do for you?",
    ),
    ("Thanks;Thank you;Thanks a lot!;Thank you very much;Great, thanks;thx", "You are welcome!"),
    ("Bye;Goodbye;See you later;That is all;Bye!;That's all for now", "Goodbye! Come back any time."),
    (
        "Who are you?;What are you?;What is your name?;Tell me about yourself;who am I talking to",
        "I am Pocket, a small assistant that calls tools.",
    ),
    ("Are you a robot?;Are you human?;Are you an AI?;Is this a bot?", "I am a small language model."),
    ("Ok;Okay;Alright;Good;I see;Great;Perfect;Nice;Cool", "Is there anything else I can do for you?"),
    (
        "You are wrong;That is not right;That's wrong;No, that is not what I meant",
        "I am sorry. Please tell me what you need.",
    ),
    (
        "Tell me a joke;Do you know a joke?;Make me laugh;say something funny",
        "Why did the cache cross the road? It had already been on the other side.",
    ),
    (
        "I am tired;I feel sad;I had a bad day;I'm bored",
        "I am sorry to hear that. I hope it gets better soon.",
    ),
    ("What is the meaning of life?;Why are we here?", "I do not know, but I am glad to help where I can."),
    (
        "Do you like music?;What is your favorite color?;Do you have feelings?;Do you dream?",
        "I am a small model, so I have no opinion about that.",
    ),
    (
        "Write me a poem;Write a poem about the sea;Write a story;Tell me a story",
        "I am too small to write well, but I can call tools for you.",
    ),
    ("Wait a moment;One second;Hold on;Let me think", "Take your time."),
    ("Yes;Yes please;Sure;No;No thanks;Not now", "All right. Tell me what you need."),
    (
        "Explain gravity;What is photosynthesis?;Who was Napoleon?;Explain how TCP works;What is a prime number?;"
        "What is the capital of France?;Why is the sky blue?",
        "I am a small model and do not know that for sure.",
    ),
)

CAPABILITY = listed(
    "What can you do?;How can you help me?;What are you able to do?;Help;"
    "What tools do you have?;which tools can you use",
    ";",
)

OFF_TOPIC = listed(
    """explain {q};what do you think about {q};write an essay about {q};who invented the {n};why is the {n} {a};
what is a {n};tell me a story about a {n};how does a {n} work;do you like {q};what is the best {n};
should I buy a {a} {n};is {q} important;describe a {a} {n};give me advice about {q};what does {w} mean;
who is {p};how old is {p};compare a {n} and a {m};why do people like {q};is the {n} better than the {m}""",
    ";",
)

_ROLES = listed(
    """a helpful assistant|an assistant with tools|a coding agent|a travel agent|a data analyst|a research assistant|
a customer support agent|a shell agent|a personal assistant|a concise assistant|a software engineer|an operations agent|
an expert in {n} questions|the assistant of {c}|a friendly {n} assistant""",
    "|",
)

_RULES = listed(
    """Use the tools when they help.|Answer briefly.|Be polite.|Call a tool whenever one fits.|Do not guess.|
Think before you act.|Always answer in English.|Today is {d}.|The user is called {p}.|You work for {c}.|
Never share a password.|If no tool fits, say so.|Ask when something is missing.|Keep answers under {i} words.|
Quote the results of tools.|Your region is {c}.|The current user id is {id}.|Prefer short answers.|
Only handle {n} requests.|Log every {n}.|Do not change a {n} without permission.|Refer to the {n} policy when asked.""",
    "|",
)


def system_prompt(rng: random.Random, lex: Lexicon) -> str:
    """A system prompt of one to several sentences, sometimes a list of rules."""

    def filled(text: str) -> str:
        return text.format(
            n=lex.noun(rng),
            c=lex.city(rng),
            p=lex.person(rng),
            i=rng.randint(10, 200),
            d=KINDS["date"].draw(rng, lex),
            id=KINDS["id"].draw(rng, lex),
        )

    role = filled("You are " + rng.choice(_ROLES) + ".")
    rules = [filled(rule) for rule in rng.sample(_RULES, rng.choice((0, 0, 1, 1, 2, 3, 6)))]
    if len(rules) > 2 and rng.random() < 0.5:
        return role + "\n" + "\n".join(f"- {rule}" for rule in rules)
    return " ".join([role, *rules])


def capability(tools: tuple[Tool, ...]) -> str:
    """The model's answer to a question about its abilities."""
    if not tools:
        return "I can chat a little, and I can call tools when you give me some."
    return f"I can help with: {', '.join(in_words(tool.name) for tool in tools)}."


def decline(tools: tuple[Tool, ...]) -> str:
    """The answer to a request that no tool fits."""
    if not tools:
        return "I have no tool for that."
    return f"I have no tool for that. I can help with: {', '.join(in_words(tool.name) for tool in tools)}."


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A user line and its answer."""
    lines, answer = rng.choice(SMALL_TALK)
    text = rng.choice(lines.split(";"))
    return (text.lower() if rng.random() < 0.2 else text), answer


def off_topic(rng: random.Random, lex: Lexicon) -> str:
    """A question that no tool answers."""
    text = rng.choice(OFF_TOPIC).format(
        q=lex.phrase(rng, 3),
        n=lex.noun(rng),
        m=lex.noun(rng),
        a=rng.choice(lex.adjectives),
        w=lex.invented(rng),
        p=lex.person(rng),
    )
    text = text if rng.random() < 0.3 else text[:1].upper() + text[1:]
    return text + rng.choice(("?", "?", "", "."))
