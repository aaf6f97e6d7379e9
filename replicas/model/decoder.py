"""From a plan's chunks to the tensors of one forward, and our own decoder, which makes logits of them.

`lay_out` goes over the chunks once, in numpy: which token has which position and which cell of the KV store, and which
outputs are drawn from. A `Model` takes these tensors (`ForwardBatch`) and returns logits. `Decoder` is the one for
every `description.Description`; `decoder_gpu` has its forward on a GPU, `any_model` runs everything else.

Shapes: T tokens, D hidden, H heads, K KV heads, d head size, R drawn tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from holdfast.kernels.attention import paged_attention
from holdfast.kernels.attention_plan import AttentionWork, attention_work
from holdfast.kernels.kv import PagedBatch, PageRuns
from holdfast.kernels.layer import Rotation, rms_norm
from holdfast.kernels.linear import GatedMatrix, Matrix
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.description import Description, describe, head_dim, rope_type
from holdfast.replicas.model.smoothing import smooth
from holdfast.replicas.model.weights import DecoderWeights, LayerWeights, has_safetensors, read_weights
from holdfast.replicas.plan import Chunk, RowWrite

Int64s = npt.NDArray[np.int64]


class PageTable:
    """Which page holds which part of which sequence: [rows, slots] int32 on the device, one row per sequence.

    Forwards are laid out from a copy on the host; on a CPU both are the same memory. `runs[row]` is the row as runs of
    neighbouring pages. Entries beyond a sequence's last position may be left from an earlier one.
    """

    def __init__(self, rows: int, slots: int, page_size: int, pages: int, device: str | torch.device = "cpu") -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self._pages = pages
        self._host = np.zeros((rows, slots), dtype=np.int32)
        self.tensor: Tensor = torch.from_numpy(self._host).to(self.device)
        self.runs = [PageRuns() for _ in range(rows)]

    def write(self, write: RowWrite) -> None:
        """Apply one row write. Raises IndexError when it reaches outside the table or names an unknown page."""
        self.note(write)
        if self.tensor.device.type != "cpu":
            end = write.first + len(write.pages)
            pages = torch.from_numpy(np.ascontiguousarray(write.pages))
            self.tensor[write.row, write.first : end] = pages.to(self.device)

    def note(self, write: RowWrite) -> None:
        """The host's part of a row write. The caller applies the device's part, in the same order."""
        rows, slots = self._host.shape
        first, end = write.first, write.first + len(write.pages)
        if not (0 <= write.row < rows and first >= 0 and end <= slots):
            raise IndexError(f"pages {first} to {end} of row {write.row} lie outside a table of {rows} x {slots}")
        if len(write.pages) and not (write.pages.min() >= 0 and write.pages.max() < self._pages):
            raise IndexError(f"row {write.row} names a page outside the {self._pages} there are")
        runs = self.runs[write.row]
        if first > runs.extent:
            raise IndexError(f"row {write.row} is written from page {first} on but ends at {runs.extent}")
        self._host[write.row, first:end] = write.pages
        runs.replace_tail(first, self._host[write.row, first : max(end, runs.extent)])

    def cells(self, rows: Int64s, positions: Int64s) -> Int64s:
        """The cell of each (row, position)."""
        slots, inside = np.divmod(positions, self.page_size)
        cells: Int64s = self._host[rows, slots].astype(np.int64) * self.page_size + inside
        return cells


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Inputs of one forward, all on the device.

    token_ids [1, T] and position_ids [1, T] int64; drawn [R] int64: the tokens whose output is drawn from, maybe none.
    """

    token_ids: Tensor
    position_ids: Tensor
    drawn: Tensor
    pages: PagedBatch


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """A forward's tokens on the host. token_ids, positions, cells [T] and drawn [R] are int64.

    `rows`, `starts`, `lengths`: page table row, first position and tokens of each chunk; `decodes`: see `Chunk`.
    """

    token_ids: Int64s
    positions: Int64s
    cells: Int64s
    drawn: Int64s
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    decodes: list[bool]

    @property
    def arrays(self) -> tuple[Int64s, ...]:
        """What the device needs."""
        return self.token_ids, self.positions, self.cells, self.drawn

    def batch(self, table: PageTable, views: Sequence[Tensor]) -> ForwardBatch:
        """The batch over `views`, which are `arrays` on the table's device."""
        token_ids, positions, cells, drawn = views
        return ForwardBatch(token_ids[None], positions[None], drawn, self.paged(table, cells))

    def paged(self, table: PageTable, cells: Tensor) -> PagedBatch:
        """Where the tokens lie, as attention reads it; `cells` are on the table's device."""
        runs = [table.runs[row] for row in self.rows]
        where = (self.rows, self.starts, self.lengths)
        return PagedBatch(table.page_size, table.tensor, *where, cells, runs, decodes=self.decodes)


def lay_out(chunks: tuple[Chunk, ...], table: PageTable) -> BatchLayout:
    """Lay the chunks out one after the other. Raises IndexError for a row or positions outside the page table."""
    starts = [chunk.start for chunk in chunks]
    lengths = [len(chunk.tokens) for chunk in chunks]
    rows = [chunk.row for chunk in chunks]
    ends = np.cumsum(lengths)
    # Position of token t: its chunk's start plus its distance from its chunk's first token.
    offsets: Int64s = np.array(starts, dtype=np.int64) - ends + lengths
    positions = np.arange(int(ends[-1])) + np.repeat(offsets, lengths)
    cells = table.cells(np.repeat(rows, lengths), positions)
    decodes = [chunk.decodes for chunk in chunks]
    drawn = np.arange(len(positions))
    if not all(decodes):
        indices = [
            index
            for end, chunk in zip(ends.tolist(), chunks, strict=True)
            if chunk.draw is not None
            for index in range(end - chunk.draw.drafts - 1, end)  # the last token's output, and those before its drafts
        ]
        drawn = np.array(indices, dtype=np.int64)
    tokens = np.concatenate([chunk.tokens for chunk in chunks], dtype=np.int64)
    return BatchLayout(tokens, positions, cells, drawn, rows, starts, lengths, decodes)


def build_batch(chunks: tuple[Chunk, ...], table: PageTable) -> ForwardBatch:
    """The batch of some chunks, copied to the table's device. Raises IndexError like `lay_out`."""
    layout = lay_out(chunks, table)
    return layout.batch(table, [torch.from_numpy(array).to(table.device) for array in layout.arrays])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and their size, and the different windows of the layers; 0: none. `invariant`: see `attention_work`."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    invariant: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def works(self, pages: PagedBatch) -> list[AttentionWork]:
        """A batch's attention worked out before its forward, for each of `windows`. Does not read the batch's cells."""
        alone = self.invariant
        return [attention_work(pages, self.group, self.kv_heads, window, invariant=alone) for window in self.windows]


class Model(Protocol):
    """Takes a batch, stores its KV and returns the logits [R, vocabulary] of its drawn tokens.

    `attention` lets a batch's attention be worked out beforehand; None: the model asks for it layer by layer.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def attention(self) -> AttentionShape | None: ...

    def forward(self, batch: ForwardBatch) -> Tensor: ...


def rotary_table(config: Any, positions: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position, float32 [positions, d / 2], scaling of the context included."""
    kind = rope_type(config)
    if kind == "default":
        dim = head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
        inverse, factor = 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device(device))
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    return angles.cos() * factor, angles.sin() * factor


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, ready to multiply with."""

    input_norm: Tensor
    qkv: Matrix
    norms: tuple[Tensor, Tensor] | None  # of queries and keys
    out: Matrix
    post_norm: Tensor
    gate_up: GatedMatrix
    down: Matrix
    window: int | None

    @classmethod
    def of(cls, weights: LayerWeights, window: int | None, int8: bool, leave: bool) -> "Layer":
        return cls(
            input_norm=weights.input_norm,
            qkv=Matrix(weights.qkv, weights.qkv_bias, int8, leave),
            norms=None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm),
            out=Matrix(weights.out, None, int8, leave),
            post_norm=weights.post_norm,
            gate_up=GatedMatrix(weights.gate_up, int8, leave),
            down=Matrix(weights.down, None, int8, leave),
            window=window,
        )


class Decoder:
    """A `Model`: layers of attention and a feed-forward. Query, key and value are one product, gate and up another."""

    leave = False  # weights stay as they are, for kernels that read them so

    def __init__(
        self,
        description: Description,
        weights: DecoderWeights,
        rotary: tuple[Tensor, Tensor],
        kv: KVTensors,
        int8: bool = False,
    ) -> None:
        """Takes over `weights` and empties its layers: on a CPU each is packed in turn, or becomes `int8`."""
        windows = [layer.mixer.window for layer in description.layers]
        self.layers = [Layer.of(weights.layers.pop(0), window, int8, self.leave) for window in windows]
        self.vocabulary = description.vocabulary
        self._mixer = description.attention
        self._eps = description.eps
        self._windows = tuple(sorted({window or 0 for window in windows}))
        self._embedding, self._norm = weights.embedding, weights.norm
        self._head = Matrix(weights.head, None, int8, self.leave)
        angles = torch.float32 if kv.data.device.type == "cpu" else self._norm.dtype
        self._cos, self._sin = (table.to(angles) for table in rotary)
        self._kv = kv
        self._scale = self._mixer.head_dim**-0.5

    @classmethod
    def load(
        cls,
        path: str,
        config: Any,
        kv: KVTensors,
        context_length: int,
        sample: Tensor | None = None,
        int8: bool = False,
    ) -> "Decoder | None":
        """Read a checkpoint. None where its family, options or files are not this decoder's. Raises ConfigError.

        `int8`: products in int8. They are smoothed by a `sample` [n] of token ids, and so are keys of a `kv` in int8.
        """
        description = describe(config)
        if description is None or not has_safetensors(path):
            return None
        device = str(kv.data.device)
        weights = read_weights(path, description, kv.dtype, device)
        rotary = rotary_table(config, context_length, device)
        if sample is not None:
            smooth(weights, description, rotary, sample, kv.dtype, products=int8, keys=kv.data.dtype == torch.int8)
        return cls(description, weights, rotary, kv, int8)

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        """All that the forward multiplies with, the head last."""
        layers = [each for layer in self.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*layers, self._head]

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self._mixer.heads, self._mixer.kv_heads, self._mixer.head_dim, self._windows)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens."""
        eps = self._eps
        rotation = Rotation(
            self._cos, self._sin, batch.position_ids[0], batch.pages.cells, self._kv.data, self._mixer.heads, eps
        )
        x = self._embedding[batch.token_ids[0]]  # [T, D]
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer.input_norm, eps)
            x = layer.out(self._attend(index, layer, h, rotation, batch), plus=x)  # [T, D]
            h = rms_norm(x, layer.post_norm, eps)
            x = layer.down(layer.gate_up(h), plus=x)
        drawn = rms_norm(x[batch.drawn], self._norm, eps)  # [R, D]
        return self._head(drawn)

    def _attend(self, index: int, layer: Layer, h: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Attention of one layer before its output projection: [T, H d]."""
        qkv = layer.qkv(h).view(len(h), -1, self._mixer.head_dim)  # [T, H + 2 K, d]
        q = rotation.rotate_and_store(qkv, index, layer.norms)
        out = paged_attention(q, self._kv.data, index, batch.pages, self._scale, layer.window)
        return out.view(len(h), -1)


def _of_triton() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that does not compile or fit a device: an exception of its own kind."""
    try:
        from triton.errors import TritonError
    except ImportError:  # a torch for CPUs comes without
        return ()
    return (TritonError,)


STEP_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    OverflowError,
    *_of_triton(),
)
"""What torch, numpy and Triton raise for shapes, indices, numbers or memory that a step cannot be run with. It fails
that step and nothing else."""
