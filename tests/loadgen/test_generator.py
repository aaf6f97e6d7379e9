"""The generator against a stub in a process of its own. What is asserted are ratios: the machine may be busy."""

from statistics import median

import pytest

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import generator
from holdfast.loadgen.generator import measure
from holdfast.loadgen.options import Generated
from holdfast.replicas.errors import ConfigError

SLOW = Generated(rate=50.0, seconds=1.2, first_s=1.0, token_s=0.02)


def test_a_schedule_is_kept_and_what_is_measured_is_what_the_stub_took() -> None:
    kept = measure(SLOW)
    assert sum(row.ok for row in kept.rows) == len(kept.rows) == SLOW.requests
    assert all(row.started >= row.due for row in kept.rows)
    # One after another they would take the answers' time, fifty times the schedule's, and be as late.
    assert kept.pace < 3
    assert median(kept.late) < SLOW.first_s
    assert kept.at_once > SLOW.requests / 2
    assert min(kept.beyond) >= 0
    took = [row.ended - row.started for row in kept.rows]
    # A busy machine delays some; what the generator itself adds is in all of them.
    assert min(kept.beyond) < min(took) / 100
    assert min(row.first_token - row.started - row.prefill for row in kept.rows) < min(took) / 100
    assert {(row.output_tokens, len(row.answer["text"].split())) for row in kept.rows} == {(4, 4)}


def test_the_command_prints_quantiles_and_its_own_share(capsys: pytest.CaptureFixture) -> None:
    assert holdfast(["bench", "generator", "--rate", "40", "--seconds", "0.5", "--first", "0", "--token", "0"]) == 0
    printed = capsys.readouterr().out
    for told in ("20 requests", "0 failed", "sent later than due", "of one core", "times as long as the schedule"):
        assert told in printed


def test_the_same_seed_draws_the_same_schedule_and_nothing_can_be_sent_at_no_rate() -> None:
    assert generator.make_round(SLOW) == generator.make_round(SLOW)
    nan = float("nan")
    for wrong in ({"rate": 0.0}, {"rate": nan}, {"seconds": 0.0}, {"first_s": -1.0}, {"token_s": nan}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name.removesuffix("_s")):
            Generated(**wrong)
