"""What holds for every test: no time limits, for machines are shared; Triton's interpreter where there is no GPU.

Hypothesis draws other examples in every run, but under continuous integration (`CI` is set) the same ones, so that a
commit fails there or does not; what a developer's run finds becomes a case of its own. Triton decides at its first
import whether it interprets.

Files come in an order that keeps two cores busy and leaves no long one for the end.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

import httpx
import pytest
from hypothesis import settings
from waiting import PATIENCE_S
from xdist.scheduler import LoadFileScheduling

settings.register_profile("shared machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shared machine")

# httpx gives up after 5 s where a call names no time, which a machine whose cores are taken may need.
for step in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, step, PATIENCE_S)

# Tests start hundreds of Pythons, which import the same modules: their bytecode is kept, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Each client of httpx reads all certificates of the machine, which takes longer than a request to a test's own server.
httpx._transports.default.create_ssl_context = cache(httpx._config.create_ssl_context)

# Read as torch is imported. Several processes share few cores: a thread that waits busily for one of its team that has
# no core takes that core's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Who is started in the background by a shell ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# These files share the cluster of `tests/cluster/conftest.py`, in alphabetical order.
ONE_CLUSTER = {f"tests/cluster/test_{name}.py" for name in ("serving", "several_routers", "stopping")}


class SharedCluster(LoadFileScheduling):  # type: ignore[misc]
    """Runs each file whole in one process, and files that share a cluster or rendered charts in the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith("tests/helm/"):
            return "tests/helm"
        return "tests/cluster" if file in ONE_CLUSTER else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharedCluster | None:
    return SharedCluster(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start clusters mostly wait: they come among those that compute, over the first two thirds of a run.

    Files of no folder come first, because building a package takes longest. The shared cluster is the next longest.
    """
    here = Path(__file__).parent
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    first = [path for path in files if path.parent == here]
    waiting = [path for path in files if path.parent == here / "cluster"]
    waiting.sort(key=lambda path: f"tests/cluster/{path.name}" not in ONE_CLUSTER)
    computing = [path for path in files if path not in {*first, *waiting}]
    placed = [(2 / 3 * n / len(waiting), path) for n, path in enumerate(waiting)]
    placed += [(n / len(computing), path) for n, path in enumerate(computing)]
    order = [*first, *(path for _, path in sorted(placed, key=lambda each: each[0]))]
    items[:] = [item for path in order for item in files[path]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected is no garbage, and lives to the end of a run: looking for some would be a third of
    the time that this takes, and no later collection has to look through it again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
