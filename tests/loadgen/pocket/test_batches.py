"""Worker processes make the batches that one process makes, in the same order."""

from pathlib import Path

import pytest

from holdfast.loadgen.pocket.batches import Batch, Mix, Pool, feed
from holdfast.loadgen.pocket.tokenizer import train_tokenizer

MIX = Mix(echo_share=0.2, drill_share=0.5)
POOLS = [Pool(seed=3, number=number, tokens=256, mix=MIX) for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("feed")
    train_tokenizer(60, seed=5).save(str(made / "tokenizer.json"))
    return made


def as_lists(pools: list[list[Batch]]) -> list[list[list[object]]]:
    return [[[t.tolist() for t in (b.ids, b.positions, b.where, b.targets)] for b in pool] for pool in pools]


def test_workers_change_nothing(folder: Path) -> None:
    alone = as_lists(list(feed(POOLS, folder, 0)))
    assert as_lists(list(feed(POOLS, folder, 2))) == alone
    assert alone[0] != alone[1]
