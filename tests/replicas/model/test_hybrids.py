"""Models whose layers are mostly linear: greedy tokens are transformers' own, however a prompt is cut, whatever else is
in the step, with drafts that are accepted or not, and from states that marks kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import replayed

from holdfast.kernels.linear_state import NO_STATE, LinearStates
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model import startup
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.graphs import GraphRoom
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan

VOCABULARY, PAGE, CONTEXT, SLOTS, WINDOW = 97, 4, 160, 24, 4
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def _nested() -> tf.PreTrainedConfig:
    config = tf.Qwen3_5Config(text_config=_SIZES, vision_config=_VISION, tie_word_embeddings=True)
    config.text_config.rope_parameters |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return config


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_EXPERTS |= {"shared_expert_intermediate_size": 40}


def _nested_experts() -> tf.PreTrainedConfig:
    return tf.Qwen3_5MoeConfig(text_config=_SIZES | _EXPERTS, vision_config=_VISION)


NEMOTRON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, tuple[Callable[[], tf.PreTrainedConfig], type]] = {
    "Qwen3_5ForCausalLM": (lambda: tf.Qwen3_5TextConfig(**_SIZES), tf.Qwen3_5ForCausalLM),
    "Qwen3_5ForConditionalGeneration": (_nested, tf.Qwen3_5ForConditionalGeneration),
    "Qwen3_5MoeForConditionalGeneration": (_nested_experts, tf.Qwen3_5MoeForConditionalGeneration),
    "Qwen3NextForCausalLM, experts": (lambda: tf.Qwen3NextConfig(**_SIZES, **_EXPERTS), tf.Qwen3NextForCausalLM),
    "NemotronHForCausalLM": (lambda: tf.NemotronHConfig(**NEMOTRON), tf.NemotronHForCausalLM),
    "NemotronHForCausalLM, latent": (
        lambda: tf.NemotronHConfig(**NEMOTRON, moe_latent_size=16, use_conv_bias=False, n_group=4, topk_group=2),
        tf.NemotronHForCausalLM,
    ),
    "Qwen3NextForCausalLM": (lambda: tf.Qwen3NextConfig(**_SIZES, num_experts=0), tf.Qwen3NextForCausalLM),
    "Qwen3NextForCausalLM, layers named": (
        lambda: tf.Qwen3NextConfig(**_SIZES, num_experts=4, mlp_only_layers=[0, 1, 2, 3]),
        tf.Qwen3NextForCausalLM,
    ),
}
_FOLDERS = TemporaryDirectory(prefix="hybrids")


@cache
def checkpoint(name: str) -> tuple[Path, tf.PreTrainedConfig, torch.nn.Module]:
    """A saved random model. Weights are spread so that attention and states matter."""
    torch.manual_seed(3)
    make, kind = CONFIGS[name]
    config = make()
    config._attn_implementation = "eager"
    model = kind._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        corrections = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
        for weight_name, weight in (*model.named_parameters(), *corrections):
            if weight_name.endswith("conv1d.weight"):
                weight.normal_(std=0.5)
            elif weight_name.endswith("mixer.dt_bias"):
                weight.zero_()  # time steps that transformers does not clamp
            elif weight.dim() >= 2:
                weight.normal_(std=0.25)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    folder = Path(_FOLDERS.name) / name
    model.save_pretrained(folder)
    return folder, config, model


@cache
def answers(name: str, prompt: tuple[int, ...], new: int) -> list[int]:
    """The greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = checkpoint(name)[2].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist())


@dataclass(slots=True)
class Stream:
    """A sequence, and where its state is: in `source`, which holds drafts of which `applied` were accepted."""

    row: int
    tokens: list[int]
    slot: int
    source: int = NO_STATE
    applied: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Loop:
    """Drives a runner by hand. Every stream has a slot; the slots above those are for marks. `held`: how many tokens
    before the drafts leave the state as it is.
    """

    def __init__(
        self, name: str, dtype: torch.dtype = torch.float32, held: int = 1, gpu: bool = False, **settings: object
    ) -> None:
        folder, config, _ = checkpoint(name)
        described = describe(config)
        assert described is not None
        assert described.state is not None
        self.kv = KVTensors(described.cell, 400, PAGE, dtype, **settings)
        if self.kv.data.dtype.is_floating_point:
            self.kv.data.fill_(torch.nan)  # whatever is read before it is written shows
        self.states = LinearStates(described.state, described.linear_layers, SLOTS, WINDOW + 1, dtype, "cpu")
        for tensor in self.states.tensors:
            tensor.fill_(torch.nan)
        decoder = (GpuDecoder if gpu else Decoder).load(str(folder), config, self.kv, CONTEXT, states=self.states)
        assert decoder is not None
        self.runner = (GpuRunner if gpu else ModelRunner)(decoder, self.kv, 16, CONTEXT)
        self.held = held
        self._free = np.random.default_rng(0).permutation(400).tolist()
        self.streams: list[Stream] = []

    def stream(self, prompt: tuple[int, ...], **settings: object) -> Stream:
        number = len(self.streams)
        self.streams.append(Stream(number, list(prompt), number, **settings))  # type: ignore[arg-type]
        return self.streams[-1]

    def step(
        self,
        streams: list[Stream],
        most: int = CONTEXT,
        drafts: dict[int, list[int]] | None = None,
        marks: dict[int, tuple[tuple[int, int], ...]] | None = None,
    ) -> None:
        """A chunk of at most `most` tokens of each stream; `drafts` and `marks` by row."""
        chunks, writes = [], []
        for stream in streams:
            end = min(len(stream.tokens), stream.computed + most)
            last = end == len(stream.tokens)
            guessed = (drafts or {}).get(stream.row, []) if last else []
            tokens = np.array(stream.tokens[stream.computed : end] + guessed, np.int32)
            have = len(stream.pages)
            while len(stream.pages) * PAGE < stream.computed + len(tokens):
                stream.pages.append(self._free.pop())
            writes.append(RowWrite(stream.row, have, np.array(stream.pages[have:], np.int32)))
            draw = Draw(Sampling(), 0, len(guessed)) if last else None
            held = len(guessed) + self.held if last else 0
            use = StateUse(stream.source, stream.slot, stream.applied, held, (marks or {}).get(stream.row, ()))
            chunks.append(Chunk(stream.row, stream.computed, tokens, draw, state=use))
        output = self.runner.begin(StepPlan(tuple(chunks), tuple(writes))).land()
        for stream, chunk, drawn in zip(streams, chunks, output.drawn, strict=True):
            stream.source = stream.slot
            if drawn is None:
                stream.computed += len(chunk.tokens)
                stream.applied = 0
            else:
                stream.computed = len(stream.tokens) + len(drawn.tokens) - 1
                stream.applied = len(drawn.tokens) - 1 + self.held
                stream.tokens += drawn.tokens

    def generate(self, prompts: list[tuple[int, ...]], new: int, most: int = CONTEXT) -> list[list[int]]:
        streams = [self.stream(prompt) for prompt in prompts]
        while waiting := [s for s, prompt in zip(streams, prompts, strict=True) if len(s.tokens) < len(prompt) + new]:
            self.step(waiting, most)
        return [stream.tokens[len(prompt) :] for stream, prompt in zip(streams, prompts, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_transformers_own(name):
    prompt = prompt_of(40)
    assert len(set(answers(name, prompt, 20))) > 5
    assert Loop(name).generate([prompt], 20) == [answers(name, prompt, 20)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
def test_a_prompt_in_chunks_is_answered_alike(name, most):
    prompt = prompt_of(40)
    assert Loop(name).generate([prompt], 8, most) == [answers(name, prompt, 20)[:8]]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("most", [5, CONTEXT])
def test_a_batch_of_mixed_lengths_is_answered_as_each_alone(name, most):
    prompts = [prompt_of(length, length) for length in (1, 2, 3, 5, 17, 40, 64, 99)]
    assert Loop(name).generate(prompts, 10, most) == [answers(name, prompt, 10) for prompt in prompts]


@settings(max_examples=16, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    right=st.lists(st.integers(0, WINDOW), min_size=8, max_size=20),
    wrong=st.lists(st.integers(0, WINDOW), min_size=8, max_size=20),
    length=st.integers(1, 12),
    most=st.sampled_from([1, 5, CONTEXT]),
    held=st.integers(0, 1),
)
def test_drafts_change_no_token(name, right, wrong, length, most, held):
    """Windows of `right` tokens that are accepted and wrong ones behind them, in two streams of one batch."""
    prompts = [prompt_of(length, 1), prompt_of(9, 2)]
    expected = [answers(name, prompt, 40) for prompt in prompts]
    loop = Loop(name, held=held)
    streams = [loop.stream(prompt) for prompt in prompts]
    for n_right, n_wrong in zip(right, wrong, strict=False):
        drafts = {}
        for stream, prompt, tokens in zip(streams, prompts, expected, strict=True):
            at = len(stream.tokens) - len(prompt)
            good = tokens[at : at + n_right]
            bad = [(token + 1) % VOCABULARY for token in tokens[at + n_right : at + n_right + n_wrong]]
            drafts[stream.row] = (good + bad)[:WINDOW]
        loop.step([each for each in streams if len(each.tokens) < 50], most, drafts)
    for stream, prompt, tokens in zip(streams, prompts, expected, strict=True):
        made = stream.tokens[len(prompt) :]
        assert made == (tokens + answers(name, prompt, 60))[: len(made)] if len(made) <= 40 else True


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("most", [16, CONTEXT])
def test_another_row_goes_on_from_states_that_marks_kept(name, most):
    """A second sequence with the same beginning reads a mark's state and writes another slot: the mark stays."""
    prompt, loop = prompt_of(40), Loop(name)
    first = loop.stream(prompt)
    loop.step([first], most=16, marks={first.row: ((3, 20), (16, 21))})
    while len(first.tokens) == len(prompt):
        loop.step([first], most)
    for cut, slot in ((3, 20), (16, 21), (16, 21)):
        tokens = prompt[:cut] + prompt_of(12, cut)
        # Pages of the first one up to the cut: here cuts need not be those of pages, so the row takes a copy.
        other = loop.stream(tokens, source=slot, computed=cut)
        other.pages = [loop._free.pop() for _ in range(-(-cut // PAGE))]
        for mine, theirs in zip(other.pages, first.pages, strict=False):
            loop.kv.copy_page(theirs, mine, PAGE)
        loop.runner.begin(StepPlan((), (RowWrite(other.row, 0, np.array(other.pages, np.int32)),))).land()
        while len(other.tokens) < len(tokens) + 6:
            loop.step([other], most)
        assert other.tokens[len(tokens) :] == answers(name, tokens, 6)


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "NemotronHForCausalLM"])
def test_gpu_kernels_answer_alike_in_graphs(name):
    """A first step without a graph, then decode steps with drafts and marks; the graphs are plain calls."""
    lengths = (40, 5)
    prompts = [prompt_of(length, length) for length in lengths]
    expected = [answers(name, prompt, 12) for prompt in prompts]
    room = GraphRoom(tokens=12, items=64, wide_items=16, partials=256, programs=2)
    loop = Loop(name, gpu=True, scratch=True)
    assert loop.runner.capture(replayed, room, lambda text: None)
    streams = [loop.stream(prompt) for prompt in prompts]
    loop.step(streams, marks={0: ((33, 20),)})
    for right, wrong in ((2, 1), (0, 2), (1, 0)):
        drafts = {}
        for stream, prompt, tokens in zip(streams, prompts, expected, strict=True):
            at = len(stream.tokens) - len(prompt)
            bad = [(token + 1) % VOCABULARY for token in tokens[at + right : at + right + wrong]]
            drafts[stream.row] = tokens[at : at + right] + bad
        loop.step(streams, drafts=drafts)
    assert loop.runner.replayed == 3
    for stream, prompt, tokens in zip(streams, prompts, expected, strict=True):
        made = stream.tokens[len(prompt) :]
        assert len(made) == 7
        assert made == tokens[:7]
    assert not loop.states.recurrent[:, 20].isnan().any()


def test_weights_without_use_are_skipped_and_the_log_says_so(caplog, tmp_path):
    folder, config, _ = checkpoint("Qwen3_5ForConditionalGeneration")
    described = describe(config)
    kv = KVTensors(described.cell, 4, PAGE, torch.float32)
    with caplog.at_level("INFO"):
        Decoder.load(str(folder), config, kv, 16)
    assert any("model.visual.*" in each.getMessage() for each in caplog.records)


@cache
def served(name: str) -> Path:
    """The checkpoint, with a tokenizer beside it."""
    folder = checkpoint(name)[0]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(97)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return folder


def config_of(name: str, **settings: object) -> EngineConfig:
    return EngineConfig(
        model=str(served(name)), threads=1, cells=512, max_sequences=4, session_rows=1, state_slots=8, **settings
    )


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_is_loaded_with_its_states_and_its_steps_are_measured(name, settings):
    loaded = load_runner(config_of(name, **settings))
    assert loaded.config.state_slots == 8
    assert loaded.cost is not None
    assert loaded.runner.kv.shape.layers == 1
    prompt = prompt_of(40)
    draw = Draw(Sampling(), 0)
    chunk = Chunk(1, 0, np.array(prompt, np.int32), draw, state=StateUse(NO_STATE, 7, held=1))
    writes = (RowWrite(1, 0, np.arange(3, dtype=np.int32)),)
    (drawn,) = loaded.runner.begin(StepPlan((chunk,), writes)).land().drawn
    if not settings:
        assert list(drawn.tokens) == answers(name, prompt, 1)


def test_slots_take_their_share_of_the_memory():
    found = load_runner(replace(config_of("Qwen3_5ForCausalLM"), cells=0, state_slots=0, kv_memory=0.01))
    states = found.runner.model.states
    assert states.slots == found.config.state_slots > 8
    used = states.slots * states.slot_bytes + found.runner.kv.data.nbytes
    assert 0.99 * 0.01 * 2**30 < used <= 0.01 * 2**30


def test_transformers_cannot_serve_one():
    with pytest.raises(ConfigError) as raised:
        load_runner(config_of("Qwen3_5ForCausalLM", decoder="transformers"))
    assert raised.value.field == "decoder"


def test_one_order_of_sums_cannot_be_had_on_a_gpu():
    model = Loop("Qwen3_5ForCausalLM", gpu=True).runner.model
    with pytest.raises(ConfigError, match="chunks") as raised:
        startup._choose_products(model, EngineConfig(batch_invariant=True))
    assert raised.value.field == "batch_invariant"
