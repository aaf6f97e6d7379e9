"""Turns without a tool: small talk, what the model says of itself, system prompts, and ways to decline or ask back."""

from __future__ import annotations

import random

from holdfast.loadgen.pocket.kinds import KINDS
from holdfast.loadgen.pocket.schemas import Tool, in_words
from holdfast.loadgen.pocket.words import Lexicon, listed

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
    """What the model answers when asked for its abilities."""
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
    said, answer = rng.choice(SMALL_TALK)
    text = rng.choice(said.split(";"))
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
