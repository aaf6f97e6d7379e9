"""Tiny random models of several families, and a hand-written loop that drives a runner with StepPlans."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
import transformers as tf

from holdfast.replicas.kv.pages import PageCopy
from holdfast.replicas.kv.tensors import CellShape, KVTensors
from holdfast.replicas.model.any_model import ATTENTION, AnyModel
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.plan import Chunk, Draw, Drawn, RowWrite, Sampling, StepPlan

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied random weights repeat one token for ever
}
_GQA = _COMMON | {"num_key_value_heads": 2}
_WINDOWS = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**_GQA),
    "qwen2": lambda: tf.Qwen2Config(**_GQA),
    "qwen3": lambda: tf.Qwen3Config(**_GQA, head_dim=16),
    "mistral": lambda: tf.MistralConfig(**_GQA, sliding_window=24),
    "gemma2": lambda: tf.Gemma2Config(
        **_GQA,
        head_dim=16,
        sliding_window=20,
        layer_types=_WINDOWS,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=4,
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**_GQA, head_dim=16, sliding_window=20, layer_types=_WINDOWS),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_GQA,
        head_dim=16,
        sliding_window=20,
        layer_types=_WINDOWS,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**_COMMON),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    ),
}


@cache
def tiny_model(family: str) -> torch.nn.Module:
    """A random model of a family in float32, with plain attention. Weights are spread so that attention matters."""
    torch.manual_seed(7)
    config = FAMILIES[family]()
    config._attn_implementation = "eager"
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25)
            elif "norm" in name or "ln" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "sinks" in name:
                weight.normal_(std=2.0)
    return model.eval()


def cell_shape(model: torch.nn.Module) -> CellShape:
    config = model.config
    heads = config.num_attention_heads
    return CellShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


@cache
def reference_tokens(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What transformers' own `generate` answers, greedily."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


@dataclass(slots=True)
class Stream:
    """One sequence in the loop: its tokens, and how many are computed."""

    row: int
    tokens: list[int]
    chunk: int = 10**6
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)


class Loop:
    """Drives a ModelRunner by hand: pages in random order, no cache, no admission."""

    def __init__(
        self,
        family: str,
        page_size: int = 16,
        cells: int = 2048,
        rows: int = 16,
        shuffle: bool = True,
        scratch: bool = False,
    ) -> None:
        self.module = model = tiny_model(family)
        model.set_attn_implementation(ATTENTION)
        self.kv = KVTensors(cell_shape(model), cells // page_size, page_size, torch.float32, scratch=scratch)
        self.kv.data.fill_(torch.nan)  # whatever is read before it is written shows
        self.model = AnyModel(model, self.kv)
        self.runner = ModelRunner(self.model, self.kv, rows, 512)
        self.page_size = page_size
        pages = np.random.default_rng(0).permutation(cells // page_size) if shuffle else np.arange(cells // page_size)
        self.free = pages.tolist()
        self.rows = 0

    def stream(self, tokens: list[int] | tuple[int, ...], **settings: object) -> Stream:
        stream = Stream(self.rows, list(tokens), **settings)  # type: ignore[arg-type]
        self.rows += 1
        return stream

    def write(self, stream: Stream, end: int) -> tuple[RowWrite, ...]:
        """Pages for positions below `end`, as row writes."""
        have = len(stream.pages)
        while len(stream.pages) * self.page_size < end:
            stream.pages.append(self.free.pop(0))
        new = stream.pages[have:]
        return (RowWrite(stream.row, have, np.array(new, dtype=np.int32)),) if new else ()

    def chunk(self, stream: Stream, drafts: tuple[int, ...] = ()) -> Chunk:
        """The stream's next chunk; drafts follow its last token."""
        end = min(len(stream.tokens), stream.computed + stream.chunk)
        tokens = np.array(stream.tokens[stream.computed : end] + list(drafts), dtype=np.int32)
        draw = None
        if end == len(stream.tokens):
            draw = Draw(stream.sampling, stream.seed, len(drafts))
        return Chunk(stream.row, stream.computed, tokens, draw)

    def step(
        self,
        streams: list[Stream],
        drafts: dict[int, tuple[int, ...]] | None = None,
        copies: tuple[PageCopy, ...] = (),
    ) -> None:
        """One step over all `streams`; `drafts` by row."""
        chunks = tuple(self.chunk(stream, (drafts or {}).get(stream.row, ())) for stream in streams)
        writes: tuple[RowWrite, ...] = ()
        for stream, chunk in zip(streams, chunks, strict=True):
            writes += self.write(stream, chunk.start + len(chunk.tokens))
        self.module.set_attn_implementation(ATTENTION)  # the reference may have run in between
        output = self.runner.begin(StepPlan(chunks, writes, copies)).land()
        for stream, chunk, drawn in zip(streams, chunks, output.drawn, strict=True):
            stream.computed = min(chunk.start + len(chunk.tokens), len(stream.tokens))
            if drawn is not None:
                stream.computed = len(stream.tokens) + len(drawn.tokens) - 1
                stream.tokens += drawn.tokens
                stream.drawn.append(drawn)

    def generate(self, tokens: tuple[int, ...], count: int, **settings: object) -> tuple[int, ...]:
        """`count` tokens after a prompt, alone in the batch."""
        stream = self.stream(tokens, **settings)
        while len(stream.tokens) < len(tokens) + count:
            self.step([stream])
        return tuple(stream.tokens[len(tokens) :])


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> "type[Tiny]":
    """The helpers above under one name: test files cannot import each other."""
    return Tiny


class Tiny:
    families = tuple(FAMILIES)
    vocabulary = VOCABULARY
    model = staticmethod(tiny_model)
    cell_shape = staticmethod(cell_shape)
    reference = staticmethod(reference_tokens)
    prompt = staticmethod(make_prompt)
    Loop = Loop
