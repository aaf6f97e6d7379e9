"""Program order through Ray Serve as it is: what the private hook is overridden for, and all that it rests on."""

import json
import subprocess
import sys
from pathlib import Path

from order_in_serve import NEW


def run(*arguments: object) -> tuple[list[float], list[float], list[float]]:
    """Arrivals of programs as they were sent, and of those that were served and refused."""
    script = Path(__file__).parents[1] / "support" / "order_in_serve.py"
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told["sent"], told["served"], told["refused"]


def test_requests_that_wait_for_a_replica_get_it_in_program_order(tmp_path: Path) -> None:
    sent, served, refused = run(tmp_path)
    assert sent != sorted(sent)
    assert len(refused) == 1, "one more than may wait"
    assert served == [99.0, *sorted(set(sent) - set(refused))]


def test_tenants_that_share_do_not_wait_for_each_others_older_programs(tmp_path: Path) -> None:
    _, served, refused = run(tmp_path, "fair")
    new = [arrival for arrival in served[1:] if arrival >= NEW]
    old = [arrival for arrival in served[1:] if arrival < NEW]
    assert new == sorted(new) == [NEW, NEW + 1, NEW + 2]
    assert old == sorted(old)
    assert len(refused) == 1, "one more than may wait"
    assert refused[0] < NEW, "and who had most of the line gave way"
    assert max(served.index(arrival) for arrival in new) <= 12, (
        f"eighteen older programs were not before them: {served}"
    )
