"""How calls are timed, over a device that only notes what it is told."""

from types import SimpleNamespace

import pytest

from holdfast.kernels import ceilings
from holdfast.kernels.ceilings import Clock


class Device:
    """What `ceilings` takes of torch. `told`: everything in order, each event with the number of its record."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.float32 = "float32"
        self.cuda = SimpleNamespace(_sleep=self.sleep, synchronize=lambda: self.told.append("wait"), Event=self.event)

    def sleep(self, cycles: int) -> None:
        self.held = cycles / ceilings._CYCLES
        self.told.append("hold")

    def event(self, enable_timing: bool) -> SimpleNamespace:
        at = len(self.told)
        return SimpleNamespace(record=lambda: self.told.append("event"), elapsed_time=lambda later: 1e3 * (at + 1) / at)

    def zeros(self, size: int, dtype: str, device: str) -> str:
        self.told.append(f"{size} {dtype}")
        return "flush"

    def amax(self, data: str) -> None:
        self.told.append(f"read {data}")


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(ceilings, "torch", made)
    monkeypatch.setattr(ceilings, "_WARM_S", 0.0)
    return made


def test_a_call_is_timed_behind_a_read_that_leaves_nothing_to_write_back(device):
    clock = Clock()
    assert device.told == [f"{64 << 20} float32"]
    clock.seconds(lambda: device.told.append("call"), repeats=3)
    at = device.told.index("hold")
    assert device.told[at + 1 :] == ["read flush", "event", "call", "event"] * 3 + ["wait"]
    # The first call compiles and is not one of those whose launching is timed.
    assert device.told[1:at] == ["call", "wait", "read flush", "call", "wait"]
    assert device.held >= 0.03
