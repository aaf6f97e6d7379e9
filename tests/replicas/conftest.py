"""Tests that are coroutines run in an event loop of their own. Small tokenizers with the chat templates of the model
families are trained here: no files, no network."""

import asyncio
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import HARMONY
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from holdfast.replicas.text.render import Renderer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


CHATML = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{%- endif %}

# Tools
Answer with <tool_call></tool_call>.
<tools>
{%- for tool in tools %}{{ '\n' + tool | tojson }}{%- endfor %}
</tools><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and tools -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- '}\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif message.role in ('user', 'system') -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- else -%}{{- raise_exception('no such role: ' + message.role) -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
{%- if 'tool_calls' in message -%}
{%- set call = message.tool_calls[0].function -%}
{{- '<|python_tag|>{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}
{%- else -%}{{- message.content | trim -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""

LLAMA2 = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- ' ' + message.content + ' ' + eos_token -}}
{%- else -%}{{- bos_token + '[INST] ' + message.content + ' [/INST]' -}}{%- endif -%}
{%- endfor -%}"""


def _corpus() -> list[str]:
    rng = random.Random(7)
    words = ["the", "weather", "in", "Paris", "name", "arguments", "flight", "and", "is", "wörld", "日本", "been"]
    lines = [" ".join(rng.choices(words, k=12)) + ".\n\n" for _ in range(200)]
    return [*lines, *(f'{{"name": "{rng.choice(words)}", "arguments": {{"city": "Oslo"}}}}\n' for _ in range(100))]


def _byte_level(special: list[str], added: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


@pytest.fixture(scope="session")
def family() -> Callable[[str, str, str], Any]:
    """Makes a tokenizer of a family: its special tokens, divided by spaces, the last of which ends a reply; the tokens
    that are not special; and its chat template."""

    def tokenizer(special: str, added: str, template: str) -> Any:
        marks = special.split()
        made = _byte_level(marks, added.split())
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=marks[-1], chat_template=template)

    return tokenizer


@pytest.fixture(scope="session")
def qwen_like() -> Any:
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], marks)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


@pytest.fixture(scope="session")
def llama3_like() -> Any:
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    tokenizer = _byte_level(special, [])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=LLAMA3
    )


@pytest.fixture(scope="session")
def harmony_like() -> Any:
    marks = ["start", "end", "message", "channel", "constrain", "return", "call"]
    tokenizer = _byte_level([f"<|{mark}|>" for mark in marks], [])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>", chat_template=HARMONY)


@pytest.fixture(scope="session")
def llama2_like() -> Any:
    """Sentencepiece style: a space put before the prompt, bytes as tokens of their own."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    base.train_from_iterator(
        [line[:40] for line in _corpus()],
        trainers.BpeTrainer(vocab_size=700, special_tokens=first, show_progress=False, max_token_length=8),
    )
    trained = base.model
    tokenizer = Tokenizer(trained)
    trained.byte_fallback, trained.fuse_unk, trained.unk_token = True, True, "<unk>"
    tokenizer.pre_tokenizer = base.pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA2
    )


@pytest.fixture(scope="session")
def tokenizers(qwen_like: Any, llama3_like: Any, llama2_like: Any) -> list[Any]:
    return [qwen_like, llama3_like, llama2_like]


@pytest.fixture
def with_template(qwen_like: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Renderer]:
    """Makes a renderer of a template."""

    def renderer(template: str) -> Renderer:
        monkeypatch.setattr(qwen_like, "chat_template", template)
        return Renderer(qwen_like)

    return renderer
