"""The page in a browser: Chromium, if there is one, against a router with a real engine."""

import json
import time
from collections.abc import Iterator, Sequence

import httpx
import pytest
import waiting
from browser import CHROMIUM, Browser, Page
from fake_backend import HELLO, FakeBackend, FakeTurns, World, begun, called
from service_backend import ServiceBackend, engine_served

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.requests import ToolCallDelta, Usage, Work
from holdfast.replicas.stats import PIN, EngineStats, Occupancy, replica_status
from holdfast.router.entry.metrics import Outcome
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

MANY = 1000
AGENT = "agents-on-the-same-repository-"
GAP = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
    const [canvas, ratio] = [document.getElementById('timeline'), devicePixelRatio];
    const left = 150 * Math.min(1, canvas.clientWidth / 700);
    const between = canvas.getContext('2d').getImageData((left - 7) * ratio, 0, 5 * ratio, 20 * ratio).data;
    done(between.some((value, index) => index % 4 == 3 && value > 0));
})))"""  # whether something is drawn between the names and the rows


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with engine_served(ServiceBackend(EngineConfig(cells=8192, threads=1))) as address:
        httpx.get(f"{address}/v1/live", timeout=60.0, trust_env=False)  # the engine is loaded now
        yield address


def words(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r}).innerText"))


def test_a_chat_whose_call_one_answers_is_in_the_timeline_with_its_pause(browser: Browser, url: str) -> None:
    page = browser.page()
    page.open(f"{url}/#try")
    page.until("document.getElementById('model').options.length == 1")
    # A tool of our own, in place of the example.
    page.click(".tool button")
    page.click("#add")
    page.write(".tool input[placeholder=name]", "get_time")
    page.write(".tool input[placeholder='what it does']", "Current time in a city")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    page.write(".tool textarea", json.dumps(schema))
    page.write("#words", "What is the time in Oslo?")
    asked = time.monotonic()
    page.enter()
    page.until("document.querySelector('.call.closed')")
    call = words(page, ".call")
    assert "get_time" in call
    assert "Oslo" in call
    assert "closed after" in call
    page.until("document.querySelectorAll('#log li.assistant small').length == 1")  # the turn is over
    page.click("nav a[href='#live']")
    waiting.until(lambda: painted(page) > 20)  # the tool runs until its pause is to be seen
    seen = time.monotonic()
    page.click("nav a[href='#try']")
    page.write(".call.closed form input", "12:40")
    answered = time.monotonic()
    page.enter()
    page.until("document.querySelectorAll('#log li.assistant small').length == 2")
    told = [words(page, f"#log li.assistant:nth-of-type({number}) small") for number in (2, 3)]
    assert "0 reused" in told[0]
    assert all("prompt tokens" in each and "generated" in each and "prefill" in each for each in told)
    assert "drafts accepted" in told[0]  # the fixed text of a call
    cached = int(told[1].split(" prompt tokens, ")[1].split()[0])
    assert cached > 50  # of the second turn nearly all is the first
    # The program, its turns and its pause.
    page.click("#log li:last-child small a")
    page.until("document.querySelectorAll('#program li').length == 2")
    shown = words(page, "#program")
    assert "page-" in shown
    assert "called get_time" in shown
    assert f"{cached} reused" in shown
    lasted, unit = shown.split("get_time ran ")[1].split()[:2]
    lasted_s = float(lasted) / (1000 if unit == "ms" else 1)
    assert answered - seen - 0.1 < lasted_s < time.monotonic() - asked + 0.1  # it is shown in tenths
    assert page.run("document.getElementById('timeline').getAttribute('aria-label')").startswith("page-")
    # Clicked away, and found by a click on its row.
    page.click("#program header button")
    page.until("document.getElementById('program').hidden")
    page.click("#timeline", 60, 10)
    page.until("document.querySelectorAll('#program li').length == 2")
    assert painted(page) > 0  # colours of its turns; a slow machine draws them narrow
    page.click("nav a[href='#numbers']")
    page.until("document.querySelectorAll('.figure strong').length == 3")
    assert str(cached) == words(page, ".figure strong")
    assert page.faults == []


def test_a_call_that_was_cut_waits_for_nobody_and_what_failed_was_not_said(browser: Browser) -> None:
    whole = [ToolCallDelta(i, f"c{i}", "f", "{}", closed=True) for i in range(2)]
    cut = ToolCallDelta(1, "c9", "g", '{"a')
    backend = FakeTurns(
        called(whole[0], cut, reason="length"),
        HELLO,
        called(cut, reason="length"),
        called(*whole),
        (ValueError("no"),),
        HELLO,
    )

    def say(text: str) -> None:
        page.until("!document.getElementById('send').disabled")
        page.write("#words", text)
        page.enter()

    def answers(number: int) -> None:
        page.until(f"document.querySelectorAll('#log li.assistant small, #log .error').length == {number}")

    with World(backend).served() as address:
        page = browser.page()
        page.open(f"{address}/#try")
        page.until("document.getElementById('model').options.length == 1")
        say("one")
        page.until("document.querySelector('.call.closed form') && document.querySelector('.call.cut')")
        assert "cut off" in words(page, ".call.cut")
        assert page.run("document.querySelectorAll('.call form').length") == 1
        page.write(".call form input", "its result")
        page.enter()
        answers(2)
        say("two")
        answers(3)
        say("three")
        for result in ("r0", "r1"):
            page.until("document.querySelector('.call form')")
            page.write(".call form input", result)
            page.enter()
        answers(5)
        say("four")
        answers(6)
    asked = [[(m["role"], m.get("content")) for m in request.prompt.messages] for request in backend.requests]
    begun = [("user", "one"), ("assistant", None), ("tool", "its result"), ("assistant", "Hello!")]
    assert asked[3] == [*begun, ("user", "two"), ("assistant", ""), ("user", "three")]
    assert asked[4] == [*asked[3], ("assistant", None), ("tool", "r0"), ("tool", "r1")]
    assert asked[5] == [*asked[3][:-1], ("user", "four")]
    calls = [m.get("tool_calls") or () for m in backend.requests[4].prompt.messages if m["role"] == "assistant"]
    assert [[call["id"] for call in each] for each in calls] == [["c0"], [], [], ["c0", "c1"]]


def painted(page: Page) -> int:
    """How many pixels of the timeline have one of the colours of a turn or a pause."""
    return int(
        page.run(
            """(() => {
              const canvas = document.getElementById('timeline'), style = getComputedStyle(document.documentElement);
              const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
              const hex = (r, g, b) => '#' + [r, g, b].map((part) => part.toString(16).padStart(2, '0')).join('');
              const value = (name) => style.getPropertyValue('--' + name);
              const wanted = new Set(['decode', 'tools', 'computed'].map(value));
              let found = 0;
              for (let at = 0; at < data.length; at += 4) found += wanted.has(hex(...data.slice(at, at + 3)));
              return found;
            })()"""
        )
    )


def test_what_pauses_is_pinned_until_a_time_that_is_shown(browser: Browser, url: str) -> None:
    page = browser.page(dark=True)
    page.open(url)
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    body = {
        "model": "pocket",
        "program_id": "pauses",
        "messages": [{"role": "user", "content": "What is the weather in Lima?"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
        "max_tokens": 64,
    }
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()
    page.write("#filter", "pauses")
    page.until("document.getElementById('timeline').getAttribute('aria-label') == 'pauses: tools'")
    page.run("document.getElementById('scroll').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown", code="ArrowDown")
    page.until("document.querySelector('#program .pause')")
    assert "get_weather running" in words(page, "#program")
    assert "cells pinned on r1" in words(page, "#program")
    assert "unpinned in" in words(page, "#program")
    assert page.faults == []


def test_a_key_is_asked_for_kept_in_the_tab_and_shows_its_own_tenant(browser: Browser) -> None:
    tenants = TenantDirectory((Tenant("one", (hash_key("k1"),)), Tenant("two", (hash_key("k2"),))))
    world = World(Crowd(), tenants=tenants)
    report(world, "one", "mine", 0)
    report(world, "two", "other", 0)
    with world.served() as address:
        page = browser.page()
        page.open(address)
        page.write("#key-text", "k1")
        page.enter()
        page.until("document.getElementById('connection').innerText.includes('one (your programs)')")
        page.until("document.getElementById('chips').innerText.startsWith('1 program')")
        assert "two" not in page.run("document.body.innerText")
        assert page.run("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        page.click("#forget")
        page.until("document.getElementById('key-text')?.offsetParent")
    expected = ["Failed to load resource: the server responded with a status of 401"]
    assert {fault[: len(expected[0])] for fault in page.faults} == set(expected)


class Crowd(FakeBackend):
    """A replica that keeps cells for a thousand programs."""

    kept: Sequence[str] = [f"{AGENT}{number}" for number in range(MANY)]

    async def activity(self, scope: str | None) -> list[bytes]:
        now = Occupancy(3, 1, 4, 65536, 32768, 22000, 10768, pins=MANY, cells_pinned=16000)
        status = replica_status("r1", "pocket", "cpu", EngineStats(completion=1, prompt_computed=9), now)
        pins = [(f"default/{name}", 16, 3.0, 20.0, 40.0) for name in self.kept]
        assert len(pins[0]) == len(PIN)
        status = None if scope is not None else status
        return [
            json.dumps({"replica": "r1", "status": status, "turns": [], "pins": pins if not scope else []}).encode()
        ]


CALLED = Usage(200, 150, 20)


def report(world: World, tenant: str, name: str, ago: float, took_s: float = 0.2, usage: Usage | None = CALLED) -> None:
    """A turn that called a tool; without `usage` one that the response cache answered."""
    turns = world.turns
    clock, turns.clock = turns.clock, lambda: time.time() - ago - took_s
    turn = begun(tenant=Tenant(tenant), turns=turns)
    turns.clock = lambda: time.time() - ago
    turn.id = f"{name}-{ago}"
    turn.asks("pocket", program=f"{tenant}/{name}")
    if usage is not None:
        turn.facts.usage, turn.facts.tools, turn.facts.replica = usage, "get_weather", "r1"
        turn.facts.stages_ms = {"queue": 100 * took_s, "prefill": 300 * took_s, "decode": 600 * took_s}
    turn.end(Outcome.COMPLETED if usage is not None else Outcome.CACHED)
    turns.clock = clock


class One(Crowd):
    kept = ("mine",)


STAGES = """(y) => {
    const canvas = document.getElementById('timeline'), style = getComputedStyle(document.documentElement);
    const data = canvas.getContext('2d').getImageData(0, y, canvas.width, 1).data;
    const hex = (at) => '#' + [...data.slice(at, at + 3)].map((part) => part.toString(16).padStart(2, '0')).join('');
    const names = ['queue', 'cached', 'computed', 'decode', 'tools'];
    const known = new Map(names.map((name) => [style.getPropertyValue('--' + name), name]));
    const found = [];
    for (let at = 4 * 150; at < data.length; at += 4) {
      const name = data[at + 3] === 255 && known.get(hex(at));
      if (name && name !== found.at(-1)) found.push(name);
    }
    const present = 150 + 0.78 * (canvas.width - 150);
    return [found, data[4 * Math.round(present + 20) + 3] > 0];
}"""  # the colours of the first row at pixel `y`, from left to right; and whether something is drawn of what is to come


def test_stages_stand_one_behind_the_other_and_numbers_are_what_was_saved(browser: Browser) -> None:
    world = World(One())
    usage = Usage(200, 100, 50, work=Work(drafted=40, accepted=30))
    report(world, "default", "mine", 10, 30, usage)
    report(world, "default", "repeated", 2, usage=None)
    with world.served() as address:
        page = browser.page()
        page.open(address)
        page.write("#filter", "mine")
        page.until("document.getElementById('timeline').getAttribute('aria-label') == 'mine: tools'")
        page.until(f"({STAGES})(11)[0].length == 4")
        told = [page.run(f"({STAGES})({y})") for y in (6, 11, 15)]
        assert [found for found, _ in told] == [
            ["queue", "cached", "decode"],
            ["queue", "computed", "decode", "tools"],
            ["queue", "computed", "decode"],
        ]
        assert told[1][1], "what it is pinned for"
        page.click("nav a[href='#numbers']")
        page.until("document.querySelectorAll('.figure strong').length == 3")
        figures = page.run("[...document.querySelectorAll('.figure strong')].map((each) => each.innerText)")
        assert figures == ["100", "30", "1"]
        assert "50 % of 200 prompt tokens" in words(page, ".figure:nth-of-type(1)")
        assert "75 % of 40 drafts were accepted, of 50 generated tokens" in words(page, ".figure:nth-of-type(2)")
        assert "50 % of 2 requests" in words(page, ".figure:nth-of-type(3)")
        row = page.run("[...document.querySelector('#numbers tbody tr').cells].map((cell) => cell.innerText)")
        assert row == ["default", "2", "200", "100", "50", "30", "75 %", "1"]
        assert page.faults == []


def replicas_and_tenants(page: Page) -> None:
    """Crowd's one replica, with its cells by state, and what its tenant's two turns of each program came to."""
    rows = "[...document.querySelectorAll('#{} tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    ((name, _, free, running, waiting, pins, cached, *_),) = page.run(rows.format("replicas"))
    assert (name, free, running, waiting) == ("r1 · pocket on cpu", "50 %", "3", "1")
    assert (pins, cached) == (str(MANY), "0 %")
    parts = page.run(
        "[...document.querySelectorAll('#replicas .bar span')].map((part) => [part.className, part.title])"
    )
    assert parts == [
        ["queue", "held: 10768 cells"],
        ["pinned", "pinned: 16000 cells"],
        ["computed", "cached: 6000 cells"],
    ]
    filled = page.run(
        "(() => { const bar = document.querySelector('#replicas .bar');"
        " const width = (each) => each.getBoundingClientRect().width;"
        " return [...bar.children].map((part) => width(part) / width(bar)); })()"
    )
    assert filled == pytest.approx([10768 / 65536, 16000 / 65536, 6000 / 65536], abs=0.05)
    assert page.run(rows.format("tenants")) == [["default", "0", str(2 * MANY), "0", "0", "400.0k", "75 %", "40.0k"]]


@pytest.mark.parametrize(("width", "phone", "dark"), [(1280, False, False), (390, True, True)])
def test_a_thousand_programs_fit_and_can_be_found(browser: Browser, width: int, phone: bool, dark: bool) -> None:
    world = World(Crowd())
    for number in range(2 * MANY):
        report(world, "default", f"{AGENT}{number % MANY}", 50 - 40 * number / MANY / 2)
    with world.served() as address:
        page = browser.page(width, 844, dark=dark, phone=phone)
        page.open(address)
        page.until(f"document.getElementById('chips').innerText.startsWith('{MANY} programs')")
        page.until("document.getElementById('height').style.height != ''")
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # painted by then
        assert painted(page) > 200
        assert page.run("document.documentElement.scrollWidth") <= width  # nothing to be pushed about sideways
        # What is drawn for a frame is what there is to see of the rows, however many there are.
        drawn, all_rows = page.run("['timeline', 'height'].map((id) => document.getElementById(id).offsetHeight)")
        assert drawn < all_rows / 2
        replicas_and_tenants(page)
        cut = "[...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth).length"
        assert page.run(cut) == 0, "a table is cut off"
        page.write("#filter", f"{AGENT}777")
        page.until(f"document.getElementById('timeline').getAttribute('aria-label') == '{AGENT}777: tools'")
        assert not page.run(GAP), "a name is cut before the row begins"
        page.click("#timeline", 60, 10)
        page.until("document.querySelectorAll('#program li').length == 2")
        for view, shown in (
            ("try", "document.getElementById('model').options.length == 1"),
            ("numbers", "document.querySelectorAll('.figure strong').length == 3"),
        ):
            page.click(f"nav a[href='#{view}']")
            page.until(f"document.getElementById('{view}').offsetParent && {shown}")
            assert page.run("document.documentElement.scrollWidth") <= width
            wide = (
                "[...document.querySelectorAll('button, input, select, textarea')].filter((each) => each.offsetParent)"
            )
            assert page.run(f"Math.max(0, ...{wide}.map((each) => each.getBoundingClientRect().right))") <= width
        assert page.faults == []
