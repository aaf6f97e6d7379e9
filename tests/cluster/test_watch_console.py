"""What `holdfast serve` says of processes that die and come back."""

from holdfast.cluster.serve import changes


def test_what_dies_and_what_is_back_is_said_once() -> None:
    both = {"replicas": 2, "router": 1}
    assert list(changes(both, both)) == []
    assert list(changes({}, both)) == []  # the first look
    [line] = changes(both, {"replicas": 1, "router": 1})
    assert line.startswith("1 of 2 process(es) of 'replicas' died")
    [line] = changes({"replicas": 1, "router": 1}, both)
    assert line == "1 process(es) of 'replicas' serve again: 2 in all"
