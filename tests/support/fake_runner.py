"""A runner without a model: cells remember what was written to them, and the next token is a hash of what is read.

So a wrong page, a stale cell or a missing copy changes the output, as it would with a real model. A recurrent state is
the tokens that were applied to it, and has to be those that the cells have.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from holdfast.replicas.plan import Chunk, Drawn, StepOutput, StepPlan

VOCABULARY = 50
EOS = 0


def next_token(tokens: list[int]) -> int:
    """Depends on every token before; mostly repeats the one seven places back, so that drafts can be right."""
    digest = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
    if digest % 8 and len(tokens) >= 7:
        return tokens[-7]
    return digest // 8 % VOCABULARY


def complete(prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset({EOS})) -> list[int]:
    """What any correct engine must generate over `FakeRunner`."""
    tokens, out = list(prompt), []
    while len(out) < max_tokens:
        out.append(next_token(tokens))
        tokens.append(out[-1])
        if out[-1] in eos:
            break
    return out


@dataclass(slots=True)
class FakeFlight:
    """A step of a `FakeRunner`. `beside`: the step before had not landed when this one was begun."""

    runner: "FakeRunner"
    plan: StepPlan
    beside: bool
    landed: bool = False
    done: StepOutput | Exception | None = None

    def fly(self) -> None:
        if self.done is None:
            try:
                self.done = self.runner._follow(self.plan, self.beside)
            except Exception as failure:
                self.done = failure
                if isinstance(failure, AssertionError):  # for the engine a failed step like any other
                    self.runner.wrong.append(failure)

    def land(self) -> StepOutput:
        assert not self.landed, "a step lands once"
        self.landed = True
        self.fly()
        assert self.done is not None
        if isinstance(self.done, Exception):
            raise self.done
        return self.done


class FakeRunner:
    """`eager(n)`: whether step n is computed when it is begun; else when it lands, as on a slow device.

    `window`: tokens that layers with window pages see, the number of these pages, and of those of the host.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        rows: int,
        host_pages: int = 0,
        window: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.page_size = page_size
        self.host = np.full((host_pages, page_size, 2), -1, np.int64)
        self.cells = np.full((pages, page_size, 2), -1, np.int64)  # token, position
        self.table = np.full((rows, pages + 1), -1, np.int32)
        self.window = window[0]
        self.window_cells = np.full((window[1], page_size, 2), -1, np.int64)
        self.window_table = np.full((rows, pages + 1), -1, np.int32)
        self.window_host = np.full((window[2], page_size, 2), -1, np.int64)
        self.wrong: list[AssertionError] = []  # plans that no correct engine makes
        self.plans: list[StepPlan] = []  # computed
        self.begun_plans: list[StepPlan] = []
        self.flights: list[FakeFlight] = []  # that have not landed
        self.most_in_flight = 0
        self.eager: Callable[[int], bool] = lambda n: False
        self.fail: Callable[[StepPlan], bool] = lambda plan: False
        self.fail_moves: Callable[[StepPlan], bool] = lambda plan: False
        # By slot: the tokens applied to the state, and those held back behind them; None: nobody knows.
        self.states: dict[int, tuple[list[int], list[int]] | None] = {-1: ([], [])}
        self.host_states: dict[int, tuple[list[int], list[int]] | None] = {}
        self._drawn: tuple[Drawn | None, ...] = ()
        self._lost: set[tuple[int, int]] = set()  # row and end of the chunks of the step before, if that failed

    def begin(self, plan: StepPlan) -> FakeFlight:
        self.flights = [each for each in self.flights if not each.landed]
        self.flights.append(FakeFlight(self, plan, beside=bool(self.flights)))
        self.most_in_flight = max(self.most_in_flight, len(self.flights))
        if self.eager(len(self.begun_plans)):
            for each in self.flights:  # in the order they were begun in
                each.fly()
        self.begun_plans.append(plan)
        return self.flights[-1]

    def _follow(self, plan: StepPlan, beside: bool) -> StepOutput:
        """Compute a step with the tokens that the step before drew."""
        before, self._drawn = self._drawn, ()
        lost = self._lost if beside else set()
        self._lost = {(chunk.row, chunk.start + len(chunk.tokens)) for chunk in plan.chunks}
        # A model would compute something from what a failed step left; here that is not even read.
        unknown = [chunk for chunk in plan.chunks if beside and chunk.state and self.states[chunk.state.source] is None]
        self.states |= dict.fromkeys(replace(plan, chunks=tuple(unknown)).states_written)
        lost |= {(chunk.row, chunk.start) for chunk in unknown}
        kept = [i for i, chunk in enumerate(plan.chunks) if (chunk.row, chunk.start) not in lost]
        chunks = plan.after(before).chunks
        output = self.compute(replace(plan, chunks=tuple(chunks[i] for i in kept)))
        if len(kept) < len(chunks):
            drawn: list[Drawn | None] = [Drawn((0,)) if chunk.draw else None for chunk in chunks]
            for i, each in zip(kept, output.drawn, strict=True):
                drawn[i] = each
            output = replace(output, drawn=tuple(drawn))
        self._drawn, self._lost = output.drawn, set()
        return output

    def compute(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        moved = not (plan.moves and self.fail_moves(plan))
        if moved:
            self.host[plan.saves.host] = self.cells[plan.saves.device]
            saves = plan.checkpoint_saves
            if self.window:
                self.window_host[saves.host] = self.window_cells[saves.device]
            for device, host in zip(saves.device.tolist(), saves.host.tolist(), strict=True):
                self.host_states[host] = self.states.get(device)
        for copy in plan.copies:
            cells = self.window_cells if copy.kind else self.cells
            assert copy.source != copy.target
            cells[copy.target, : copy.cells] = cells[copy.source, : copy.cells]
        for write in plan.writes:
            table = self.window_table if write.kind else self.table
            table[write.row, write.first : write.first + len(write.pages)] = write.pages
        if self.fail(plan):
            self.states |= dict.fromkeys(plan.states_written)
            raise RuntimeError("injected")
        # A load is done by the end of the step and not before, so what reads it in this step reads garbage.
        self.cells[plan.loads.device] = -1
        loads = plan.checkpoint_loads
        if self.window:
            self.window_cells[loads.device] = -1
        for chunk in plan.chunks:
            positions = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            written = np.stack((chunk.tokens, positions), axis=1)
            self.cells[self._places(chunk.row, positions)] = written
            if self.window:
                self.window_cells[self._places(chunk.row, positions, self.window_table)] = written
        if self.window:
            self._look_through_windows(plan)
        self.states |= dict.fromkeys(loads.device.tolist())
        self._advance(plan)
        drawn = tuple(self._draw(chunk) for chunk in plan.chunks)
        if moved:
            self.cells[plan.loads.device] = self.host[plan.loads.host]
            if self.window:
                self.window_cells[loads.device] = self.window_host[loads.host]
            for device, host in zip(loads.device.tolist(), loads.host.tolist(), strict=True):
                self.states[device] = self.host_states[host]
        return StepOutput(drawn, moved=moved, load_s=0.001 * len(plan.loads))

    def _advance(self, plan: StepPlan) -> None:
        """Read all states of a step, then write them."""
        written: dict[int, tuple[list[int], list[int]]] = {}
        for chunk in plan.chunks:
            if (use := chunk.state) is None:
                continue
            state = self.states[use.source]
            assert state is not None, f"slot {use.source} has a state that a failed step was to write"
            applied, held = state
            assert use.applied <= len(held)
            seen = [*applied, *held[: use.applied]]
            assert len(seen) == chunk.start, f"a chunk from {chunk.start} on goes on from a state at {len(seen)}"
            assert seen == self.read(chunk.row, chunk.start), "the state is of other tokens than the cells"
            tokens = chunk.tokens.tolist()
            last = len(tokens) - use.held
            for n, slot in [*use.marks, (last, use.target)]:
                assert slot not in written, f"slot {slot} is written twice"
                assert 0 < n <= last or (slot == use.target and n >= 0)
                written[slot] = ([*seen, *tokens[:n]], tokens[last:] if slot == use.target else [])
        for chunk in plan.chunks:
            if chunk.state is not None and (source := chunk.state.source) in written:
                assert source == chunk.state.target, f"slot {source} is read and written by another"
        self.states |= written

    def _draw(self, chunk: Chunk) -> Drawn | None:
        if chunk.draw is None:
            return None
        end = chunk.start + len(chunk.tokens)
        read = self.read(chunk.row, end)
        drawn: list[int] = []
        for known in range(end - chunk.draw.drafts, end + 1):
            drawn.append(next_token(read[:known]))
            if known == end or drawn[-1] != read[known]:
                break
        return Drawn(tuple(drawn))

    def read(self, row: int, end: int) -> list[int]:
        """The tokens whose cells the row's page table shows, checked to be at their positions."""
        positions = np.arange(end)
        found = self.cells[self._places(row, positions)]
        at = found[:, 1]
        assert np.array_equal(at, positions), f"row {row} holds at its positions the cells of {at.tolist()}"
        read: list[int] = found[:, 0].tolist()
        return read

    def _look_through_windows(self, plan: StepPlan) -> None:
        """Every position that a chunk sees in layers with a window has the token that its other layers see there."""
        for chunk in plan.chunks:
            positions = np.arange(max(0, chunk.start - self.window + 1), chunk.start + len(chunk.tokens))
            seen = self.window_cells[self._places(chunk.row, positions, self.window_table)]
            at = seen[:, 1]
            assert np.array_equal(at, positions), f"row {chunk.row} sees in its window the cells of {at.tolist()}"
            cells = self.cells[self._places(chunk.row, positions)]
            assert np.array_equal(seen[:, 0], cells[:, 0]), "windows have other tokens than the cells"

    def _places(self, row: int, positions: np.ndarray, table: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """The page and the cell of each position."""
        pages = (self.table if table is None else table)[row, positions // self.page_size]
        assert (pages >= 0).all(), f"row {row} has no page for one of its positions up to {positions[-1]}"
        return pages, positions % self.page_size
