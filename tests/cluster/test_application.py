"""The router as Serve starts it: whose keys it takes, at a start long after the deployment too."""

import asyncio
import base64
import gc
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import httpx
import orjson
import pytest
from identity_provider import IdentityProvider
from ray.serve._private.build_app import build_app
from redis_server import RedisServer

from holdfast.cluster import application, config_file, doctor
from holdfast.cluster.application import REPLICAS, ROUTER, Ingress
from holdfast.cluster.config import RedisConfig, ServerConfig, Settings, check_tenants, choose_order
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import History, ModelCard
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints.prefills import StoredPrefills
from holdfast.router.entry.idempotency import KeptAnswers, NamedRequest
from holdfast.router.entry.tenant_store import TenantStore
from holdfast.router.entry.usage import BOOKING_S, COUNTING_S
from holdfast.router.protocol.errors import RefusedError
from holdfast.router.records.programs import ProgramTable
from holdfast.router.records.session_histories import Home, SessionHistories
from holdfast.router.records.store import Encryption, PutResult, Records, RedisAddress
from holdfast.router.records.stored_responses import StoredResponse, StoredResponses, StoredTurn
from holdfast.router.records.tool_latency import ToolLatencies
from holdfast.router.tenants import Caller, Tenant, TenantDirectory, hash_key

REDIS = RedisAddress("redis://127.0.0.1:1/0")
DEPLOYED = Settings(tenants=(Tenant("a", key_hashes=(hash_key("leaked"),)),))


class Started(Ingress):
    """A router outside of Serve, which would await its end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch) -> list[TenantDirectory]:
    """Stands in for Serve. Holds the tenants that each router began to serve with."""
    found: list[TenantDirectory] = []

    async def ready(*_: Any) -> None: ...

    async def listening() -> str:
        return "0.0.0.0"

    create_app = application.create_app

    def created(backend: Any, tenants: TenantDirectory, *others: Any) -> Any:
        found.append(tenants)
        with pytest.raises(RefusedError):
            known(tenants, "nobody's")
        return create_app(backend, tenants, *others)

    monkeypatch.setattr(application.logs, "configure", lambda *_: None)

    async def models() -> tuple[ModelCard, ...]:
        return (ModelCard("m", 100, 10, fingerprint="f"),)

    monkeypatch.setattr(application, "ServeBackend", lambda *_: SimpleNamespace(start=ready, models=models))
    monkeypatch.setattr(application, "proxy_host", listening)
    monkeypatch.setattr(application, "create_app", created)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), deployment=ROUTER, app_name="a")
    monkeypatch.setattr(application.serve, "get_replica_context", lambda: context)
    return found


def known(directory: TenantDirectory, key: str) -> str:
    return directory.authenticate(Caller(f"Bearer {key}", "203.0.113.9", None, None)).tenant.name


def started(check: Callable[[], None], tenants_file: Path | None, settings: Settings = DEPLOYED) -> None:
    """Start a router with what was bound for it, and look before anything beside its start has run."""

    async def scenario() -> None:
        router = Started.__new__(Started)
        await router.__init__(None, settings, REDIS, tenants_file)  # type: ignore[misc]
        check()
        await Ingress.__del__(router)

    asyncio.run(scenario())


def file_of(folder: Path, *keys: str) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(f"tenants:\n- {{name: a, key_hashes: {[hash_key(key) for key in keys]}}}\n")
    return path


def test_a_revoked_key_does_not_come_back_with_a_router_that_starts_later(
    tmp_path: Path, directories: list[TenantDirectory]
) -> None:
    path = file_of(tmp_path, "new")

    def check() -> None:
        assert known(directories[0], "new") == "a"
        with pytest.raises(RefusedError):
            known(directories[0], "leaked")

    started(check, path)


def test_a_router_does_not_start_with_a_fault_in_the_tenants_file(
    tmp_path: Path, directories: list[TenantDirectory]
) -> None:
    path = tmp_path / "tenants.yaml"
    for wrong in ("tenants: []", "tenants:\n- {name: a, key_hashes: ['sha256:typo']}"):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            started(lambda: None, path)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        started(lambda: None, path)
    assert directories == []


def test_without_a_file_the_tenants_are_those_of_the_configuration(directories: list[TenantDirectory]) -> None:
    started(lambda: None, None)
    assert known(directories[0], "leaked") == "a"


def test_tenants_in_a_file_are_not_kept_by_serve(tmp_path: Path) -> None:
    for path in (None, file_of(tmp_path, "leaked")):
        ordered = choose_order(DEPLOYED, live=path is not None)
        kept = ordered if path is None else replace(ordered, tenants=())
        assert ordered.engine.order == ("program" if path is None else "fair"), "a second tenant may come to a file"
        built = build_app(application.build(DEPLOYED, REDIS, gpus=0, tenants_file=path), name="a")
        (router,) = [each for each in built.deployments if each.name == ROUTER]
        assert router.init_args[1:] == (kept, replace(REDIS, namespace=application.namespace(kept)), path)


OTHER = Tenant("b", key_hashes=(hash_key("other"),))


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        (DEPLOYED, "program"),
        (replace(DEPLOYED, tenants=(*DEPLOYED.tenants, OTHER)), "fair"),
        (replace(DEPLOYED, router=RouterConfig(admin_key_hashes=(hash_key("admin"),))), "fair"),
        (replace(DEPLOYED, engine=EngineConfig(order="fair")), "fair"),
        (replace(DEPLOYED, tenants=(*DEPLOYED.tenants, OTHER), engine=EngineConfig(order="request")), "request"),
    ],
)
def test_where_there_may_be_several_tenants_they_share_engines_and_lines(settings: Settings, order: str) -> None:
    """Unless the configuration says otherwise."""
    built = build_app(application.build(settings, REDIS, gpus=0), name="a")
    (engine,) = [each for each in built.deployments if each.name == REPLICAS]
    assert engine.init_args[0].order == order
    assert engine._deployment_config.request_router_config.request_router_kwargs["fair"] == (order == "fair")


def test_a_token_of_the_issuer_in_the_file_is_let_in_over_http(directories: list[TenantDirectory]) -> None:
    """Its keys are looked up where such issuers have them."""
    provider = IdentityProvider()
    text = f"""
router: {{oidc: {{issuer: '{provider.issuer}', audience: agents, tenant_claim: org}}}}
tenants: [{{name: acme, limits: {{requests_per_minute: 7}}}}]
server: {{host: 0.0.0.0}}
"""
    settings = config_file.parse(text)
    check_tenants(settings)

    async def scenario() -> None:
        router = Started.__new__(Started)
        await router.__init__(None, settings, REDIS, None)  # type: ignore[misc]
        transport = httpx.ASGITransport(router._app, client=("203.0.113.9", 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://holdfast.example") as http:

            async def models(**claims: Any) -> httpx.Response:
                head = {"authorization": f"Bearer {provider.token(**{'aud': 'agents'} | claims)}"}
                return await http.get("/v1/models", headers=head)

            answer = await models(org="acme")
            assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "7")
            for status, claims in ((403, {"org": "nobody"}), (401, {"org": "acme", "aud": "others"})):
                assert (await models(**claims)).status_code == status
        await Ingress.__del__(router)

    try:
        asyncio.run(scenario())
    finally:
        provider.close()
    assert provider.asked == ["/.well-known/jwks.json"]


def test_keys_in_redis_carry_deployment_model_and_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def named(**changes: Any) -> str:
        return application.namespace(replace(Settings(), **changes))

    own = named()
    assert own.startswith("holdfast/pocket/")
    models = [named(engine=EngineConfig(model=each)) for each in ("a/m", "b/m", "/a/m", "/b/m")]
    assert all(each.startswith("holdfast/m-") for each in models)
    assert len(set(models)) == 4
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named(engine=EngineConfig(model="m")) == named(engine=EngineConfig(model=str(tmp_path / "m")))
    assert named(engine=EngineConfig(served_name="mine")).startswith("holdfast/mine/")
    assert named(redis=RedisConfig(namespace="blue")).startswith("blue/pocket/")


def with_records(folder: Path, use: Callable[[RedisServer, Callable[[str], Records]], Awaitable[None]]) -> None:
    async def run(server: RedisServer) -> None:
        opened: list[Records] = []

        def records(name: str) -> Records:
            opened.append(Records(RedisAddress(server.url, namespace=name), 60.0))
            return opened[-1]

        await use(server, records)
        for each in opened:
            await each.close()

    with RedisServer(folder) as server:
        asyncio.run(run(server))


def test_another_release_finds_the_records_of_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = RouterConfig()
    turn = StoredTurn("resp_1", [{"role": "user", "content": "hello"}], [], [], "acme/p")
    home, history = Home("life", "r1"), History("life", 0, b"", 0, idle_s=60.0)

    async def use(_: RedisServer, records: Callable[[str], Records]) -> None:
        store = records("holdfast/pocket/0.1.0")
        await ProgramTable(store, RouterConfig()).begin("acme/p")
        assert await StoredResponses(store, config).keep("acme", StoredResponse({"id": "resp_1"}, turn))
        put = await SessionHistories(store, config).put("acme", "s", home, history, (), None)
        assert put is PutResult.STORED
        monkeypatch.setattr(application, "version", lambda name: "99.0")
        store = records(application.namespace(Settings()))
        assert (await ProgramTable(store, RouterConfig()).begin("acme/p")).program.came == 2
        assert (await StoredResponses(store, config).find("acme", "resp_1")).turn == turn
        saved = await SessionHistories(store, config).read("acme", "s")
        assert saved is not None
        assert saved.record.home == home

    with_records(tmp_path, use)


def test_records_of_0_1_are_set_aside_and_its_tenants_and_item_key_are_read(tmp_path: Path) -> None:
    """As that release wrote them."""
    config = RouterConfig()

    async def use(server: RedisServer, records: Callable[[str], Records]) -> None:
        kept = asdict(Tenant("acme", (hash_key("a"),), weight=3.0))
        with server.client() as redis:
            at = "holdfast/pocket/0.1.0"
            redis.hset(
                f"{at}/programs/{{acme}}/p", mapping={"life": "a1", "arrival": "1.0", "seen": "2.0", "paused": ""}
            )
            redis.zadd(f"{at}/programs/{{acme}}", {"p": 2e6})
            redis.hset(f"{at}/heads/{{acme}}/place", "~p", '[2,"head","place",1.0,""]')
            redis.set(f"{at}/responses/acme/resp_1", b'\n{"id":"resp_1","input":[]}\n{"id":"resp_1"}')
            redis.set(f"{at}/prefills/acme/prefill_1", b"{}")
            redis.set(f"{at}/sessions/acme/s", b"life r1 kept\n" + bytes(12))
            redis.set(f"{at}/idempotency/acme/name", b"asks\nanswer")
            redis.hset(f"{at}/{{tools}}/of/acme/ls", mapping={"count": 1, "mean": 2.0, "squares": 0})
            redis.set(f"{at}/items/key", b"k" * 32)
            redis.hset("holdfast/accounts/tenants", "acme", orjson.dumps(kept))
            redis.set("holdfast/accounts/tenants/version", 7)
        store = records(application.namespace(Settings()))
        assert (await ProgramTable(store, RouterConfig()).begin("acme/p")).program.came == 1
        responses = StoredResponses(store, config)
        for missing in (
            responses.find("acme", "resp_1"),
            responses.conversation("acme", "resp_1", "previous_response_id"),
            StoredPrefills(store, config).find("acme", "prefill_1"),
        ):
            with pytest.raises(RefusedError):
                await missing
        assert await SessionHistories(store, config).look("acme", "s") is None
        assert await KeptAnswers(store, config).find(NamedRequest("idempotency/acme/name", "asks")) is None
        assert not (await ToolLatencies(store).known()).tools
        await responses.items.prepare()
        item = f"hf1.{base64.b64encode(Encryption(keys=[b'k' * 32]).encrypt('items/acme', b'thought')).decode()}"
        assert responses.items.decrypt("acme", item) == "thought"
        assert not store.degraded
        directory = TenantDirectory()
        tenants = TenantStore(records("holdfast/accounts"), directory)
        await tenants.start()
        assert [(each.name, each.weight) for each in directory.tenants if each.name == "acme"] == [("acme", 3.0)]
        found, text = await tenants.find("acme")
        assert found is not None
        assert await tenants.change("acme", text, replace(found, weight=4.0), b"entry")
        await tenants.close()

    with_records(tmp_path, use)


def test_as_many_routers_as_are_asked_for() -> None:
    settings = replace(Settings(), server=ServerConfig(routers=3))
    built = application.build(settings, REDIS, 0.0)
    assert built._bound_deployment.num_replicas == 3


def test_engines_and_routers_say_their_memory_and_routers_outlive_the_drain() -> None:
    settings = Settings(server=ServerConfig(drain_s=7.0), engine=EngineConfig(kv_memory=2.0))
    built = build_app(application.build(settings, REDIS, gpus=0), name="a")
    found = {each.name: each for each in built.deployments}
    engine, router = found[REPLICAS], found[ROUTER]
    assert 3 * 2**30 < engine.ray_actor_options["memory"] < 5 * 2**30
    assert router.ray_actor_options["memory"] == doctor.router_bytes(settings)
    for each in (engine, router):
        assert each._deployment_config.graceful_shutdown_timeout_s > 7.0 + COUNTING_S + BOOKING_S


def test_a_router_needs_none_of_the_models_files(directories: list[TenantDirectory]) -> None:
    """It runs where no engine does; what its cached answers are known by the engine has said."""
    started(lambda: None, None, replace(DEPLOYED, engine=EngineConfig(model="/models/nowhere")))
    assert len(directories) == 1


def test_cached_answers_are_of_these_files_and_these_settings(
    directories: list[TenantDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    class Noted(application.ResponseCache):
        def __init__(self, store: Any, config: Any, fingerprint: str) -> None:
            found.append(fingerprint)
            super().__init__(store, config, fingerprint)

    monkeypatch.setattr(application, "ResponseCache", Noted)
    for engine in (EngineConfig(), EngineConfig(dtype="float32"), EngineConfig(max_waiting=7)):
        started(lambda: None, None, replace(DEPLOYED, engine=engine))
    assert all(each.endswith("f") for each in found)  # the engine's own
    assert found[0] == found[2] != found[1]


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(application, "FULL_LOOKS", 3)
    monkeypatch.setattr(application, "_collections", itertools.count(1))
    thresholds = gc.get_threshold()
    application.freeze_garbage()
    application.freeze_garbage()
    assert gc.get_threshold() == (*thresholds[:2], application.YOUNG)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(application._freeze)
    assert application._freeze not in gc.callbacks
    gc.unfreeze()


def test_collections_leave_alone_what_stays_until_they_look_through_everything(frozen: None) -> None:
    stays, new = Cycle(), Cycle()
    of_old, of_new = ref(stays), ref(new)
    del new
    gc.collect()
    assert of_new() is None
    assert gc.get_freeze_count() > 0
    del stays
    gc.collect()
    assert of_old() is not None, "it was there at the collection before"
    gc.collect()  # the third: the next one has all before it
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert of_old() is None
    assert gc.get_freeze_count() > 0
