"""Single flight, against a model: whoever comes, computes, fails or leaves, in any order."""

import asyncio
from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from holdfast.router.http import ClientGoneError
from holdfast.router.single_flight import SingleFlight, Unresolved

KEYS = st.sampled_from(["a", "b"])


class Crowd(RuleBasedStateMachine):
    """Requests come, and each ends once: with an answer, its own failure, or because its client left."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.flights = SingleFlight()
        self.tasks = {}  # of each request, by number
        self.keys = {}
        self.leads = {}  # requests that compute for others, by number
        self.alone = set()  # that compute for themselves
        self.end = {}  # what each that computes is told to do
        self.computed = Counter()
        self.ended = Counter()
        self.answers = {}

    def teardown(self):
        for number in list(self.tasks):
            self.tasks[number].cancel()
        self.settle()
        self.loop.close()

    def settle(self):
        async def spin():
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(spin())

    async def serve(self, number, key):
        adopted = []
        try:
            result = None
            while (leader := self.flights.lead(key)) is None:
                result = await self.flights.follow(key)
                if isinstance(result, str):
                    self.answers[number] = result
                    return
                if result is Unresolved.FAILED:
                    break
            if leader is None:
                self.alone.add(number)
            else:
                adopted.append(leader)
                self.leads[number] = leader
            self.end[number] = self.loop.create_future()
            how = await self.end[number]
            if how == "fail":
                raise ValueError
            self.computed[key] += 1
            self.answers[number] = key
            if number in self.leads:
                self.leads[number].resolve(key)
        except BaseException as error:
            for lead in adopted:
                lead.__exit__(ClientGoneError, ClientGoneError(), None) if isinstance(
                    error, asyncio.CancelledError
                ) else lead.__exit__(type(error), error, None)
        finally:
            self.ended[number] += 1
            self.leads.pop(number, None)
            self.alone.discard(number)
            self.end.pop(number, None)
            self.tasks.pop(number, None)

    @rule(target=requests, key=KEYS)
    def come(self, key):
        number = len(self.keys)
        self.keys[number] = key
        self.tasks[number] = self.loop.create_task(self.serve(number, key))
        self.settle()
        return number

    @rule(number=requests, how=st.sampled_from(["compute", "fail"]))
    def finish(self, number, how):
        if number in self.end:
            waited = [n for n in self.tasks if self.keys[n] == self.keys[number] and n not in self.end]
            led = number in self.leads
            self.end[number].set_result(how)
            self.settle()
            if led and how == "compute":
                assert all(self.answers.get(n) == self.keys[number] for n in waited)
            if led and how == "fail":
                assert all(n in self.alone for n in waited), "each tries for itself"

    @rule(number=requests, others=st.booleans())
    def leave(self, number, others):
        """Its client goes; `others`: and in the same moment its answer comes, or the next leader's client goes."""
        if number not in self.tasks:
            return
        waiting = [n for n in self.tasks if self.keys[n] == self.keys[number] and n not in self.end]
        led = number in self.leads
        if others and led and waiting:
            self.leads[number].leave()  # the next one leads, and does not know it yet
            self.tasks[waiting[0]].cancel()
        self.tasks[number].cancel()
        rival = next((n for n in self.leads if self.keys[n] == self.keys[number] and n != number), None)
        if others and rival is not None:
            self.end[rival].set_result("compute")
        self.settle()
        if led and waiting and not others:
            assert waiting[0] in self.leads, "who has waited longest goes on"

    @invariant()
    def one_computes_for_all(self):
        leading = Counter(self.keys[number] for number in self.leads)
        assert all(n == 1 for n in leading.values())
        waiting = [number for number in self.tasks if number not in self.end]
        assert all(leading[self.keys[number]] == 1 for number in waiting), "nobody waits for nobody"
        assert len(self.flights) == len(leading)
        assert self.flights.waiting == len(waiting)

    @invariant()
    def every_request_ends_once(self):
        assert all(n == 1 for n in self.ended.values())
        assert set(self.ended) | set(self.tasks) == set(self.keys)


Crowd.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCrowd = Crowd.TestCase
