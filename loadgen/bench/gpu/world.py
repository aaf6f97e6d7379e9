"""A model of a given shape with random weights, and what the parts of the benchmark need of it. Nothing is on disk."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers as tf

from holdfast.kernels.ceilings import Ceilings, Clock, hold
from holdfast.loadgen.bench.gpu.bounds import Bounds
from holdfast.loadgen.bench.gpu.watch import Watched
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.tensors import CellShape, KVTensors
from holdfast.replicas.model.decoder import decoder_shape, rotary_table
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.model.weights import DecoderShape, DecoderWeights, allocate
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often. Tokens, but for `repeat`."""

    model: tf.LlamaConfig
    device: str
    cells: int
    rows: int = 64  # sequences at once, where many are
    context: int = 4096  # cached by each of them
    short: int = 1024  # cached by one alone
    chunk: int = 4096  # of a prefill
    long_alias: int = 131072
    moved_pages: int = 512  # between the device and the host
    repeat: int = 20


def full_size() -> Sizes:
    """Llama 3.1 8B on a large GPU."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters=rope,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Sizes(model, "cuda", cells=300_000)


def small_size() -> Sizes:
    """So little that an interpreter gets through it: what it measures is that everything runs."""
    model = tf.LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=48,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Sizes(
        model,
        "cpu",
        cells=1024,
        rows=2,
        context=24,
        short=16,
        chunk=20,
        long_alias=32,
        moved_pages=5,
        repeat=1,
    )


class World:
    """The runner over random weights, with graphs where the device has any."""

    def __init__(self, sizes: Sizes, ceilings: Ceilings) -> None:
        shape = decoder_shape(sizes.model)
        assert shape is not None  # both sizes are of a family that the decoder knows
        self.sizes, self.shape = sizes, shape
        dtype = torch.bfloat16 if sizes.device == "cuda" else torch.float32
        weights = random_weights(shape, dtype, sizes.device)
        cell = CellShape(shape.layers, shape.kv_heads, shape.head_dim)
        self.kv = KVTensors(cell, sizes.cells // 16, 16, dtype, sizes.device, scratch=True)
        self.bounds = Bounds(shape, dtype.itemsize, self.kv.cell_bytes, ceilings)
        context = sizes.model.max_position_embeddings
        self.decoder = GpuDecoder(shape, weights, rotary_table(sizes.model, context, sizes.device), self.kv)
        self.runner = ModelRunner(self.decoder, self.kv, sizes.rows + 1, context, on_device=True)
        self.config = EngineConfig(
            cells=self.kv.cells,
            context_length=context,
            max_sequences=sizes.rows + 1,
            session_rows=0,
            step_tokens=sizes.chunk,
            admission_ceiling=1.0,
            device=sizes.device,
            overlap_steps="on",
            speculation=DraftConfig(enabled=False),
        )

    def engine(self) -> tuple[Engine, Watched]:
        """An engine with an empty cache over the runner, and what counts between the two."""
        watched = Watched(self.runner)
        return Engine(self.config, watched, vocabulary=self.shape.vocabulary), watched

    def tokens(self, count: int, seed: int) -> TokenIds:
        return np.random.default_rng(seed).integers(1, self.shape.vocabulary, count).astype(np.int32)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.sizes.device == "cuda":
            torch.cuda.synchronize()

    def hold(self, seconds: float) -> None:
        """`ceilings.hold`, where there is a GPU."""
        if self.sizes.device == "cuda":
            hold(seconds)

    def seconds(self, call: Callable[[], object]) -> float:
        """What a call takes on the device."""
        if self.sizes.device == "cuda":
            return Clock().seconds(call)
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def now(self) -> float:
        """Seconds, once it has."""
        self.wait()
        return time.perf_counter()


def random_weights(shape: DecoderShape, dtype: torch.dtype, device: str) -> DecoderWeights:
    """Numbers as a fresh model has them; their size matters for speed, their values do not."""
    weights = allocate(shape, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    norms = [weights.norm, *(norm for layer in weights.layers for norm in (layer.input_norm, layer.post_norm))]
    for norm in norms:
        norm.fill_(1.0)
    matrices = [weights.embedding, weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
    for matrix in matrices:
        matrix.normal_(std=0.02, generator=generator)
    return weights
