"""What fits on a GPU beside a model: against the simulator's machine, the engine's own split, and the page."""

from pathlib import Path

import pytest

from holdfast.cluster import cli, sizing
from holdfast.cluster.known_models import MODELS
from holdfast.cluster.sizing import GB, GIB
from holdfast.loadgen.simulator import machines
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.errors import ConfigError

BY_TOKEN = EngineConfig(page_size=1)


def test_cells_are_what_the_simulator_counts() -> None:
    shape, profile = MODELS["Llama-3.1-8B"].shape, machines.profile("8b-h200")
    held = sizing.fit(shape, BY_TOKEN, 0.9 * 141 * GB, shape.weight_bytes()).held
    assert held.cells == pytest.approx(profile.cells, rel=0.001)


def test_a_hybrid_shares_its_memory_between_cells_and_states() -> None:
    shape = MODELS["Qwen3.5-27B"].shape
    found = sizing.fit(shape, BY_TOKEN, 18 * GB)
    used = found.held.cells * shape.cell_bytes() + found.held.slots * shape.state_bytes()
    assert 18 * GB - shape.state_bytes() < used <= 18 * GB
    assert found.programs == found.held.cells // sizing.TOKENS
    short = sizing.fit(shape, BY_TOKEN, 18 * GB, tokens=1000)
    assert short.programs == short.held.slots // 4  # more have no states
    assert f"{found.held.slots} states of 163 MiB" in sizing.summary(shape, found, sizing.TOKENS)


def test_a_window_costs_its_own_tokens_alone() -> None:
    shape = MODELS["gpt-oss-20b"].shape
    fits = {tokens: sizing.fit(shape, BY_TOKEN, 8 * GIB, tokens=tokens).programs for tokens in (100, 128, 30_000)}
    cells = 8 * GIB // (24 * 1024) - (4096 + 128)  # a chunk of a prompt, and a window
    in_windows = max(4096 + 128, cells // 64)
    assert fits[100] == in_windows // 100
    assert fits[128] == in_windows // 128
    assert fits[30_000] == pytest.approx(cells / 30_000, abs=1)
    found = sizing.summary(shape, sizing.fit(shape, BY_TOKEN, GIB), 30_000)
    assert "24 KiB a token, 24 KiB for each of its last 128" in found
    assert "4,224 window cells" in found


def test_a_gpu_keeps_room_for_the_largest_step_and_its_graphs() -> None:
    shape = MODELS["Llama-3.1-8B"].shape
    whole = sizing.on_gpu(shape, BY_TOKEN, 80 * GB, shape.weight_bytes())
    assert whole.left == pytest.approx(0.9 * 80 * GB - shape.weight_bytes() - whole.step)
    fewer = sizing.on_gpu(shape, EngineConfig(page_size=1, step_tokens=1024), 80 * GB, shape.weight_bytes())
    assert fewer.step < whole.step < 2 * GIB
    assert sizing.on_gpu(shape, BY_TOKEN, 80 * GB, shape.weight_bytes(), others=10 * GB).left == whole.left - 10 * GB
    assert sizing.on_gpu(MODELS["Llama-3.1-70B"].shape, BY_TOKEN, 80 * GB, 141 * GB).programs == 0


def test_what_options_fix_is_not_split() -> None:
    shape = MODELS["Qwen3.5-9B"].shape
    fixed = EngineConfig(cells=32_000, state_slots=8, speculation=DraftConfig(enabled=False))
    assert sizing.fit(shape, fixed, GIB).held[:2] == (32_000, 8)
    assert sizing.fit(shape, fixed, GIB, tokens=16_000).programs == 2


@pytest.mark.parametrize(
    ("name", "size"),
    [("h100", 80 * GB), ("H100-80GB", 80 * GB), ("a100-80gb", 80 * GB), ("24", 24 * GIB), ("22.5GiB", 22.5 * GIB)],
)
def test_a_gpu_has_a_name_or_a_size(name: str, size: float) -> None:
    assert sizing.gpu_bytes(name) == size


@pytest.mark.parametrize("name", ["h1000", "h100-many", ""])
def test_a_gpu_that_nobody_knows(name: str) -> None:
    with pytest.raises(ConfigError, match="give one of l4, a100") as refused:
        sizing.gpu_bytes(name)
    assert refused.value.field == "gpu"


def test_the_page_has_the_tables_of_today_and_the_example_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "sizing.md").read_text()
    assert cli.main(["sizing", "--markdown"]) == 0
    assert page.split("<!-- sizing -->\n")[1].split("<!-- /sizing -->")[0] == capsys.readouterr().out
    shape = MODELS["Llama-3.1-8B"].shape
    held = sizing.on_gpu(shape, EngineConfig(), 80 * GB, shape.weight_bytes()).held.cells
    ceiling = EngineConfig().admission_ceiling
    programs = (held * ceiling - 4000) / 26000
    assert f"({held / 1000:.0f}k x {ceiling:g} - 4k) / 26k, about {programs:.0f} programs" in page
    assert cli.main(["sizing"]) == 0
    assert "Qwen3.6-35B-A3B" in capsys.readouterr().out
