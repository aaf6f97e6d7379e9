"""Our hooks in a real Ray Serve: the order in which requests get a full replica, and scaling by our policy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hooks_in_serve import NEW


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case: arrivals of programs in the order "sent" and "served", and those "refused"; the numbers of replicas."""
    script = Path(__file__).parents[1] / "support" / "hooks_in_serve.py"
    command = [sys.executable, script, tmp_path_factory.mktemp("order")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_requests_that_wait_for_a_replica_get_it_in_program_order(happened: dict[str, Any]) -> None:
    sent, served, refused = happened["programs"].values()
    assert sent != sorted(sent)
    assert len(refused) == 1, "one more than may wait"
    assert served == [99.0, *sorted(set(sent) - set(refused))]


def test_tenants_that_share_do_not_wait_for_each_others_older_programs(happened: dict[str, Any]) -> None:
    _, served, refused = happened["fair"].values()
    new = [arrival for arrival in served[1:] if arrival >= NEW]
    old = [arrival for arrival in served[1:] if arrival < NEW]
    assert new == sorted(new) == [NEW, NEW + 1, NEW + 2]
    assert old == sorted(old)
    assert len(refused) == 1, "one more than may wait"
    assert refused[0] < NEW, "and who had most of the line gave way"
    assert max(served.index(arrival) for arrival in new) <= 12, (
        f"eighteen older programs were not before them: {served}"
    )


def test_serve_scales_by_the_policy(happened: dict[str, Any]) -> None:
    assert happened["scaled"] == [3, 2], "the policy asks for two, and one may be"
