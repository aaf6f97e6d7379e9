"""The costs that need no quiet machine to come out at all: each part prints what it says."""

from holdfast.loadgen.bench import micro


def test_texts_and_masks_are_measured() -> None:
    figures = [*micro.text(), *micro.masks()]
    assert len(figures) >= 4
    assert all(figure.value > 0 for figure in figures)
