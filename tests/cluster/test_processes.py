"""Nothing stays behind: children, their children, orphans, and those that ignore a request to stop."""

import subprocess
import sys

STUBBORN = (
    "import signal,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)

# Run in a process of its own, because it stops everything below itself.
SCRIPT = f"""
import subprocess, sys
from holdfast.cluster import processes
processes.adopt_orphans()
plain = subprocess.Popen(["sleep", "60"])
stubborn = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
stubborn.stdout.readline()
parent = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; exec sleep 61"], stdout=subprocess.PIPE)
grandchild = int(parent.stdout.readline())
brief = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!"], stdout=subprocess.PIPE)
orphan = int(brief.stdout.readline())
brief.wait()
found = processes.descendants()
assert {{plain.pid, stubborn.pid, parent.pid, grandchild, orphan}} <= found, found
assert processes.stop_all(patience_s=0.3) >= 5
assert processes.descendants() == set()
print("nothing left")
"""


def test_nothing_is_left() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "nothing left\n", done.stderr
