"""A conversation as text and as tokens.

Text comes in spans, so that training knows which tokens the assistant wrote. The model's chat template says the same to
every other program; a test holds the two equal.

The byte-level BPE cuts text into words by class of character alone: letters, single digits, whitespace with JSON
punctuation, and every other sign by itself. So a word has the same tokens after a space, a quote or a slash, and a
value is copied token by token from where the user or a tool result mentions it. No merge crosses a class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from holdfast.loadgen.pocket.conversations import Conversation, training_conversation
from holdfast.loadgen.pocket.tools import Json

WEIGHTS = Path(__file__).parents[2] / "replicas" / "pocket" / "weights"
"""The folder of the shipped model."""
VOCABULARY = 1536
CONTEXT = 8192
END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added but not special: they survive ``skip_special_tokens``, as in Qwen."""

CUT = r"""\p{L}+|\p{N}|[\s"{}\[\]:,]+|[^\p{L}\p{N}\s"{}\[\]:,]"""
"""How text is cut into words: by the class of each character alone, whatever stands around it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the rendered conversation; ``learned`` pieces are what the assistant has to produce.

    The end of an ``unfinished`` message is not learned.
    """

    text: str
    learned: bool


def spans(conversation: Conversation) -> list[Span]:
    """The whole conversation; joined, the texts are what the chat template renders."""
    return list(_spans(conversation.messages, conversation.tools))


def _spans(messages: Sequence[Json], tools: Sequence[Json]) -> Iterator[Span]:
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools or system is not None:
        yield Span(f"<|im_start|>system\n{system_turn(system, tools)}{END}\n", False)
    for role, group in groupby(messages[system is not None :], key=lambda message: message["role"]):
        if role == "tool":
            blocks = "".join(f"\n<tool_response>\n{m['content']}\n</tool_response>" for m in group)
            yield Span(f"<|im_start|>user{blocks}{END}\n", False)
            continue
        for message in group:
            if role != "assistant":
                yield Span(f"<|im_start|>{role}\n{message['content']}{END}\n", False)
                continue
            yield Span("<|im_start|>assistant\n", False)
            cut = message.get("unfinished", False)
            yield Span(assistant_text(message) + ("" if cut else END), True)
            yield Span(f"{END}\n" if cut else "\n", False)


def system_turn(system: str | None, tools: Sequence[Json]) -> str:
    """The system prompt followed by the tools, one JSON object a line."""
    listed = "".join("\n" + line for line in tool_lines(tools))
    block = f"# Tools\n<tools>{listed}\n</tools>" if tools else ""
    return "\n\n".join(part for part in (system, block) if part)


def tool_lines(tools: Sequence[Json]) -> list[str]:
    """Each tool as it stands in the system prompt."""
    return [json.dumps(tool, ensure_ascii=False) for tool in tools]


def assistant_text(message: Json) -> str:
    """What the assistant generates for ``message``: its text, then one block per call."""
    parts = [message["content"]] if message["content"] else []
    parts += [
        f"<tool_call>\n{json.dumps(call_object(call), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join(parts)


def call_object(call: Json) -> Json:
    """The JSON object between the tool-call marks."""
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def train_bpe(
    texts: Iterable[str], cut: str, vocabulary: int, special: Sequence[str] = (), marks: Sequence[str] = ()
) -> Tokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens over words as the pattern ``cut`` cuts them.

    ``marks`` are added to what is trained; neither they nor ``special`` tokens are in the ``texts`` it is trained on.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(marks),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(texts, (*special, *marks)), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return tokenizer


def _without(texts: Iterable[str], marks: Sequence[str]) -> Iterator[str]:
    for text in texts:
        for mark in marks:
            text = text.replace(mark, "")
        yield text


def train_tokenizer(conversations: int, seed: int) -> Tokenizer:
    """Pocket's, trained on rendered conversations of the generator."""
    texts = ("".join(span.text for span in spans(training_conversation(seed + i))) for i in range(conversations))
    return train_bpe(texts, CUT, VOCABULARY, SPECIAL, MARKS)


def packaged(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers knows it, with the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=SPECIAL[0],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=(WEIGHTS / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def load(folder: Path) -> Tokenizer:
    """The bare tokenizer of a saved folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
