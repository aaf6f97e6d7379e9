"""From a plan's chunks to the tensors of one forward, and our own decoder, which makes logits of them.

`lay_out` goes over the chunks once, in numpy: which token has which position and which cell of the KV store, which
chunk reads and writes which states, and which outputs are drawn from. A `Model` takes these tensors (`ForwardBatch`)
and returns logits. `Decoder` is the one for every `description.Description`; `decoder_gpu` has its forward on a GPU,
`any_model` runs everything else.

Shapes: T tokens, D hidden, H heads, K KV heads, d head size, R drawn tokens. Of linear layers see `linear_state`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from holdfast.kernels.attention import paged_attention
from holdfast.kernels.attention_plan import AttentionWork, attention_work
from holdfast.kernels.experts import Experts, route
from holdfast.kernels.kv import PagedBatch, PageRuns
from holdfast.kernels.layer import Rotation, gated_norm, norm_of_gated, rms_norm
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix
from holdfast.kernels.linear_state import LinearShape, LinearStates, LinearWeights, StateBatch, gated_delta, mamba2
from holdfast.kernels.quantized import Weight
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.description import (
    Attention,
    Block,
    DenseAndExperts,
    Description,
    FeedForward,
    LinearAttention,
    MixtureOfExperts,
    Op,
    describe,
)
from holdfast.replicas.model.files import has_safetensors
from holdfast.replicas.model.progress import Tell
from holdfast.replicas.model.weights import (
    AttentionWeights,
    BlockWeights,
    DecoderWeights,
    DenseAndExpertsWeights,
    ExpertsWeights,
    FeedForwardWeights,
    LinearAttentionWeights,
    OpWeights,
    read_weights,
)
from holdfast.replicas.plan import Chunk, Drawn, RowWrite

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
AllExperts: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The experts of a layer, as `kernels.experts.Experts` and `kernels.experts_gpu.GpuExperts` are called."""
Rotary: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of all positions."""
Smooth: TypeAlias = Callable[["DecoderWeights", "Description", Mapping[str | None, Rotary]], "DecoderWeights"]


LONG = 256  # pages of a row write that is applied, and copied to the device, by itself


class PageTable:
    """The pages of each sequence, by page slot: [kinds x rows, slots] int32 on the device, one row per sequence
    and kind of layers (`KVKind`).

    `pages`: of the store of each kind. Forwards are laid out from a copy on the host; on a CPU both are one memory.
    `runs[row]` is the row of the first kind as runs of neighbouring pages. Entries beyond a sequence's last position,
    and those of pages that its window has passed, may be left from an earlier one.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        page_size: int,
        pages: int | Sequence[int],
        device: str | torch.device = "cpu",
    ) -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self._rows = rows
        self._pages = (pages,) if isinstance(pages, int) else tuple(pages)
        self._host = np.zeros((len(self._pages) * rows, slots), dtype=np.int32)
        self.tensor: Tensor = torch.from_numpy(self._host).to(self.device)
        self.runs = [PageRuns() for _ in range(rows)]

    @classmethod
    def of(cls, kv: KVTensors, rows: int, context_length: int) -> "PageTable":
        """The table of a store, on its device."""
        slots, pages = -(-context_length // kv.page_size), [each.pages for each in kv.kinds]
        return cls(rows, slots, kv.page_size, pages, kv.data.device)

    @property
    def kinds(self) -> range:
        return range(len(self._pages))

    def row(self, row: int, kind: int) -> int:
        """The row of the table with a sequence's pages of one kind."""
        return row + kind * self._rows

    def write(self, write: RowWrite) -> None:
        """Apply one row write. Raises IndexError when it reaches outside the table or names an unknown page."""
        self.note((write,))
        if self.tensor.device.type != "cpu":
            end = write.first + len(write.pages)
            pages = torch.from_numpy(np.ascontiguousarray(write.pages))
            self.tensor[self.row(write.row, write.kind), write.first : end] = pages.to(self.device)

    def note(self, writes: Sequence[RowWrite]) -> tuple[list[int], list[int]]:
        """The host's part of row writes. The caller applies the device's part, in the same order.

        Returns places in the flat table and the pages that go there, except those of writes of `LONG` pages and more.
        """
        rows, slots, places, values = self._rows, self._host.shape[1], list[int](), list[int]()
        for write in writes:
            pages, first = write.pages, write.first
            end = first + len(pages)
            if not (0 <= write.row < rows and first >= 0 and end <= slots):
                raise IndexError(f"pages {first} to {end} of row {write.row} lie outside a table of {rows} x {slots}")
            short, most = end - first < LONG, self._pages[write.kind]
            ids = pages.tolist() if short else [int(pages.min()), int(pages.max())]
            if ids and not (min(ids) >= 0 and max(ids) < most):
                raise IndexError(f"row {write.row} names a page outside the {most} there are")
            runs, row = self.runs[write.row], self.row(write.row, write.kind)
            if write.kind == 0 and first > runs.extent:
                raise IndexError(f"row {write.row} is written from page {first} on but ends at {runs.extent}")
            self._host[row, first:end] = pages
            if write.kind == 0:
                runs.replace_tail(first, pages if end >= runs.extent else self._host[row, first : runs.extent])
            if short:
                places += range(row * slots + first, row * slots + end)
                values += ids
        return places, values

    def cells(self, rows: Int64s, positions: Int64s, kind: int = 0) -> Int64s:
        """The cell of each (row, position) in the store of a kind."""
        slots = positions // self.page_size
        cells: Int64s = (self._host[self.row(0, kind) + rows, slots] - slots) * self.page_size + positions
        return cells


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Inputs of one forward, all on the device.

    token_ids [1, T] and position_ids [1, T] int64; drawn [R] int64: the tokens whose output is drawn from, maybe none.
    `pages`: where the tokens lie, for each kind of layers with attention. `states`: which chunk has which states, of a
    model with linear layers.
    """

    token_ids: Tensor
    position_ids: Tensor
    drawn: Tensor
    pages: tuple[PagedBatch, ...]
    states: StateBatch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """A forward's tokens on the host. token_ids, positions, drawn [R] and the `cells` [T] of each kind are int64.

    `rows`, `starts`, `lengths`, `draws`: page table row, first position, tokens and drawn positions of each chunk.
    `states`: the fields of a `StateBatch`; none of a model without linear layers.
    """

    token_ids: Int64s
    positions: Int64s
    drawn: Int64s
    cells: tuple[Int64s, ...]
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    draws: list[int]
    states: tuple[Int32s, ...] = ()

    @property
    def arrays(self) -> tuple[Int64s | Int32s, ...]:
        """The arrays that the device needs."""
        return self.token_ids, self.positions, self.drawn, *self.cells, *self.states

    def batch(self, table: PageTable, views: Sequence[Tensor]) -> ForwardBatch:
        """The batch over `views`, which are `arrays` on the table's device."""
        token_ids, positions, drawn, *rest = views
        cells, states = rest[: len(self.cells)], rest[len(self.cells) :]
        used = None
        if states:
            starts, source, target, applied, held, marks = states
            used = StateBatch(starts, source, target, applied, held, marks, max(self.lengths))
        return ForwardBatch(token_ids[None], positions[None], drawn, self.paged(table, cells), used)

    def paged(self, table: PageTable, cells: Sequence[Tensor] = ()) -> tuple[PagedBatch, ...]:
        """Where the tokens lie, as attention reads it, by kind; `cells` are on the table's device. Work that is only
        planned needs none.
        """
        where, pages = (self.starts, self.lengths), []
        decodes = [drawn == length for drawn, length in zip(self.draws, self.lengths, strict=True)]
        for kind in table.kinds:
            rows = [table.row(row, kind) for row in self.rows]
            runs = [table.runs[row] for row in self.rows] if kind == 0 else []
            of_kind = cells[kind] if cells else table.tensor
            pages.append(PagedBatch(table.page_size, table.tensor, rows, *where, of_kind, runs, decodes=decodes))
        return tuple(pages)


def lay_out(chunks: tuple[Chunk, ...], table: PageTable) -> BatchLayout:
    """Lay the chunks out one after the other. Raises IndexError for a row or positions outside the page table."""
    starts = [chunk.start for chunk in chunks]
    lengths = [len(chunk.tokens) for chunk in chunks]
    rows = [chunk.row for chunk in chunks]
    draws = [0 if (draw := chunk.draw) is None else draw.drafts + 1 for chunk in chunks]
    counts = np.array(lengths)
    ends = counts.cumsum()
    # Position of token t: its chunk's start plus its distance from its chunk's first token.
    tokens = np.arange(int(ends[-1]))
    positions = (starts - ends + counts).repeat(counts) + tokens
    of_each = np.array(rows).repeat(counts)
    cells = tuple(table.cells(of_each, positions, kind) for kind in table.kinds)
    # The last token's output is drawn from, and those before its drafts.
    drawn = tokens if draws == lengths else tokens[(ends.repeat(counts) - tokens) <= np.repeat(draws, counts)]
    token_ids = np.concatenate([chunk.tokens for chunk in chunks], dtype=np.int64)
    return BatchLayout(token_ids, positions, drawn, cells, rows, starts, lengths, draws, _states(chunks, ends))


def following_tokens(chunks: Sequence[Chunk], drawn: Sequence[Drawn | None] = ()) -> Int64s:
    """The token after each token of a step, [T] int64. Where it is drawn, as in `drawn`, else a draft or 0; behind a
    draft that was refused it means nothing.
    """
    parts: list[Int64s] = []
    for i, chunk in enumerate(chunks):
        part = np.append(chunk.tokens[1:], chunk.following).astype(np.int64)
        if i < len(drawn) and (result := drawn[i]) is not None and chunk.draw is not None:
            first = len(part) - chunk.draw.drafts - 1
            part[first : first + len(result.tokens)] = result.tokens
        parts.append(part)
    return np.concatenate(parts)


def _states(chunks: tuple[Chunk, ...], ends: Int64s) -> tuple[Int32s, ...]:
    """The fields of a `StateBatch`, in its order; none where the chunks have no states."""
    uses = [chunk.state for chunk in chunks if chunk.state is not None]
    if len(uses) != len(chunks):
        return ()
    marks = [(i, n, slot) for i, use in enumerate(uses) for n, slot in use.marks]
    each = np.array([(use.source, use.target, use.applied, use.held) for use in uses], np.int32)
    columns = np.ascontiguousarray(each.T)
    return (np.append(0, ends).astype(np.int32), *columns, np.array(marks, np.int32).reshape(-1, 3))


def build_batch(chunks: tuple[Chunk, ...], table: PageTable) -> ForwardBatch:
    """The batch of some chunks, copied to the table's device. Raises IndexError like `lay_out`."""
    layout = lay_out(chunks, table)
    return layout.batch(table, [torch.from_numpy(array).to(table.device) for array in layout.arrays])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one kind of layers: heads, their size, and the windows; 0: none. `invariant`: see
    `attention_work`.
    """

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


def plan_attention(shapes: Sequence[AttentionShape], batches: Sequence[PagedBatch]) -> list[list[AttentionWork]]:
    """A batch's attention worked out before its forward, by kind."""
    return [shape.works(pages) for shape, pages in zip(shapes, batches, strict=False)]


class Model(Protocol):
    """Takes a batch, stores its KV and returns the logits [R, vocabulary] of its drawn tokens.

    `attention`, one shape for each kind of layers, lets a batch's attention be worked out beforehand; (): the model
    asks for it layer by layer.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def attention(self) -> tuple[AttentionShape, ...]: ...

    def forward(self, batch: ForwardBatch) -> Tensor: ...


def rotary_tables(config: Any, description: Description, positions: int, device: str) -> dict[str | None, Rotary]:
    """Cosines and sines for every position, float32 [positions, half of the values that turn], with the context's
    scaling, for each `Attention.rotary`. Of text alone the three positions of an mrope are equal, so it is the same as
    one. Without positions all angles are zero.
    """
    text = config.get_text_config(decoder=True)
    at = torch.arange(positions, device=device).float()
    tables: dict[str | None, Rotary] = {}
    for op in description.attentions:
        if op.rotary not in tables:
            inverse, factor = _inverse_frequencies(text, op, device)
            angles = torch.outer(at, inverse)
            tables[op.rotary] = angles.cos() * factor, angles.sin() * factor
    return tables


def _inverse_frequencies(text: Any, op: Attention, device: str) -> tuple[Tensor, float]:
    """Angles of one position, and the factor of cosines and sines."""
    if op.rotary is None:
        return torch.zeros(op.head_dim // 2, device=device), 1.0
    rope, kind = text.rope_parameters, op.rotary or None
    if kind:
        rope = rope[kind]
    if rope.get("rope_type", "default") != "default":
        number = next(i for i, each in enumerate(text.layer_types) if each == kind) if kind else 0
        layer = text.per_layer_config[number]  # Gemma 4's heads differ
        result: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            layer, torch.device(device), layer_type=kind
        )
        return result
    dim = int(op.head_dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    return 1.0 / (rope["rope_theta"] ** exponents), 1.0


# ---- blocks, ready to compute ----


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention and its place in the KV store. `turn`: which of the decoder's rotations turns its heads."""

    op: Attention
    kind: int
    index: int  # among the attentions of its kind
    turn: int
    qkv: Matrix
    norms: tuple[Tensor, Tensor] | None  # of queries and keys
    out: Matrix
    sinks: Tensor | None

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        return [self.qkv, self.out]


@dataclass(frozen=True, slots=True)
class LinearAttentionLayer:
    """A linear attention and its place among the states."""

    op: LinearAttention
    index: int  # among the linear layers
    qkvz: Matrix
    gates: Matrix
    kernel: LinearWeights
    norm: Tensor
    out: Matrix

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        return [self.qkvz, self.gates, self.out]


@dataclass(frozen=True, slots=True)
class FeedForwardLayer:
    """A dense feed-forward."""

    op: FeedForward
    first: GatedMatrix
    down: Matrix

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        return [self.first, self.down]


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A router, its experts, and what all tokens share. `scales` [E]: of each expert's weight."""

    op: MixtureOfExperts
    router: Matrix
    correction: Tensor | None
    scales: Tensor | None
    experts: AllExperts
    shared: FeedForwardLayer | None
    shared_gate: Matrix | None
    latent: tuple[Matrix, Matrix] | None

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        return [*(self.shared.matrices if self.shared is not None else []), *(self.latent or ())]


@dataclass(frozen=True, slots=True)
class DenseAndExpertsLayer:
    """Gemma 4's two feed-forwards, with the norms before and behind each."""

    op: DenseAndExperts
    dense: FeedForwardLayer
    dense_norms: tuple[Tensor, Tensor]
    experts: ExpertsLayer
    experts_norms: tuple[Tensor, Tensor]
    router_norm: Tensor

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        return [*self.dense.matrices, *self.experts.matrices]


OpLayer: TypeAlias = AttentionLayer | LinearAttentionLayer | FeedForwardLayer | ExpertsLayer | DenseAndExpertsLayer


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """A `Block`, ready to compute."""

    norm: Tensor | None
    op: OpLayer
    post_norm: Tensor | None
    scale: float


@dataclass(frozen=True, slots=True)
class NextTokenLayer:
    """A `NextToken`, ready to compute."""

    blocks: tuple[BlockLayer, ...]
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Matrix
    norm: Tensor


class Decoder:
    """A `Model`: x + post_norm(op(norm(x))) for each block. What has the same input is one product: query, key and
    value, or gate and up.
    """

    leave = False  # weights stay as they are, for kernels that read them so
    rms_norm, gated_norm, norm_of_gated = staticmethod(rms_norm), staticmethod(gated_norm), staticmethod(norm_of_gated)
    route = staticmethod(route)

    def __init__(
        self,
        description: Description,
        weights: DecoderWeights,
        rotary: Mapping[str | None, Rotary],
        kv: KVTensors,
        int8: bool = False,
        states: LinearStates | None = None,
    ) -> None:
        """Takes the blocks of `weights` one by one: on a CPU each is packed in turn, or becomes `int8`.

        `states`: of a model with linear layers.
        """
        self.description, self.vocabulary = description, description.vocabulary
        self._int8, self._kv, self.states = int8, kv, states
        # Rotations: whose tables, into which kind's store, for so many heads of queries.
        self._turns: dict[tuple[str | None, int, int], int] = {}
        angles = torch.float32 if kv.data.device.type == "cpu" else weights.embedding.dtype
        self._rotary = {kind: (cos.to(angles), sin.to(angles)) for kind, (cos, sin) in rotary.items()}
        self._embedding, self._norm = weights.embedding, weights.norm
        self._head = Matrix(weights.head, None, int8, self.leave)
        weights.head = weights.embedding  # a packed one is a copy
        self.blocks: list[BlockLayer] = []

        def taken(of: BlockWeights, block: Block) -> BlockLayer:
            return BlockLayer(of.norm, self._op(block.op, of.op), of.post_norm, of.scale)

        # This holds no block while it asks for the next.
        for layer in map(taken, weights.blocks, description.all_blocks):
            self.blocks.append(layer)
        self.next_token: NextTokenLayer | None = None
        if (of_next := weights.next_token) is not None:
            n = len(description.blocks)
            self.blocks, further = self.blocks[:n], tuple(self.blocks[n:])
            norms, projection = (of_next.embedding_norm, of_next.hidden_norm), self._matrix(of_next.projection)
            self.next_token = NextTokenLayer(further, *norms, projection, of_next.norm)
        # Normed rows [T, D] of all tokens of the last forward, where there is `next_token`.
        self.hidden: Tensor | None = None
        self._embedding_scale = float(torch.tensor(description.embedding_scale, dtype=weights.embedding.dtype))
        self._unit = torch.ones(
            max(description.hidden, *(op.head_dim for op in description.attentions)), device=kv.data.device
        )

    def _op(self, op: Op, of: OpWeights) -> OpLayer:
        """An op of its weights."""
        if isinstance(op, Attention):
            assert isinstance(of, AttentionWeights)
            kind = self._kv.kind(op.window)
            index = sum(isinstance(block.op, AttentionLayer) and block.op.kind == kind for block in self.blocks)
            turn = self._turns.setdefault((op.rotary, kind, op.heads), len(self._turns))
            norms = None if of.q_norm is None or of.k_norm is None else (of.q_norm, of.k_norm)
            qkv, out = self._matrix(of.qkv, of.qkv_bias), self._matrix(of.out, of.out_bias)
            return AttentionLayer(op, kind, index, turn, qkv, norms, out, of.sinks)
        if isinstance(op, LinearAttention):
            assert isinstance(of, LinearAttentionWeights)
            index = sum(isinstance(block.op, LinearAttentionLayer) for block in self.blocks)
            qkvz, gates = self._matrix(of.qkvz), Matrix(of.gates, None, False, self.leave)
            return LinearAttentionLayer(op, index, qkvz, gates, of.kernel, of.norm, self._matrix(of.out))
        if isinstance(op, FeedForward):
            assert isinstance(of, FeedForwardWeights)
            return self._feed_forward(op, of)
        if isinstance(op, MixtureOfExperts):
            assert isinstance(of, ExpertsWeights)
            return self._experts(op, of)
        assert isinstance(of, DenseAndExpertsWeights)
        return DenseAndExpertsLayer(
            op,
            self._feed_forward(op.dense, of.dense),
            of.dense_norms,
            self._experts(op.experts, of.experts, of.scales),
            of.experts_norms,
            of.router_norm,
        )

    def _feed_forward(self, op: FeedForward, of: FeedForwardWeights) -> FeedForwardLayer:
        return FeedForwardLayer(op, self._gated_matrix(of.first, op.activation), self._matrix(of.down))

    def _experts(self, op: MixtureOfExperts, of: ExpertsWeights, scales: Tensor | None = None) -> ExpertsLayer:
        shared = None
        if of.shared is not None:
            shared = self._feed_forward(FeedForward(op.shared, op.activation), of.shared)
        return ExpertsLayer(
            op,
            Matrix(of.router, of.router_bias, False, self.leave),
            of.correction,
            scales,
            self._all_experts(op, of),
            shared,
            None if of.shared_gate is None else Matrix(of.shared_gate, None, False, self.leave),
            None if of.latent is None else (self._matrix(of.latent[0]), self._matrix(of.latent[1])),
        )

    def _matrix(self, weight: Weight, bias: Tensor | None = None) -> Matrix:
        """A weight ready to multiply with."""
        assert isinstance(weight, Tensor)
        return Matrix(weight, bias, self._int8, self.leave)

    def _gated_matrix(self, weight: Weight, activation: Activation) -> GatedMatrix:
        assert isinstance(weight, Tensor)
        return GatedMatrix(weight, self._int8, self.leave, activation)

    def _all_experts(self, op: MixtureOfExperts, of: ExpertsWeights) -> AllExperts:
        assert isinstance(of.first, Tensor)
        assert isinstance(of.down, Tensor)
        biases = (of.first_bias, of.down_bias)
        return Experts(of.first, of.down, op.activation, *biases, self._int8, op.alpha, op.limit)

    @classmethod
    def load(
        cls,
        path: str,
        config: Any,
        kv: KVTensors,
        context_length: int,
        smooth: Smooth | None = None,
        int8: bool = False,
        states: LinearStates | None = None,
        tell: Tell | None = None,
        description: Description | None = None,
    ) -> "Decoder | None":
        """Read a checkpoint. None where its family, options or files are not this decoder's. Raises ConfigError.

        `int8`: products in int8. `smooth` evens out the weights before (`smoothing`). `tell`: see `read_weights`.
        `description`: None: as `describe` has it, without a layer that predicts further tokens.
        """
        description = description or describe(config)
        if description is None or not has_safetensors(Path(path)):
            return None
        device = str(kv.data.device)
        weights = read_weights(path, description, kv.dtype, device, cls.leave, tell)
        rotary = rotary_tables(config, description, context_length, device)
        if smooth is not None:
            weights = smooth(weights, description, rotary)
        return cls(description, weights, rotary, kv, int8, states)

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        """All that the forward multiplies with but experts and routers, the head last."""
        projection = [] if self.next_token is None else [self.next_token.projection]
        return [*(each for block in self.all_blocks for each in block.op.matrices), *projection, self._head]

    @property
    def all_blocks(self) -> list[BlockLayer]:
        """As `Description.all_blocks`."""
        return self.blocks if self.next_token is None else [*self.blocks, *self.next_token.blocks]

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        shapes = []
        for kind in range(len(self._kv.kinds)):
            ops = [op for op in self.description.attentions if self._kv.kind(op.window) == kind]
            windows = tuple(sorted({op.window or 0 for op in ops}))
            shapes.append(AttentionShape(ops[0].heads, ops[0].kv_heads, ops[0].head_dim, windows))
        return tuple(shapes)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens, and the states."""
        x = self._through(self.blocks, self._embedded(batch.token_ids[0]), batch)
        if self.next_token is not None:
            self.hidden = rms_norm(x, self._norm, self.description.eps)
            return self._logits(self.hidden[batch.drawn])
        return self._logits(rms_norm(x[batch.drawn], self._norm, self.description.eps))

    @torch.inference_mode()
    def predict(self, batch: ForwardBatch, hidden: Tensor, following: Tensor, rows: Tensor) -> Tensor:
        """Logits [S, vocabulary] of the second token after some of a batch's tokens, by `next_token`; stores its KV of
        all tokens.

        `hidden` [T, D]: of the batch's forward. `following` [T] int64: the token after each of its tokens. `rows` [S]
        int64: the tokens of the batch whose second next token is predicted.

        A cell of this layer's KV depends on one token more than the others of its position. Where a prefix is reused
        whose last token another one followed, that cell is off: a draft may be worse, and no output changes.
        """
        layer, eps = self.next_token, self.description.eps
        assert layer is not None
        both = (
            self.rms_norm(self._embedded(following), layer.embedding_norm, eps),
            self.rms_norm(hidden, layer.hidden_norm, eps),
        )
        x = self._through(layer.blocks, layer.projection(torch.cat(both, dim=1)), batch)
        return self._logits(self.rms_norm(x[rows], layer.norm, eps))

    def _through(self, blocks: Sequence[BlockLayer], x: Tensor, batch: ForwardBatch) -> Tensor:
        """Rows [T, D] behind the last of `blocks`."""
        eps, post_eps = self.description.eps, self.description.post_eps
        positions, pages, stores = batch.position_ids[0], batch.pages, self._kv.kinds
        rotations = [  # by `AttentionLayer.turn`
            Rotation(*self._rotary[rotary], positions, pages[kind].cells, stores[kind].data, heads, eps)
            for rotary, kind, heads in self._turns
        ]
        for block in blocks:
            h = x if block.norm is None else rms_norm(x, block.norm, eps)
            if block.post_norm is None:
                x = self._apply(block.op, h, batch, rotations, plus=x)
            else:
                x = x + rms_norm(self._apply(block.op, h, batch, rotations), block.post_norm, post_eps)
            if block.scale != 1.0:
                x = x * block.scale
        return x

    def _embedded(self, token_ids: Tensor) -> Tensor:
        x = self._embedding[token_ids]  # [T, D]
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if not self.description.embedding_norm:
            return x
        return self.rms_norm(x, self._unit[: x.shape[1]], self.description.eps)

    def _logits(self, drawn: Tensor) -> Tensor:
        logits, described = self._head(drawn), self.description
        if described.logit_scale != 1.0:
            logits = logits * described.logit_scale
        cap = described.logit_cap
        return (logits / cap).tanh() * cap if cap else logits

    def _apply(
        self,
        layer: OpLayer,
        h: Tensor,
        batch: ForwardBatch,
        rotations: Sequence[Rotation] = (),
        plus: Tensor | None = None,
    ) -> Tensor:
        """The op of `h` [T, D], and `plus`."""
        if isinstance(layer, AttentionLayer):
            return layer.out(self._attend(layer, h, batch, rotations), plus)
        if isinstance(layer, LinearAttentionLayer):
            return layer.out(self._recur(layer, h, batch), plus)
        if isinstance(layer, FeedForwardLayer):
            return layer.down(self._inner(layer, h), plus)
        if isinstance(layer, ExpertsLayer):
            return self._mix(layer, h, h, plus)
        (before, behind), (before_2, behind_2), eps = layer.dense_norms, layer.experts_norms, self.description.eps
        x, norm = h, self.rms_norm
        dense = layer.dense.down(self._inner(layer.dense, norm(x, before, eps)))
        mixed = self._mix(layer.experts, norm(x, before_2, eps), norm(x, layer.router_norm, eps))
        both = norm(dense, behind, eps) + norm(mixed, behind_2, eps)
        return both if plus is None else both + plus

    def _attend(self, layer: AttentionLayer, h: Tensor, batch: ForwardBatch, rotations: Sequence[Rotation]) -> Tensor:
        """Attention before its output projection: [T, H d]."""
        op = layer.op
        gate, qkv = op.split(layer.qkv(h))
        norms = self._norm_heads(layer, qkv)
        q = rotations[layer.turn].rotate_and_store(qkv, layer.index, norms)
        where = (self._kv.kinds[layer.kind].data, layer.index, batch.pages[layer.kind])
        out = paged_attention(q, *where, op.scale or op.head_dim**-0.5, op.window, sinks=layer.sinks).flatten(1)
        return out if gate is None else self._gated(out, gate, op)

    def _norm_heads(self, layer: AttentionLayer, qkv: Tensor) -> tuple[Tensor, Tensor] | None:
        """Norm in place what the rotation does not. Returns the norms that are left to it."""
        op, eps, keys = layer.op, self.description.eps, layer.op.heads + layer.op.kv_heads
        if op.v_norm:
            values = qkv[:, keys:]
            rows = values.reshape(-1, op.head_dim).contiguous()
            values.copy_(self.rms_norm(rows, self._unit[: op.head_dim], eps).view_as(values))
        if op.qk_norm != "row" or layer.norms is None:
            return layer.norms
        for part, norm in zip((qkv[:, : op.heads], qkv[:, op.heads : keys]), layer.norms, strict=True):
            part.copy_(self.rms_norm(part.flatten(1).contiguous(), norm, eps).view_as(part))
        return None

    def _gated(self, out: Tensor, gate: Tensor, op: Attention) -> Tensor:
        """An attention's outputs [T, H d] with their gates."""
        if op.gate == "sigmoid":
            return out.mul_(gate.sigmoid())
        passed = softplus(gate.float()).to(out.dtype)
        return (out.view(len(out), passed.shape[1], -1) * passed[..., None]).view_as(out)

    def _recur(self, layer: LinearAttentionLayer, h: Tensor, batch: ForwardBatch) -> Tensor:
        """A linear attention before its output projection: [T, H v]."""
        if self.states is None or batch.states is None:
            raise ValueError("a step of a model with linear layers has no states")
        shape, eps = layer.op.shape, self.description.eps
        mixed, z = layer.op.split(layer.qkvz(h))
        gates = layer.gates(h).chunk(shape.gates, dim=1)
        out = self._rule(shape)(mixed, *gates, layer.kernel, self.states, layer.index, batch.states)  # [T, H, v]
        if shape.rule == "delta":
            return self.gated_norm(out, z, layer.norm, eps)
        return self.norm_of_gated(out.view(len(out), shape.key_heads, -1), z, layer.norm, eps)

    def _rule(self, shape: LinearShape) -> Callable[..., Tensor]:
        return gated_delta if shape.rule == "delta" else mamba2

    def _inner(self, layer: FeedForwardLayer, h: Tensor) -> Tensor:
        """A feed-forward before its last product: [T, inner]."""
        return layer.first(h)

    def _mix(self, layer: ExpertsLayer, h: Tensor, routed: Tensor, plus: Tensor | None = None) -> Tensor:
        """The experts of `h` that the router chooses by `routed`, what all tokens share, and `plus`."""
        chosen, weights = self.route(layer.router(routed.float()), layer.op.routing, layer.correction)
        if layer.scales is not None:
            weights = weights * layer.scales[chosen.long()]
        if (shared := layer.shared) is not None:
            inner = self._inner(shared, h)
            if layer.shared_gate is None:
                plus = shared.down(inner, plus)
            else:
                passed = shared.down(inner) * layer.shared_gate(h).sigmoid()
                plus = passed if plus is None else plus + passed
        if layer.latent is None:
            return layer.experts(h, chosen, weights, plus)
        into, out = layer.latent
        return out(layer.experts(into(h), chosen, weights, None), plus)


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
