"""Program order through Ray Serve as it is: what the private hook is overridden for, and all that it rests on."""

import json
import subprocess
import sys
from pathlib import Path


def test_requests_that_wait_for_a_replica_get_it_in_program_order(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "order_in_serve.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    sent, served, refused = told["sent"], told["served"], told["refused"]
    assert sent != sorted(sent)
    assert len(refused) == 1, "one more than may wait"
    assert served == [99.0, *sorted(set(sent) - set(refused))]
