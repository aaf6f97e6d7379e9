"""The shape of the project: packages, and the direction of imports."""

import ast
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "replicas", "router", "cluster", "loadgen")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "replicas": {"replicas", "kernels"},
    "router": {"router", "replicas"},
    "cluster": {"cluster", "router", "replicas"},
    "loadgen": {"loadgen", "replicas", "kernels"},
}
COMMAND_LINE = ("cluster.cli",)  # what of `cluster` may import `loadgen`
PURE = {"router.placement", "router.dispatch"}  # of `router`, what the simulator may import: it knows no server
ENGINE = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "jinja2", "triton", "huggingface_hub"}
FEW_FILES = {"llguidance": {"replicas.constraints.guidance", "replicas.constraints.trial"}}  # imported nowhere else
MAX_METHODS = 20
# What each room of `replicas` may import besides itself; a part that has a line of its own follows that one. `BASE` and
# the leaves are known to everybody that names them; whoever builds the whole of it (`service`) may name all.
BASE = {"types", "errors"}
ENGINE_ROOMS = {"kv", "programs", "retention", "speculation", "scheduling"}
ROOMS: Mapping[str, set[str]] = {
    "types": {"errors"},
    "errors": set(),
    "logs": set(),
    "memory": set(),
    "stats": {"types", "kv.tags"},
    "metrics": {"stats"},
    "config": BASE,
    "plan": BASE | {"constraints.matcher", "kv.pages"},
    "requests": BASE | {"plan", "kv.tags", "constraints.matcher", "retention.latency"},
    "kv": BASE,
    "kv.tags": set(),
    "kv.pages": BASE,
    "kv.radix": BASE | {"kv.pages", "kv.tags"},
    "programs": BASE
    | {"requests", "plan", "kv", "stats", "constraints.matcher", "retention.latency", "retention.policy"},
    "retention": {"config"},
    "retention.latency": set(),
    "speculation": BASE | {"config", "plan", "stats", "programs"},
    "speculation.ngrams": BASE,
    "constraints": BASE | {"config", "requests", "text.calls", "text.decode"},
    "constraints.matcher": BASE,
    "text": BASE | {"config", "plan", "requests", "stats", "constraints"},
    "text.calls": BASE | {"requests"},
    "text.decode": BASE,
    "scheduling": BASE | ENGINE_ROOMS | {"config", "requests", "plan", "stats", "constraints.matcher"},
    "scheduling.shares": BASE,
    "model": BASE | {"config", "plan", "kv", "memory", "constraints.matcher"},
    "pocket": set(),
    "sessions": BASE | {"requests", "kv", "programs"},
    "engine": BASE | ENGINE_ROOMS | {"config", "requests", "plan", "stats", "sessions"},
    "bridge": BASE | {"engine", "requests"},
    "questions": BASE | {"requests", "sessions", "stats"},
}


@cache
def modules() -> Mapping[str, Path]:
    """Every module below the code folders, by its name without `holdfast.`; a package by its `__init__.py`."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(scope="module", autouse=True)
def _no_tree_is_left() -> Iterator[None]:
    """A million nodes that live on slow every garbage collection of the tests that come later."""
    yield
    tree.cache_clear()


@cache
def imported(path: Path) -> Sequence[str]:
    """Full names of what a file imports, lazily and for types alone included; `from a import b` gives `a.b`."""
    names: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def own_imports(name: str) -> set[str]:
    """Modules of ours that module `name` imports."""
    found = set()
    for target in imported(modules()[name]):
        if not target.startswith("holdfast."):
            continue
        inner = target.removeprefix("holdfast.")
        # The last part is a module, or a name inside of one.
        found.add(inner if inner in modules() else inner.rpartition(".")[0])
    return found - {name}


def edges() -> Iterator[tuple[str, str]]:
    """Every module of ours with each module of ours that it imports."""
    return ((name, target) for name in modules() for target in sorted(own_imports(name)))


def test_sub_packages_have_an_init_and_top_level_folders_do_not() -> None:
    folders = {path.parent for path in modules().values()} - {ROOT / folder for folder in FOLDERS}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    assert [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_type_checkers_find_the_folder(folder: str) -> None:
    assert os.readlink(ROOT / ".typing" / "holdfast" / folder) == f"../../{folder}"
    assert (ROOT / folder / "py.typed").exists()


def test_imports_go_one_way() -> None:
    def may(name: str, target: str) -> bool:
        folder, other = name.split(".")[0], target.split(".")[0]
        by_name = name.startswith("loadgen.simulator.") and target in PURE
        return other in MAY_IMPORT[folder] or by_name or (name in COMMAND_LINE and other == "loadgen")

    assert [edge for edge in edges() if not may(*edge)] == []


def test_the_product_imports_nothing_beside_its_packages() -> None:
    """`pocket`, `tools`, `helm` and `tests` are not installed."""
    outside = {"pocket", "tools", "helm", "tests"}
    assert [name for name in modules() if {each.split(".")[0] for each in imported(modules()[name])} & outside] == []


def names_in(path: Path) -> set[str]:
    """What a module defines or imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.py")), ids=lambda path: path.stem)
def test_tools_import_what_exists(path: Path) -> None:
    """No test runs them, and no type checker reads them."""
    missing = []
    for target in imported(path):
        module, _, name = target.removeprefix("holdfast.").rpartition(".")
        known = f"{module}.{name}" in modules() or (module in modules() and name in names_in(modules()[module]))
        if target.startswith("holdfast.") and not known:
            missing.append(target)
    assert missing == []


def test_there_are_no_cycles() -> None:
    try:
        TopologicalSorter({name: own_imports(name) for name in modules()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def room_of(part: str) -> str:
    """The line of `ROOMS` that a module of `replicas` follows."""
    while part and part not in ROOMS:
        part = part.rpartition(".")[0]
    return part


def may_see(part: str, target: str) -> bool:
    """Whether a module of `replicas` may import another one: of its own room, or of what its room names."""
    room = room_of(part)
    return any(f"{target}.".startswith(f"{each}.") for each in {room, *ROOMS[room]})


def test_rooms_of_the_engine_see_down_only() -> None:
    assert not may_see("retention.policy", "scheduling.pins"), "pure functions"
    assert not may_see("text.calls.tracker", "constraints.grammar"), "a part follows the line of its own"
    assert may_see("text.conversation", "constraints.grammar")
    everything = {"service", "reports"}
    parts = {name.removeprefix("replicas."): name for name in modules() if name.startswith("replicas.")}
    assert sorted(part for part in parts if not room_of(part) and part not in everything) == []
    wrong = [
        (part, target)
        for part, name in parts.items()
        for target in sorted(each.removeprefix("replicas.") for each in own_imports(name) if each in parts.values())
        if part not in everything and not may_see(part, target)
    ]
    assert wrong == []


ROUTER_ROOMS = ("protocol", "records", "dispatch", "entry", "streaming", "endpoints")  # each may import those before it
# What every room may import.
ROUTER_BASE = {"backend", "background", "config", "metric_list", "placement", "tenants", "tracing"}


def test_rooms_of_the_router_are_entered_by_their_doors() -> None:
    """A room's `__init__.py` names what others may import. Only Ray Serve names modules inside of `dispatch`."""
    by_name = {"router.dispatch.affinity", "router.dispatch.serve_private"}
    rooms = {f"router.{room}" for room in ROUTER_ROOMS if room != "protocol"}
    wrong = [
        (name, target)
        for name in modules()
        for target in own_imports(name) - by_name
        if (room := target.rpartition(".")[0]) in rooms and not f"{name}.".startswith(f"{room}.")
    ]
    assert wrong == []


def test_rooms_of_the_router_see_down_only() -> None:
    wrong = []
    for name in modules():
        _, _, part = name.partition("router.")
        if name.startswith("router.") and (own := part.split(".")[0]) in ROUTER_ROOMS:
            allowed = {own, *ROUTER_ROOMS[: ROUTER_ROOMS.index(own)], *ROUTER_BASE}
            targets = {target.split(".")[1] for target in own_imports(name) if target.startswith("router.")}
            wrong += [(name, target) for target in sorted(targets - allowed)]
    assert wrong == []


GLOSSARY: Mapping[str, str] = {
    "Program": "programs",
    "ProgramPin": "programs",
    "Sequence": "programs",
    "Session": "programs",
    "GenerateRequest": "requests",
    "Submit": "requests",
    "StepPlan": "plan",
    "Step": "scheduling.batch",
    "Retention": "scheduling.pins",
    "RetentionPolicy": "retention.policy",
    "RequestOrder": "scheduling.queue",
    "KVCache": "kv.cache",
    "RadixTree": "kv.radix",
    "PagePool": "kv.pages",
    "Drafter": "speculation.drafter",
    "Engine": "engine",
}
"""Nouns of docs/concepts.md and the one module of `replicas` that has a class of this name."""


def test_a_word_names_one_class_of_the_engine() -> None:
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        if name.split(".")[0] in ("kernels", "replicas"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(name.removeprefix("replicas."))
    assert {word: places for word, places in found.items() if len(places) > 1} == {}
    assert {word: found.get(word) for word in GLOSSARY} == {word: [place] for word, place in GLOSSARY.items()}


def test_the_engine_stands_alone() -> None:
    """`kernels` and `replicas`, but for the reports, run on a bare GPU machine."""
    import sys

    wrong = [
        (name, target)
        for name, path in modules().items()
        if name.split(".")[0] in ("kernels", "replicas") and name != "replicas.reports"
        for target in imported(path)
        if (top := target.split(".")[0]) != "holdfast"
        and top not in ENGINE
        and top not in sys.stdlib_module_names
        and name not in FEW_FILES.get(top, ())
    ]
    assert wrong == []


def test_the_environment_is_read_in_one_file() -> None:
    readers = {
        name
        for name, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb", "putenv")
    }
    assert readers <= {"cluster.environment"}


def test_classes_are_small() -> None:
    large = [
        (name, node.name)
        for name, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and acts(inner) for inner in node.body)
        > MAX_METHODS
    ]
    assert large == []


def acts(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Neither a property nor one of Python's own names, which say what a class is and not what it does."""
    dunder = method.name.startswith("__") and method.name.endswith("__")
    return not dunder and not any(ast.unparse(decorator) == "property" for decorator in method.decorator_list)


def test_every_module_says_what_is_in_it() -> None:
    silent = [
        name for name, path in modules().items() if not ast.get_docstring(tree(path)) and path.read_text().strip()
    ]
    assert silent == []


def test_versions_of_dependencies_are_pinned_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()
    }
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert name.lower().replace("_", "-") in pinned, name
        assert name in explained, name


def test_tests_mirror_the_code() -> None:
    known = {path.parent.relative_to(ROOT) for path in modules().values()} | {Path(folder) for folder in FOLDERS}
    known |= {Path("helm"), Path("pocket")}  # the chart, and how Pocket is made: no packages of the product
    stray = {
        folder
        for path in (ROOT / "tests").rglob("test_*.py")
        if (folder := path.parent.relative_to(ROOT / "tests")) not in known | {Path()}
    }
    assert stray == set()
    assert not list((ROOT / "tests").rglob("__init__.py"))


BOUND = re.compile(
    r"""--port["'], ["'][1-9]|(\.bind|create_server|Server)\(\(["'][\w.]*["'], [1-9]|uvicorn\.Config\(.*port=[1-9]"""
)
# Words that are read and start nothing.
MADE_UP = {"cluster/test_cli.py", "loadgen/test_peers.py", "test_layout.py"}


def test_no_test_listens_on_a_fixed_port() -> None:
    for text in ('s.bind(("127.0.0.1", 8000))', '["serve", "--port", "8000"]', "uvicorn.Config(app, port=8000)"):
        assert BOUND.search(text)
    for text in ('s.bind(("127.0.0.1", 0))', '["serve", "--port", str(port)]', "ServerConfig(routers=3)"):
        assert not BOUND.search(text)
    sources = {str(path.relative_to(ROOT / "tests")): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert {name for name, text in sources.items() if BOUND.search(text)} == MADE_UP


# ---- how tests wait ----

WAITING = ROOT / "tests" / "support" / "waiting.py"
PACED = {  # programs that put load on a server over time, servers that answer in pieces, and a terminal that is read
    *("agents", "hooks_in_serve", "serve_rendered", "stub_server", "terminal")
}
WAITS = {"wait": 0, "join": 0, "timeout": 0, "wait_for": 1, "select": 3}  # their argument that is a time, the last one
NO_WAITS = {"self.join", "chat_body"}
MINUTE = 60.0


def sleeps(node: ast.AST) -> bool:
    """Whether this is a call of `time.sleep`, or of `asyncio.sleep` with anything but 0."""
    if not isinstance(node, ast.Call) or called(node) != "sleep":
        return False
    module = ast.unparse(node.func).rpartition(".")[0]
    return module == "time" or (module == "asyncio" and ast.unparse(node.args[0]) != "0")


def impatient(node: ast.AST) -> bool:
    """Whether this waits for less than a minute: `wait(5)`, `timeout=5`, `monotonic() + 5`. 0 does not wait."""
    bounds: list[ast.expr] = []
    if isinstance(node, ast.Call):
        bounds = [each.value for each in node.keywords if each.arg == "timeout"]
        place = WAITS.get(called(node), -2)
        bounds += node.args[place:] if len(node.args) == place + 1 else []
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        bounds = [node.right]
    numbers = [each.value for each in bounds if isinstance(each, ast.Constant) and type(each.value) in (int, float)]
    if not any(0 < number < MINUTE for number in numbers):
        return False
    by = ast.unparse(node.func if isinstance(node, ast.Call) else node.left)
    return by not in NO_WAITS if isinstance(node, ast.Call) else by.endswith("monotonic()")


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def test_tests_wait_for_conditions_and_for_a_minute_at_least() -> None:
    """`tests/support/waiting.py` has what they wait with. Settings that a test is about are no waits of its own."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != WAITING and path.stem not in PACED
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if sleeps(node) or impatient(node)
    ]
    assert wrong == []


SLEEPS = ("time.sleep(0.1)", "await asyncio.sleep(1)")
SHORT = (*SLEEPS, "event.wait(5)", "httpx.get(url, timeout=2.0)", "time.monotonic() + 20.0")
LONG = ("await asyncio.sleep(0)", "event.wait(60.0)", "event.wait(PATIENCE_S)", "asyncio.timeout(0)")


@pytest.mark.parametrize("code", [*SHORT, *LONG])
def test_a_short_wait_is_found(code: str) -> None:
    assert any(sleeps(node) or impatient(node) for node in ast.walk(ast.parse(code))) is (code in SHORT)
