"""The books: one record for each request, whose sums are the engine's counters, in a real Redis."""

import asyncio
import csv
import io
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count

import orjson
import pytest
from fake_backend import DONE, FakeBackend, World, bearer, keyed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import PATIENT, shared_server
from service_backend import SMALL, ServiceBackend
from waiting import until_async

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import Completed, TextDelta, Usage, Work
from holdfast.replicas.scheduling import scheduler
from holdfast.router.backend import ANYWHERE
from holdfast.router.config import RouterConfig
from holdfast.router.entry import tenant_store, usage
from holdfast.router.entry.admission import Drain
from holdfast.router.entry.audit import Audit
from holdfast.router.entry.quotas import Quotas
from holdfast.router.entry.tenant_store import TenantStore
from holdfast.router.entry.usage import CallEnd, UsageBooks, UsageRecord, as_csv, first_rows
from holdfast.router.protocol.admin import TenantRowsQuery
from holdfast.router.protocol.body import read_query
from holdfast.router.records.store import Records, RedisAddress
from holdfast.router.tenants import ApiKey, Scope, Tenant, TenantDirectory, TenantLimits, hash_key

pytestmark = pytest.mark.anyio

ADMIN = bearer("admin")
FRESH = {"cache-control": "no-cache"}
CONFIG = RouterConfig(admin_key_hashes=(hash_key("admin"),))
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


class Router:
    """A router with all that stands in Redis, reached without a network."""

    _space = 0

    def __init__(self, backend=None, tenants=(), config=CONFIG, space="", audit_records=10000, drain=None, server=None):
        if not space:
            Router._space += 1
        self.space = space or f"usage/{Router._space}"
        self.store = Records(RedisAddress((server or shared_server()).url, namespace=self.space), PATIENT)
        self.books = UsageBooks(config, Quotas(self.store))
        self.directory = TenantDirectory(tenants, exposed=True)
        self.tenants = TenantStore(self.store, self.directory)
        self.audit = Audit(self.store, audit_records)
        self.world = World(
            backend or FakeBackend(),
            self.directory,
            config,
            records=self.store,
            tenant_store=self.tenants,
            books=self.books,
            audit=self.audit,
            drain=drain,
        )
        self.http = self.world.client()

    async def __aenter__(self):
        await self.tenants.start()
        return self

    async def __aexit__(self, *_):
        await self.http.aclose()
        await self.tenants.close()
        await self.books.close()
        await self.store.close()

    async def chat(self, key="acme", headers=None, path="/v1/chat/completions", **body):
        body = {"model": "pocket", "messages": [{"role": "user", "content": "hello"}], **body}
        return await self.http.post(path, json=body, headers={**bearer(key), **(headers or {})})

    async def admin(self, method, path, body=None):
        return await self.http.request(method, f"/v1/admin{path}", json=body, headers=ADMIN)

    async def audit_log(self, query=""):
        return (await self.admin("GET", f"/audit{query}")).text

    async def records(self, tenant="acme"):
        return await self.books.records(tenant, "-", "+", 1000)


ACME = Tenant("acme", keys=(ApiKey("laptop", hash_key("acme")),))


@asynccontextmanager
async def engine(config=SMALL, tenants=(ACME,)):
    backend = ServiceBackend(config)
    try:
        async with Router(backend, tenants) as router:
            yield router, backend.service.engine
    finally:
        await asyncio.to_thread(backend.stop)


async def test_sums_are_the_engines_counters_to_the_token():
    """Whole and streamed, several answers, stops, calls, repeats from the cache, prompts ahead, and one who leaves."""
    drafts = DraftConfig(enabled=True)
    async with engine(replace(SMALL, speculation=drafts)) as (router, service):
        say = [{"role": "user", "content": "Count: one two three one two three one two three one two"}]
        for _ in range(2):  # the second from the response cache
            assert (await router.chat(messages=say, max_tokens=24, temperature=0)).status_code == 200
        await router.chat(messages=say, max_tokens=40, stream=True, headers=FRESH)
        await router.chat(messages=say, max_tokens=12, n=3, headers=FRESH)
        await router.chat(messages=say, max_tokens=64, stop=["e", "o", " "], headers=FRESH)
        call = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        await router.chat(messages=say, max_tokens=64, headers=FRESH, **call)
        await router.chat(path="/v1/completions", messages=None, prompt="one two", max_tokens=9, echo=True, logprobs=1)
        await prefill(router, say)
        leaving = asyncio.create_task(router.chat(messages=say, max_tokens=2000, ignore_eos=True, headers=FRESH))
        asked = router.world.backend.requests
        await until_async(lambda: asked[-1].sampling.max_tokens == 2000 and service.occupancy().running)
        leaving.cancel()
        await asyncio.wait({leaving})
        await until_async(lambda: router.books.booked.total() == 9)
        rows = await router.records()
        agree(rows, service.stats)
        assert service.stats.drafted > 0 < service.stats.ahead_computed
        outcomes = sorted(row["outcome"] for row in rows)
        assert outcomes == ["aborted", "cached", *["completed"] * 7]
        [day, _] = await router.books.sums("acme", [_today(rows), _today(rows)[:7]])
        for name in ("input", "cached", "output", "drawn", "drafted", "units"):
            assert day[name] == pytest.approx(sum(row[name] for row in rows))
        assert day["requests"] == 9
        aborted = next(row for row in rows if row["outcome"] == "aborted")
        assert aborted["output"] == aborted["drawn"] > 0 < aborted["units"]
        assert {(row["key"], row["model"]) for row in rows} == {("laptop", "pocket")}
        drew = [row for row in rows if row["outcome"] == "completed" and row["output"]]
        assert {row["replica"] for row in drew} == {"r1"}
        assert sorted(row["endpoint"] for row in rows) == [*["chat"] * 7, "completion", "prefill"]
        assert [row["stream"] for row in rows].count(True) == 1
        assert all(0 < row["seconds"] < 60 for row in rows)


def agree(rows, stats):
    counted = (stats.completion, stats.prompt_computed, stats.ahead_computed, stats.prompt_cached, stats.drafted)
    names = ("drawn", "computed", "ahead", "found", "drafted")
    assert tuple(sum(row[name] for row in rows) for name in names) == counted


async def prefill(router, said):
    calls = [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]
    body = {"model": "pocket", "messages": [*said, {"role": "assistant", "content": None, "tool_calls": calls}]}
    return await router.http.post("/v1/prefills", json=body, headers=bearer("acme"))


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(period=st.integers(2, 9), short=st.booleans())
async def test_sums_are_the_engines_counters_where_steps_fail(period, short):
    """Whichever they are, of whatever request, and whatever its other answers had drawn by then."""
    cells, drafts = 256 if short else 4096, DraftConfig(enabled=True)
    config = replace(SMALL, cells=cells, overlap_steps="off", speculation=drafts)
    async with engine(config) as (router, service):
        runner = service._pipeline._runner
        works, steps = runner.begin, count(1)

        def sometimes(plan):
            if next(steps) % period == 0:
                raise RuntimeError("injected")
            return works(plan)

        runner.begin = sometimes
        say = [{"role": "user", "content": "Count: one two three one two three one two"}]
        forced = {"tools": [TOOL], "tool_choice": "required"}
        asked = [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}, forced, {"stop": ["e", "o"]}]
        chats = [router.chat(messages=say, max_tokens=24, headers=FRESH, **each) for each in asked]
        prompt = {"path": "/v1/completions", "messages": None, "prompt": "one two three", "echo": True}
        chats += [router.chat(**prompt, max_tokens=9, logprobs=1), prefill(router, say)]
        answers = [*await asyncio.gather(*chats[:4]), *[await each for each in chats[4:]]]
        served = sum(answer.status_code not in (400, 429) for answer in answers)
        await until_async(lambda: router.books.booked.total() >= served)
        rows = await router.records()
        agree(rows, service.stats)
        assert service.stats.failed_steps
        assert all(row["units"] == 0 for row in rows if row["outcome"] == "failed")


async def test_a_prefill_whose_client_leaves_is_counted(monkeypatch):
    monkeypatch.setattr(scheduler, "BACKGROUND_CHUNK", 1)
    async with engine(replace(SMALL, overlap_steps="off")) as (router, service):
        leaving = asyncio.create_task(prefill(router, [{"role": "user", "content": "one two three " * 20}]))
        await until_async(lambda: router.world.backend.loaded and service.stats.ahead_computed > 3)
        leaving.cancel()
        await asyncio.wait({leaving})
        await until_async(lambda: router.books.booked.total() == 1)
        [row] = await router.records()
        agree([row], service.stats)
        assert (row["outcome"], row["endpoint"]) == ("aborted", "prefill")


def _today(rows):
    return datetime.fromtimestamp(rows[-1]["at"], UTC).strftime("%Y-%m-%d")


async def test_a_clients_retry_is_billed_once():
    work = Usage(10, 4, 3, work=Work(6, 4, 3))
    backend = FakeBackend(((TextDelta("Hi"),), (Completed("stop", work, DONE.timing),)))
    async with Router(backend, [ACME]) as router:
        same = {"idempotency-key": "k-1"}
        for headers in (same, same, {**same, **FRESH}):
            assert (await router.chat(headers=headers)).status_code == 200
        assert [(row["outcome"], row["units"]) for row in await router.records()] == [("completed", 13.0)]
        await router.chat(headers={"idempotency-key": "k-2", **FRESH})
        assert [row["units"] for row in await router.records()] == [13.0, 13.0]
        # An answer that is gone is computed again, and costs again.
        with shared_server().client() as client:
            client.delete(*client.keys(f"{router.space}/records/idempotency/*"))
        await router.chat(headers={**same, **FRESH})
        assert [row["units"] for row in await router.records()] == [13.0, 13.0, 13.0]


WORKED = Completed("stop", Usage(10, 4, 3, work=Work(6, 4, 3)), DONE.timing)


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
async def test_what_the_proxy_sends_to_another_router_is_billed_once(key):
    """As where the first one died behind its books. That an engine worked twice stands there."""
    async with (
        Router(FakeBackend(((WORKED,),)), [ACME]) as here,
        Router(FakeBackend(((WORKED,),)), [ACME], space=here.space) as there,
    ):
        for router, delivery in ((here, "d-1"), (there, "d-1"), (there, "d-2")):
            await router.chat(headers={"x-holdfast-delivery": delivery, **key, **FRESH})
        [day] = await here.books.sums("acme", [_today(await here.records())])
        told = (1, 3, 13.0) if key else (3, 9, 26.0)  # the answer under the client's key is there for both routers
        assert (day["requests"], day["drawn"], day["units"]) == told


async def test_the_latest_records_are_kept_and_all_are_in_the_sums():
    async with Router(tenants=[ACME], config=replace(CONFIG, usage_records=100)) as router:
        for n in range(400):
            record = UsageRecord(str(n), time.time(), "acme", "", "pocket", f"p{n // 80}", "chat", "completed", 3, 1, 2)
            await router.books.book(CallEnd(record))
        rows = await router.records()
        assert 100 <= len(rows) <= 200, "Redis takes away whole nodes of a hundred"
        assert {row["program"] for row in rows[-80:]} == {"p4"}
        [day] = await router.books.sums("acme", [_today(rows)])
        assert (day["requests"], day["input"], day["output"]) == (400, 1200, 800)


async def test_failures_of_ours_cost_nothing_and_refusals_are_no_records():
    limited = Tenant("acme", keys=ACME.keys, limits=TenantLimits(requests_per_minute=3, units_per_day=10_000))
    async with Router(FakeBackend(((TextDelta("Hi"),), RuntimeError("bug"))), [limited]) as router:
        answer = await router.chat()
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (500, "2")
        assert (await router.chat(messages=[])).status_code == 400
        assert (await router.chat(temperature=9)).status_code == 400  # what is wrong counts, too
        for path in ("/v1/chat/completions", "/v1/messages"):
            refused = await router.chat(path=path, max_tokens=5)
            assert refused.status_code == 429
            assert 0 < int(refused.headers["retry-after"]) <= 61
        assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        await until_async(lambda: router.books.booked["booked"])
        rows = await router.records()
        assert [(row["outcome"], row["units"]) for row in rows] == [("failed", 0.0)]


async def test_a_tenant_sees_its_own_usage_and_a_key_only_what_it_is_for():
    keys = (
        ApiKey("infer", hash_key("infer"), (Scope.INFER,)),
        ApiKey("usage", hash_key("usage"), (Scope.USAGE,)),
        ApiKey("old", hash_key("old"), expires=1.0),
    )
    async with Router(tenants=[Tenant("acme", keys=keys), *keyed("other").tenants]) as router:
        for key, chat, usage in (("infer", 200, 403), ("usage", 403, 200), ("old", 401, 401), ("other", 200, 200)):
            head = bearer(key)
            assert (await router.chat(key)).status_code == chat
            assert (await router.http.get("/v1/usage/records", headers=head)).status_code == usage
            assert (await router.http.get("/v1/usage", headers=head)).status_code == usage
        head = bearer("usage")
        lines = (await router.http.get("/v1/usage/records", headers=head)).text.splitlines()
        assert [orjson.loads(line)["tenant"] for line in lines] == ["acme"]
        table = await router.http.get("/v1/usage/records?format=csv&from=2020-01-01", headers=head)
        [row] = csv.DictReader(io.StringIO(table.text))
        assert (row["tenant"], row["key"], row["input"], row["output"]) == ("acme", "infer", "10", "3")
        after = f"/v1/usage/records?after={row['place']}"
        assert (await router.http.get(after, headers=head)).text == ""
        for wrong in ("limit=0", "format=xml", "from=soon", "after=x"):
            assert (await router.http.get(f"/v1/usage/records?{wrong}", headers=head)).status_code == 400


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(order=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), limit=st.integers(1, 4))
async def test_whoever_goes_on_behind_the_last_row_gets_every_row_once(order, limit):
    """Of all tenants, as they were booked; also of one that has been removed."""
    tenants = keyed(*"abc").tenants
    async with Router(tenants=tenants) as router:
        for key in order:
            await router.chat(key, headers=FRESH)
        router.directory.replace(tenants[:1])
        got, after = [], ""
        while True:
            page = await router.admin("GET", f"/usage/records?limit={limit}" + (f"&after={after}" if after else ""))
            rows = [orjson.loads(line) for line in page.text.splitlines()]
            got += [row["tenant"] for row in rows]
            if not rows:
                break
            after = f"{rows[-1]['place']}/{rows[-1]['tenant']}"
        assert got == order or sorted(got) == sorted(order)  # two of one millisecond come by name
        sums = (await router.admin("GET", "/usage")).json()["tenants"]
        assert {each["tenant"] for each in sums} == {"a", *order}
        without = await router.admin("GET", "/usage/records?after=1-0")
        assert (without.status_code, without.json()["error"]["param"]) == (400, "after")


def test_rows_of_one_moment_are_neither_skipped_nor_told_twice():
    rows = read_query(TenantRowsQuery, {"after": "5-0/b"})
    assert [rows.begin_of(tenant) for tenant in "abc"] == ["(5-0", "(5-0", "5-0"]
    told = [{"place": place, "tenant": name} for name, place in (("b", "10-0"), ("b", "9-1"), ("a", "10-0"))]
    assert [(row["place"], row["tenant"]) for row in first_rows(told, 2)] == [("9-1", "b"), ("10-0", "a")]


def test_a_spreadsheet_gets_no_formula():
    assert "'=cmd()" in as_csv([{"program": "=cmd()"}])


# ---- tenants that come and go ----


async def test_tenants_and_keys_come_and_go_on_all_routers_without_a_start(monkeypatch):
    monkeypatch.setattr(tenant_store, "LOOK_S", 0.02)
    async with Router(tenants=[ACME]) as here, Router(tenants=[ACME], space=here.space) as there:

        async def answers(key, wanted):
            async def answered():
                return (await there.chat(key)).status_code == wanted

            await until_async(answered)

        made = (await here.admin("POST", "/tenants", {"name": "new", "limits": {"max_concurrent": 5}})).json()
        await answers(made["key"], 200)
        again = await here.admin("POST", "/tenants", {"name": "new"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "tenant_exists")
        rotated = (await there.admin("POST", "/tenants/new/keys", {"retire_in_s": 0})).json()
        await answers(made["key"], 401)
        assert (await there.chat(rotated["key"])).status_code == 200
        extra = (await here.admin("POST", "/tenants/acme/keys", {"id": "ci"})).json()
        await answers(extra["key"], 200)
        assert (await there.chat("acme")).status_code == 200
        changed = await here.admin("PATCH", "/tenants/new", {"limits": {"requests_per_minute": 1}})
        assert changed.json()["limits"]["max_concurrent"] is None
        refused = await here.admin("PATCH", "/tenants/acme", {"weight": 2})
        assert "configuration" in refused.json()["error"]["message"]
        await answers(rotated["key"], 200)
        await answers(rotated["key"], 429)
        listed = (await there.admin("GET", "/tenants")).json()["tenants"]
        keys = {key["id"]: key for tenant in listed for key in tenant["keys"]}
        assert {tenant["name"]: tenant["source"] for tenant in listed} == {"acme": "configuration", "new": "redis"}
        assert (keys["ci"]["source"], keys["laptop"]["source"]) == ("redis", "configuration")
        assert keys[rotated["key_id"]]["last_used"] > 0
        assert "sha256" not in str(listed)
        assert (await here.admin("DELETE", "/tenants/acme/keys/ci")).status_code == 200
        assert (await here.admin("DELETE", "/tenants/new")).status_code == 200
        await answers(rotated["key"], 401)
        await answers(extra["key"], 401)
        log = await there.audit_log()
        acts = [orjson.loads(line) for line in log.splitlines()]
        tenant_acts = {f"tenant {what}" for what in ("added", "changed", "removed")}
        key_acts = {f"key {what}" for what in ("rotated", "added", "removed")}
        assert {entry["act"] for entry in acts} == {*tenant_acts, *key_acts, "refused"}
        assert all(entry["who"] == hash_key("admin")[7:15] for entry in acts if entry["act"] != "refused")
        for secret in (made["key"], rotated["key"], extra["key"], "hello", "sha256"):
            assert secret not in log


async def test_what_is_purged_at_one_router_is_not_found_at_another(monkeypatch):
    monkeypatch.setattr(tenant_store, "LOOK_S", 0.02)
    async with Router(tenants=[ACME]) as here, Router(tenants=[ACME], space=here.space) as there:
        found = [(await there.chat()).headers["x-holdfast-cache"] for _ in range(2)]
        assert found == ["miss", "hit"]
        assert (await here.admin("DELETE", "/tenants/acme/cache")).status_code == 200

        async def finds(result):
            return (await there.chat()).headers["x-holdfast-cache"] == result

        await until_async(lambda: finds("miss"))
        await until_async(lambda: finds("hit"))  # answers after a purge are kept


async def test_two_administrators_do_not_undo_each_others_work():
    async with Router() as router:
        assert await router.tenants.change("a", b"", Tenant("a"), b"{}")
        _, before = await router.tenants.find("a")
        assert await router.tenants.change("a", before, Tenant("a", weight=2.0), b"{}")
        assert not await router.tenants.change("a", before, None, b"{}")
        found, _ = await router.tenants.find("a")
        assert found == Tenant("a", weight=2.0)


@pytest.mark.parametrize(("config", "key", "status"), [(CONFIG, "acme", 401), (RouterConfig(), "admin", 403)])
async def test_administration_is_for_its_own_keys(config, key, status):
    async with Router(tenants=[ACME], config=config) as router:
        for method, path in (("GET", "/tenants"), ("POST", "/tenants"), ("GET", "/usage/records"), ("GET", "/audit")):
            answer = await router.http.request(method, f"/v1/admin{path}", headers=bearer(key))
            assert answer.status_code == status


async def test_a_redis_that_is_gone_takes_no_tenant_away_and_one_that_comes_back_empty_gets_them_back(server):
    """From the router that knows of the latest change, though another one was quicker; keys go on meanwhile."""
    one = Router(tenants=[ACME], server=server)
    async with one as late, Router(tenants=[ACME], space=one.space, server=server) as here:
        old, new = [(await here.admin("POST", "/tenants", {"name": name})).json()["key"] for name in ("old", "new")]
        await here.admin("DELETE", "/tenants/new/cache")
        await late.tenants._look()
        await here.admin("DELETE", "/tenants/old")  # the other one has not heard of it
        known = here.tenants._version, here.tenants._tenants, here.tenants._purges
        for router in (late, here):
            router.tenants._task.cancel()
        server.kill()
        assert (await here.chat(new)).status_code == 200
        assert (await here.admin("GET", "/tenants")).status_code == 503
        server.start()
        for router in (late, here):
            await until_async(router.store.info)
            await until_async(lambda router=router: not router.store.degraded)
        for router in (late, here, late, here):
            await router.tenants._look()
            assert (await router.chat(new)).status_code == 200
        for router in (late, here):
            assert (router.tenants._version, router.tenants._tenants, router.tenants._purges) == known
            assert (await router.chat(old)).status_code == 401
        async with Router(tenants=[ACME], space=here.space, server=server) as fresh:
            assert (await fresh.chat(new)).status_code == 200


async def test_a_refusal_is_traced_to_who_asked_behind_the_proxy():
    async with Router(tenants=[ACME], config=replace(CONFIG, proxies=("10.0.0.0/8",))) as router:
        for told in ("6.6.6.6, 203.0.113.9", "203.0.113.9, 10.1.2.3"):
            for path in ("/v1/usage", "/v1/admin/tenants"):
                await router.http.get(path, headers={**bearer("wrong"), "x-forwarded-for": told})
        refused = [orjson.loads(line) for line in (await router.audit_log()).splitlines()]
        assert [(entry["peer"], entry["count"]) for entry in refused] == [("203.0.113.9", 2)] * 2


async def test_refusals_push_no_act_out_of_the_audit_log_and_tell_no_path_as_it_was_sent():
    async with Router(tenants=[ACME], audit_records=3) as router:
        assert (await router.admin("POST", "/tenants", {"name": "beta"})).status_code == 200
        for n in range(500):  # Redis trims streams by whole nodes of 100 entries
            router.audit.refused("invalid_api_key", f"10.0.{n // 250}.{n % 250}", "/v1/usage")
        await router.audit.flush()
        for path in ("/v1/programs/so%20long/heartbeat", "/v1/responses/resp_secret", "/v1/admin/tenants/secret"):
            method = "DELETE" if "admin" in path or "responses" in path else "POST"
            answer = await router.http.request(method, path, headers=bearer("wrong"))
            assert answer.status_code == 401
        entries = [orjson.loads(line) for line in (await router.audit_log("?limit=3")).splitlines()]
        assert [entry["act"] for entry in entries] == ["refused"] * 3 + ["tenant added"]
        paths = ["/v1/admin/tenants/{name}", "/v1/programs/{program_id:path}/heartbeat", "/v1/responses/{response_id}"]
        assert sorted(entry["path"] for entry in entries[:3]) == paths


class Counting(FakeBackend):
    """What was done for requests that are cut off is told once `go_on` is set; `silent`: never."""

    def __init__(self, silent=False):
        super().__init__()
        self.used = Usage(10, 4, 3, work=Work(6, 4, 3))
        self.go_on = asyncio.Event()
        self.silent = silent

    async def drawn(self, request_id):
        self.asked.append(request_id)
        await self.go_on.wait()
        return None if self.silent else self.used


class Breaking(Counting):
    async def generate(self, request, place=ANYWHERE):
        raise UnavailableError("the replica broke")


async def test_the_usage_of_any_number_of_requests_that_are_cut_off_at_once_is_booked():
    backend, n = Breaking(), 200
    async with Router(backend, [ACME]) as router:
        for _ in range(0, n, 100):
            answers = await asyncio.gather(*(router.chat(headers=FRESH) for _ in range(100)))
            assert {answer.status_code for answer in answers} == {503}
        assert router.books.booked["booked"] == 0
        backend.go_on.set()
        await until_async(lambda: router.books.booked["booked"] == n)
        [row] = await router.books.sums("acme", [datetime.now(UTC).strftime("%Y-%m")])
        assert (row["requests"], row["input"], row["output"]) == (n, n * 10, n * 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silent", [False, True])
async def test_what_a_stopping_router_cuts_off_is_booked_before_it_ends(stream, silent, monkeypatch):
    monkeypatch.setattr(usage, "COUNTING_S", 0.1 if silent else 60.0)
    backend = Counting(silent)
    backend.stall = 1
    drain = Drain()
    async with Router(backend, [ACME], drain=drain) as router:
        asked = asyncio.create_task(router.chat(stream=stream))
        await until_async(backend.started.is_set)
        drain.begin(0.0)
        answer = await asked
        assert answer.status_code == (200 if stream else 503)
        await until_async(lambda: backend.asked)
        if not silent:
            asyncio.get_running_loop().call_later(0, backend.go_on.set)  # while it closes
    store = Records(RedisAddress(shared_server().url, namespace=router.space), PATIENT)
    [record] = await UsageBooks(CONFIG, Quotas(store)).records("acme", "-", "+", 10)
    await store.close()
    assert (record["outcome"], record["input"], record["output"]) == ("failed", *((0, 0) if silent else (10, 3)))
    assert router.books.booked["uncounted"] == silent
