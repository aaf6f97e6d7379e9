"""From a plan's chunks to the tensors of one forward, and our own decoder, which makes logits of them.

`lay_out` goes over the chunks once, in numpy: which token has which position and which cell of the KV store, which
chunk reads and writes which states, and which outputs are drawn from. A `Model` takes these tensors (`ForwardBatch`)
and returns logits. `Decoder` is the one for every `description.Description`; `decoder_gpu` has its forward on a GPU,
`any_model` runs everything else.

Shapes: T tokens, D hidden, H heads, K KV heads, d head size, R drawn tokens. Of linear layers see `linear_state`.
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
from holdfast.kernels.layer import Rotation, gated_norm, rms_norm
from holdfast.kernels.linear import GatedMatrix, Matrix
from holdfast.kernels.linear_state import LinearStates, LinearWeights, StateBatch, gated_delta
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.description import (
    Attention,
    Description,
    GatedDeltaNet,
    Mixer,
    describe,
    head_dim,
    rope_type,
)
from holdfast.replicas.model.smoothing import smooth
from holdfast.replicas.model.weights import (
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    has_safetensors,
    read_weights,
)
from holdfast.replicas.plan import Chunk, RowWrite

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class PageTable:
    """Which page holds which part of which sequence: [kinds x rows, slots] int32 on the device, one row per sequence
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
        self.note(write)
        if self.tensor.device.type != "cpu":
            end = write.first + len(write.pages)
            pages = torch.from_numpy(np.ascontiguousarray(write.pages))
            self.tensor[self.row(write.row, write.kind), write.first : end] = pages.to(self.device)

    def note(self, write: RowWrite) -> None:
        """The host's part of a row write. The caller applies the device's part, in the same order."""
        rows, slots = self._rows, self._host.shape[1]
        first, end = write.first, write.first + len(write.pages)
        if not (0 <= write.row < rows and first >= 0 and end <= slots):
            raise IndexError(f"pages {first} to {end} of row {write.row} lie outside a table of {rows} x {slots}")
        pages = self._pages[write.kind]
        if len(write.pages) and not (write.pages.min() >= 0 and write.pages.max() < pages):
            raise IndexError(f"row {write.row} names a page outside the {pages} there are")
        runs = self.runs[write.row]
        if write.kind == 0 and first > runs.extent:
            raise IndexError(f"row {write.row} is written from page {first} on but ends at {runs.extent}")
        row = self._host[self.row(write.row, write.kind)]
        row[first:end] = write.pages
        if write.kind == 0:
            runs.replace_tail(first, row[first : max(end, runs.extent)])

    def cells(self, rows: Int64s, positions: Int64s, kind: int = 0) -> Int64s:
        """The cell of each (row, position) in the store of a kind."""
        slots, inside = np.divmod(positions, self.page_size)
        cells: Int64s = self._host[self.row(0, kind) + rows, slots].astype(np.int64) * self.page_size + inside
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

    `rows`, `starts`, `lengths`: page table row, first position and tokens of each chunk; `decodes`: see `Chunk`.
    `states`: the fields of a `StateBatch`; none of a model without linear layers.
    """

    token_ids: Int64s
    positions: Int64s
    drawn: Int64s
    cells: tuple[Int64s, ...]
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    decodes: list[bool]
    states: tuple[Int32s, ...] = ()

    @property
    def arrays(self) -> tuple[Int64s | Int32s, ...]:
        """What the device needs."""
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
        for kind in table.kinds:
            rows = [table.row(row, kind) for row in self.rows]
            runs = [table.runs[row] for row in self.rows] if kind == 0 else []
            of_kind = cells[kind] if cells else table.tensor
            pages.append(PagedBatch(table.page_size, table.tensor, rows, *where, of_kind, runs, decodes=self.decodes))
        return tuple(pages)


def lay_out(chunks: tuple[Chunk, ...], table: PageTable) -> BatchLayout:
    """Lay the chunks out one after the other. Raises IndexError for a row or positions outside the page table."""
    starts = [chunk.start for chunk in chunks]
    lengths = [len(chunk.tokens) for chunk in chunks]
    rows = [chunk.row for chunk in chunks]
    ends = np.cumsum(lengths)
    # Position of token t: its chunk's start plus its distance from its chunk's first token.
    offsets: Int64s = np.array(starts, dtype=np.int64) - ends + lengths
    positions = np.arange(int(ends[-1])) + np.repeat(offsets, lengths)
    of_each = np.repeat(rows, lengths)
    cells = tuple(table.cells(of_each, positions, kind) for kind in table.kinds)
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
    return BatchLayout(tokens, positions, drawn, cells, rows, starts, lengths, decodes, _states(chunks, ends))


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
    """Of one kind of layers: heads and their size, and the different windows; 0: none. `invariant`: see
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


def rotary_table(config: Any, positions: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position, float32 [positions, half of the values that turn], with the context's
    scaling. Of text alone the three positions of an mrope are equal, so it is the same as one.
    """
    text = config.get_text_config(decoder=True)
    kind = rope_type(text)
    if kind == "default":
        dim = int(head_dim(text) * text.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
        inverse, factor = 1.0 / (text.rope_parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](text, torch.device(device))
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    return angles.cos() * factor, angles.sin() * factor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The mixer of a layer with attention: its weights, ready to multiply with, and its place in the KV store."""

    kind: int
    index: int  # among the layers of its kind
    mixer: Attention
    qkv: Matrix
    norms: tuple[Tensor, Tensor] | None  # of queries and keys
    out: Matrix


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The mixer of a linear layer."""

    index: int  # among the linear layers
    mixer: GatedDeltaNet
    qkvz: Matrix
    ab: Matrix
    kernel: LinearWeights
    norm: Tensor
    out: Matrix


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer."""

    input_norm: Tensor
    mixer: AttentionLayer | DeltaLayer
    post_norm: Tensor
    gate_up: GatedMatrix
    down: Matrix

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        mixer = self.mixer
        first = [mixer.qkv] if isinstance(mixer, AttentionLayer) else [mixer.qkvz, mixer.ab]
        return [*first, mixer.out, self.gate_up, self.down]


class Decoder:
    """A `Model`: layers of a mixer and a feed-forward. What has the same input is one product: query, key and value,
    or gate and up.
    """

    leave = False  # weights stay as they are, for kernels that read them so
    delta_rule = staticmethod(gated_delta)

    def __init__(
        self,
        description: Description,
        weights: DecoderWeights,
        rotary: tuple[Tensor, Tensor],
        kv: KVTensors,
        int8: bool = False,
        states: LinearStates | None = None,
    ) -> None:
        """Takes over `weights` and empties its layers: on a CPU each is packed in turn, or becomes `int8`.

        `states`: of a model with linear layers.
        """
        self.layers: list[Layer] = []
        self.vocabulary = description.vocabulary
        self._attention = description.attention
        self._eps = description.eps
        self._windows: list[set[int]] = [set() for _ in kv.kinds]
        self._embedding, self._norm = weights.embedding, weights.norm
        self._kv, self.states = kv, states
        for described in description.layers:
            self._take(weights.layers.pop(0), described.mixer, int8)
        self._head = Matrix(weights.head, None, int8, self.leave)
        angles = torch.float32 if kv.data.device.type == "cpu" else weights.embedding.dtype
        self._cos, self._sin = (table.to(angles) for table in rotary)
        self._scale = self._attention.head_dim**-0.5

    def _take(self, weights: LayerWeights, described: Mixer, int8: bool) -> None:
        """Make the next layer of its weights."""
        of, scales = weights.mixer, weights.scales
        out = self._matrix(of.out, scales.get("out"), None, int8)
        mixer: AttentionLayer | DeltaLayer
        if isinstance(of, AttentionWeights):
            assert isinstance(described, Attention)
            norms = None if of.q_norm is None or of.k_norm is None else (of.q_norm, of.k_norm)
            qkv = self._matrix(of.qkv, scales.get("qkv"), of.qkv_bias, int8)
            kind = self._kv.kind(described.window)
            self._windows[kind].add(described.window or 0)
            index = sum(isinstance(each.mixer, AttentionLayer) and each.mixer.kind == kind for each in self.layers)
            mixer = AttentionLayer(kind, index, described, qkv, norms, out)
        else:
            assert isinstance(described, GatedDeltaNet)
            qkvz = self._matrix(of.qkvz, scales.get("qkvz"), None, int8)
            index = sum(isinstance(each.mixer, DeltaLayer) for each in self.layers)
            mixer = DeltaLayer(index, described, qkvz, self._matrix(of.ab, None, None), of.kernel, of.norm, out)
        gate_up = self._gated_matrix(weights.gate_up, scales.get("gate_up"), int8)
        down = self._matrix(weights.down, scales.get("down"), None, int8)
        self.layers.append(Layer(weights.input_norm, mixer, weights.post_norm, gate_up, down))

    def _matrix(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None, int8: bool = False) -> Matrix:
        """A weight ready to multiply with. `scale`: of one in FP8, which stays so for the kernels of a GPU."""
        return Matrix(weight, bias, int8, self.leave)

    def _gated_matrix(self, gate_up: Tensor, scale: Tensor | None, int8: bool) -> GatedMatrix:
        return GatedMatrix(gate_up, int8, self.leave)

    @classmethod
    def load(
        cls,
        path: str,
        config: Any,
        kv: KVTensors,
        context_length: int,
        sample: Tensor | None = None,
        int8: bool = False,
        states: LinearStates | None = None,
    ) -> "Decoder | None":
        """Read a checkpoint. None where its family, options or files are not this decoder's. Raises ConfigError.

        `int8`: products in int8. They are smoothed by a `sample` [n] of token ids, and so are keys of a `kv` in int8.
        """
        description = describe(config)
        if description is None or not has_safetensors(path):
            return None
        device = str(kv.data.device)
        weights = read_weights(path, description, kv.dtype, device, fp8=cls.leave)
        rotary = rotary_table(config, context_length, device)
        if sample is not None:
            smooth(weights, description, rotary, sample, kv.dtype, products=int8, keys=kv.data.dtype == torch.int8)
        return cls(description, weights, rotary, kv, int8, states)

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        """All that the forward multiplies with, the head last."""
        return [*(each for layer in self.layers for each in layer.matrices), self._head]

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        of = self._attention
        return tuple(AttentionShape(of.heads, of.kv_heads, of.head_dim, tuple(sorted(each))) for each in self._windows)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens, and the states."""
        eps, heads = self._eps, self._attention.heads
        rotations = [
            Rotation(self._cos, self._sin, batch.position_ids[0], pages.cells, kv.data, heads, eps)
            for pages, kv in zip(batch.pages, self._kv.kinds, strict=True)
        ]
        x = self._embedding[batch.token_ids[0]]  # [T, D]
        for layer in self.layers:
            mixer, h = layer.mixer, rms_norm(x, layer.input_norm, eps)
            if isinstance(mixer, AttentionLayer):
                mixed = self._attend(mixer, h, rotations[mixer.kind], batch)
            else:
                mixed = self._recur(mixer, h, batch)
            x = mixer.out(mixed, plus=x)  # [T, D]
            h = rms_norm(x, layer.post_norm, eps)
            x = layer.down(layer.gate_up(h), plus=x)
        drawn = rms_norm(x[batch.drawn], self._norm, eps)  # [R, D]
        return self._head(drawn)

    def _attend(self, layer: AttentionLayer, h: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Attention of one layer before its output projection: [T, H d]."""
        mixer = layer.mixer
        gate, qkv = mixer.split(layer.qkv(h))
        q = rotation.rotate_and_store(qkv, layer.index, layer.norms)
        store, pages = self._kv.kinds[layer.kind].data, batch.pages[layer.kind]
        out = paged_attention(q, store, layer.index, pages, self._scale, mixer.window).flatten(1)
        return out if gate is None else out.mul_(gate.sigmoid())

    def _recur(self, layer: DeltaLayer, h: Tensor, batch: ForwardBatch) -> Tensor:
        """The delta rule of one linear layer before its output projection: [T, H v]."""
        out, z = self._delta(layer, h, batch)
        return gated_norm(out, z, layer.norm, self._eps)

    def _delta(self, layer: DeltaLayer, h: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """What the states of a linear layer answer, [T, H, v], and the gates of that, [T, H v]."""
        if self.states is None or batch.states is None:
            raise ValueError("a step of a model with linear layers has no states")
        mixed, z = layer.mixer.split(layer.qkvz(h))
        a, b = layer.ab(h).chunk(2, dim=1)
        return self.delta_rule(mixed, a, b, layer.kernel, self.states, layer.index, batch.states), z


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
