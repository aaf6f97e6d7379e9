"""How far a checkpoint is read: what is counted, and how often it is told."""

import logging

from holdfast.replicas.model.progress import LOG_S, TELL_S, Meter, Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_line_says_amount_rate_and_time_left():
    assert str(Progress(12 * 10**9, 36 * 10**9, 10.0)) == "12.0 of 36.0 GB, 1.20 GB/s, 20 s left"
    assert str(Progress(36 * 10**9, 36 * 10**9, 10.0)) == "36.0 of 36.0 GB, 3.60 GB/s"
    assert str(Progress(0, 10**9, 0.0)) == "0.0 of 1.0 GB, 0.00 GB/s"


def test_it_is_told_now_and_then_and_at_the_end():
    clock, told = Clock(), []
    meter = Meter(100, told.append, clock)
    meter.add(10)
    assert told == []  # too soon
    clock.now += TELL_S
    meter.add(10)
    meter.add(10)
    assert told == [Progress(20, 100, TELL_S)]
    meter.add(70)
    assert told[1:] == [Progress(100, 100, TELL_S)]


def test_the_log_has_a_line_now_and_then(caplog):
    clock = Clock()
    meter = Meter(10**10, None, clock)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            clock.now += LOG_S / 2
            meter.add(10**9)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 2.0 of 10.0 GB, 0.40 GB/s, 20 s left",
        "weights: 4.0 of 10.0 GB, 0.40 GB/s, 15 s left",
    ]
