"""The benchmarks of an engine and `inflate` need nothing but torch, transformers, numpy and what they bring."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import builtins, importlib, sys

absent = {"ray", "redis", "fastapi", "starlette", "uvicorn", "pydantic", "aiohttp", "orjson", "prometheus_client"}
absent |= {"opentelemetry", "matplotlib", "llguidance", "gguf"}
not_ours = {"httpx", "rich"}  # come with transformers, and are nothing to build on

class Absent:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

plain = builtins.__import__

def watched(name, globals=None, *rest, **named):
    if name.split(".")[0] in not_ours and ((globals or {}).get("__name__") or "").startswith("holdfast."):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return plain(name, globals, *rest, **named)

sys.meta_path.insert(0, Absent())
builtins.__import__ = watched
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(f"{module}: {error}")
"""


def test_benchmarks_and_inflate_import_nothing_that_a_bare_clone_lacks() -> None:
    files = [path for folder in ("bench", "inflate") for path in sorted((ROOT / "loadgen" / folder).rglob("*.py"))]
    names = [".".join(("holdfast", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]
    assert {"holdfast.loadgen.bench.gpu.__main__", "holdfast.loadgen.inflate.model"} <= set(names)
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
