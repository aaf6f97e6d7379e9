"""What guaranteed tool calls hold and cost: ``python -m holdfast.loadgen.bench.calls [--parts NAMES]``.

- `law`: sampled turns at temperature 0 and 1 in every format, of Pocket and of random models with vocabularies of 1,536
  and 128,000. Two of three begin a call. It counts calls to undeclared names, arguments outside their schemas, markup
  in the content, and turns whose guarantee was given up; all of these must be 0.
- `time`: the share of a turn's processor time that its grammar takes, for each form of each format, with 4 and 200
  tools. The model writes the expected call. Drafts and forced tokens are as in service. Grammars are compiled before.
- `ready`: the time from a request with 200 new tools until the engine has it.
- `whole`: tools and words that Pocket has never seen: of the turns that begin a call, the share of whole calls.

One process, no Ray and no HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import numpy as np
import torch
import transformers

from holdfast.loadgen.bench.call_tasks import TASKS, CallTask
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.replicas.config import EngineConfig, Guarantee
from holdfast.replicas.constraints.compiler import CompilerThreads
from holdfast.replicas.constraints.grammar import PYTHON, CallForm, forms_of
from holdfast.replicas.constraints.matcher import Bits, Matcher
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Drawn, Landed, Runner, Sampling, StepPlan
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest, ModelCard, RawPrompt
from holdfast.replicas.service import Service, freeze_heap
from holdfast.replicas.speculation.ngrams import common_prefix
from holdfast.replicas.text.calls.formats import MARKERS, ToolFormat
from holdfast.replicas.text.conversation import Constraints, Encoded, TextSide

Made = TypeVar("Made")
FORMATS = tuple(each for each in ToolFormat if each is not ToolFormat.NONE)
PARTS = ("law", "time", "ready", "whole")
VOCABULARIES = (1536, 128_000)
MODELS = ("pocket", *map(str, VOCABULARIES))
_CONFIG = EngineConfig(cells=16384, threads=1)
_MAX_TOKENS = 160
_SETS = 8  # of tools, over which turns are timed
_BEGUN = ("", "I look that up.\n", "Well\n\n")  # texts before a call


def _schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:1], "additionalProperties": False}


def _tool(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


_TEXT = {"type": "string", "maxLength": 12}
LAW_TOOLS = (
    _tool("get_weather", _schema(city=_TEXT, days={"type": "integer", "minimum": 1, "maximum": 14})),
    _tool("get_time", _schema()),
    _tool("search", _schema(query=_TEXT, kind={"enum": ["news", "maps"]}, deep={"type": "boolean"})),
    _tool("plan", _schema(steps={"type": "array", "items": _TEXT, "maxItems": 2}, where=_schema(room=_TEXT))),
)


def valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether `value` is of `schema`, as far as the schemas of this benchmark go."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(value, dict) or not value.keys() >= set(required) or not value.keys() <= properties.keys():
            return False
        return all(valid(each, properties[key]) for key, each in value.items())
    if kind == "array":
        fits = isinstance(value, list) and len(value) <= schema.get("maxItems", sys.maxsize)
        return fits and all(valid(each, schema.get("items", {})) for each in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema.get("maxLength", sys.maxsize)
    if kind in ("integer", "number"):
        numbers: tuple[type, ...] = (int,) if kind == "integer" else (int, float)
        fits = isinstance(value, numbers) and not isinstance(value, bool)
        return fits and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return isinstance(value, bool) if kind == "boolean" else True


def is_whole(name: str, arguments: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a call names one of `tools` and has arguments of its schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    try:
        return name in schemas and valid(json.loads(arguments), schemas[name])
    except ValueError:
        return False


def written(form: CallForm, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls in `form`, as the model's template writes them."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        if form.dialect.bare:
            (body,) = form.dialect.spelled(dict(arguments), free=False)
        elif form.dialect is PYTHON:
            body = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        elif form.tags is None:
            body = json.dumps(arguments, ensure_ascii=False)
        else:
            tags, line = form.tags, "\n" if form.tags.line else ""
            values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
            body = "".join(f"\n{tags.key}{k}{tags.value}{line}{v}{line}{tags.end}" for k, v in values.items()) + "\n"
        index = f":{number}" if form.number else ""
        texts.append(f"{form.before}{name}{index}{form.behind(name)}{body}{form.after}")
    return form.opener + form.head + form.between.join(texts) + form.tail


# ---- models ----


def with_markers(tokenizer: Any, tool_format: ToolFormat, rows: int) -> Any:
    """A copy of `tokenizer` to which the markers of a format are added as tokens, where a model has `rows` for them."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
    )
    markers = [transformers.AddedToken(text, special=False) for text in sorted(MARKERS[tool_format])]
    if len(made) + len(markers) <= rows:
        made.add_tokens(markers)
    return made


def random_model(folder: Path, vocabulary: int) -> None:
    """A small Llama that was never trained, with Pocket's tokens and made-up ones up to `vocabulary`."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((WEIGHTS / name).read_bytes())
    content = json.loads((WEIGHTS / "tokenizer.json").read_text())
    rng, vocab = random.Random(vocabulary), content["model"]["vocab"]
    words = [text for text in vocab if text.isascii()]
    room = 64  # for the markers of a format
    added = {each["content"]: each["id"] for each in content["added_tokens"]}
    following = max([*vocab.values(), *added.values()]) + 1
    while following < vocabulary - room:
        text = "".join(rng.choices(words, k=rng.choice((2, 2, 3))))
        if text not in vocab and text not in added:
            vocab[text] = following
            following += 1
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    torch.manual_seed(vocabulary)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary + room,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        eos_token_id=added.get("<|im_end|>", 2),
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)


class Begun:
    """`constraints.matcher.Matcher` of a reply that begins with `prefix`; after it `inner` decides."""

    def __init__(self, prefix: Sequence[int], inner: Matcher | None, vocabulary: int, at: int = 0) -> None:
        self._prefix, self._inner, self._vocabulary, self._at = prefix, inner, vocabulary, at

    @property
    def _begun(self) -> bool:
        return self._at >= len(self._prefix)

    @property
    def words(self) -> int:
        return self._inner.words if self._inner is not None else -(-self._vocabulary // 32)

    @property
    def binding(self) -> bool:
        return not self._begun or (self._inner is not None and self._inner.binding)

    @property
    def finished(self) -> bool:
        return self._begun and self._inner is not None and self._inner.finished

    @property
    def failed(self) -> bool:
        return self._inner is not None and self._inner.failed

    @property
    def given_up(self) -> bool:
        return self._inner is not None and self._inner.given_up

    def copy(self) -> Begun:
        inner = self._inner.copy() if self._inner is not None else None
        return Begun(self._prefix, inner, self._vocabulary, self._at)

    def advance(self, tokens: Sequence[int]) -> int:
        accepted = len(tokens) if self._inner is None else self._inner.advance(tokens)
        self._at += accepted
        return accepted

    def accepts(self, tokens: Sequence[int]) -> int:
        rest = list(self._prefix[self._at :])
        same = common_prefix(list(tokens), rest)
        return self.copy().advance(tokens) if same == len(rest) else same

    def forced(self) -> list[int]:
        if not self._begun:
            return list(self._prefix[self._at :])
        return self._inner.forced() if self._inner is not None else []

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        ahead = self.copy()
        for row in range(len(drafts) + 1):
            out[row] = -1
            if not ahead._begun:
                token = ahead._prefix[ahead._at]
                out[row] = 0
                out.view(np.uint32)[row, token // 32] = np.uint32(1) << np.uint32(token % 32)
            elif ahead._inner is not None and ahead._inner.binding:
                ahead._inner.fill((), out[row : row + 1])
            if row < len(drafts) and not ahead.advance(drafts[row : row + 1]):
                out[row + 1 :] = -1
                return


class Clocked:
    """`constraints.matcher.Matcher` that adds the processor seconds of `inner` to `spent`."""

    def __init__(self, inner: Matcher, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return partial(clocked, self._spent, value) if callable(value) else value

    def copy(self) -> Clocked:
        return Clocked(clocked(self._spent, self._inner.copy), self._spent)


def clocked(spent: list[float], act: Callable[..., Made], *arguments: Any) -> Made:
    """Call `act` and append its processor seconds to `spent`."""
    before = time.thread_time()  # the time of reading the clock is subtracted
    began = time.thread_time()
    made = act(*arguments)
    spent.append(time.thread_time() - began - (began - before))
    return made


class Scripted:
    """A `Runner` whose model always writes `script` after a prompt of `n_prompt` tokens."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.n_prompt = 0
        self.script: Sequence[int] = ()

    def begin(self, plan: StepPlan) -> Landed:
        output = self._runner.begin(plan).land()
        return Landed(replace(output, drawn=tuple(map(self._drawn, plan.chunks, output.drawn))))

    def _drawn(self, chunk: Any, drawn: Drawn | None) -> Drawn | None:
        if drawn is None or chunk.draw is None:
            return None
        drafts = chunk.tokens[len(chunk.tokens) - chunk.draw.drafts :].tolist()
        at = chunk.start + len(chunk.tokens) - len(drafts) - self.n_prompt
        follow = list(self.script[at : at + len(drafts) + 1])
        return Drawn(tuple(follow[: common_prefix(drafts, follow) + 1]))


class Recorded(TextSide):
    """Keeps the tokens of every reply, by the program of its request.

    `begun`: what the reply to a request begins with. `shown`: the tools that the model sees, if not the declared ones.
    `spent`: processor seconds of the grammars.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replies: dict[str, list[int]] = {}
        self.begun: dict[str, list[int]] = {}
        self.shown: Sequence[Mapping[str, Any]] | None = None
        self.spent: list[float] = []
        remember = self.cache.remember

        def recorded(text: str, ids: Any, mark: str = "", scope: str = "", program: str = "") -> None:
            self.replies[program] = ids.tolist()
            remember(text, ids, mark, scope, program)

        self.cache.remember = recorded  # type: ignore[method-assign]

    async def encoded(self, prompt: Any, scope: str = "", program: str = "") -> Encoded:
        seen = prompt if self.shown is None else replace(prompt, tools=self.shown)
        return await super().encoded(seen, scope, program)

    def constraints(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> Constraints:
        return clocked(self.spent, super().constraints, prompt, scope)

    def after_thinking(self, request: GenerateRequest, encoded: Encoded, matcher: Matcher | None) -> Matcher | None:
        inner = super().after_thinking(request, encoded, matcher)
        timed = cast(Matcher, Clocked(inner, self.spent)) if inner is not None else None
        prefix = self.begun.get(request.request_id)
        return Begun(prefix, timed, self.vocabulary) if prefix else timed


@asynccontextmanager
async def serving(
    loaded: LoadedRunner, tool_format: ToolFormat, guarantee: Guarantee, runner: Runner | None = None
) -> Any:
    """A service over a loaded model whose calls are in `tool_format`."""
    config = replace(loaded.config, tools_guarantee=guarantee)
    engine = Engine(
        config, runner or loaded.runner, loaded.eos, loaded.vocabulary, cost=loaded.cost, window=loaded.window
    )
    text = Recorded(
        with_markers(loaded.tokenizer, tool_format, loaded.vocabulary), config, str(tool_format), loaded.eos
    )
    text.prepare()
    service = Service(engine, text, ModelCard("model", config.context_length, text.vocabulary))
    try:
        yield service, text
    finally:
        await service.close()


# ---- law ----


@dataclass(slots=True)
class Law:
    """What sampled turns were like. `undeclared`, `outside`, `markup` and `unguarded` must be 0."""

    turns: int = 0
    begun: int = 0  # turns that begin a call
    calls: int = 0
    cut: int = 0  # replies that ended by their length
    undeclared: int = 0
    outside: int = 0  # of the schema
    markup: int = 0
    unguarded: int = 0  # turns whose calls were free from some place on

    @property
    def holds(self) -> bool:
        return not (self.undeclared or self.outside or self.markup or self.unguarded)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def opens(form: CallForm, names: Iterable[str]) -> list[str]:
    """Texts that begin a call in `form` and are nothing else: its opener, or all up to the arguments."""
    return [form.opener] if form.opener else [form.until_arguments(name) for name in sorted(names)]


def shows_markup(text: str, tool_format: ToolFormat, names: Set[str], begun: bool) -> bool:
    """Whether a reply's content has in it what belongs to a call; one that has `begun` a call shows no part of one."""
    forms = forms_of(tool_format, lambda _: True)
    assert forms is not None
    start = text.strip()
    for form in forms.all:
        if form.opener:
            if form.opener in text:
                return True
            continue
        frame = re.match(form.frame, start)
        if frame is not None and frame[1] in names:
            return True
        if begun and any(len(start) > 1 and begins.startswith(start) for begins in opens(form, names)):
            return True  # cut before its arguments
    parts = [*MARKERS[tool_format], "<tool_call", "<function=", "<invoke", '"parameters": ', '"arguments": ']
    return begun and any(part in text for part in parts)


async def law(
    loaded: LoadedRunner, tool_format: ToolFormat, turns: int, total: Law, guarantee: Guarantee = "schema"
) -> None:
    """Add `turns` sampled turns in one format to `total`, half of them greedy."""
    rng = random.Random(str(tool_format))
    names = {tool["function"]["name"] for tool in LAW_TOOLS}
    forms = forms_of(tool_format, lambda _: True)
    assert forms is not None
    begins = []
    for index in range(turns):
        form = rng.choice(forms.all)
        text = (rng.choice(_BEGUN) if form.opener else "") + rng.choice(opens(form, names))
        begins.append(text if index % 3 != 2 else "")
    async with serving(loaded, tool_format, guarantee) as (service, side):
        requests = []
        for index, text in enumerate(begins):
            name = f"{index}"
            prompt = ChatPrompt([{"role": "user", "content": f"{rng.choice(TASKS).ask} ({name})"}], LAW_TOOLS)
            sampling = Sampling(max_tokens=_MAX_TOKENS, temperature=float(index % 2))
            requests.append(GenerateRequest(name, prompt, sampling, program_id=name))
            if text:
                side.begun[name] = list(side.tokenizer.encode(text, add_special_tokens=False))
        await asyncio.to_thread(side.constraints, requests[0].prompt)  # compiled before, however long that takes
        answers = await asyncio.gather(*map(service.generate, requests))
        total.unguarded += side.unguarded + service.engine.stats.unguarded
    total.turns += turns
    for text, answer in zip(begins, answers, strict=True):
        if not isinstance(answer, Answer):
            raise RuntimeError(f"{tool_format}: {answer}")
        total.begun += bool(text or answer.tool_calls)
        total.calls += len(answer.tool_calls)
        total.cut += answer.reason == "length"
        for call in answer.tool_calls:
            if call.name not in names:
                total.undeclared += 1
            elif call.closed or answer.reason != "length":
                total.outside += not (call.closed and is_whole(call.name, call.arguments, LAW_TOOLS))
        total.markup += shows_markup(answer.text or "", tool_format, names, bool(text))


async def run_law(turns: int, wanted: Sequence[str] = MODELS, tool_formats: Sequence[ToolFormat] = FORMATS) -> Law:
    """The law over the `wanted` models and formats; `turns` are those of all models and formats."""
    total = Law()
    with TemporaryDirectory() as folder:
        for name in wanted:
            model = name
            if name != "pocket":
                model = str(Path(folder, name))
                random_model(Path(model), int(name))
            loaded = load_runner(replace(_CONFIG, model=model))
            for tool_format in tool_formats:
                one = Law()
                await law(loaded, tool_format, -(-turns // (len(MODELS) * len(FORMATS))), one)
                print(f"{name:8} {tool_format:16} {one}", flush=True)
                for field, value in asdict(one).items():
                    setattr(total, field, getattr(total, field) + value)
            del loaded
    print(f"{'all':25} {total}")
    return total


# ---- time ----


def _timed(tool_format: ToolFormat) -> list[tuple[str, CallForm]]:
    """Each form that a format's calls may have, and what it is called."""
    forms = forms_of(tool_format, lambda _: True)
    assert forms is not None
    return [(f"{tool_format} {'bare' if not form.opener else form.opener}", form) for form in forms.all]


async def run_time(
    rounds: int, tool_formats: Sequence[ToolFormat] = FORMATS, model: str = _CONFIG.model
) -> dict[str, float]:
    """The median share of a turn's processor time that its grammar takes, by form and number of tools.

    `model`: Pocket, or a folder that `holdfast inflate` made of it. Raises RuntimeError for a token that was refused.
    """
    shares = {}
    # Without a cost of steps, drafts do not depend on time.
    loaded = replace(load_runner(replace(_CONFIG, model=model)), cost=None)
    script = Scripted(loaded.runner)
    others = many_tools(196, 4, 0)
    for tool_format in tool_formats:
        for label, form in _timed(tool_format):
            for more in ((), others):
                async with serving(loaded, tool_format, "schema", script) as (service, text):
                    turns = [await _share(service, text, script, form, more, n) for n in range(-2, rounds)][2:]
                    if refused := service.engine.stats.refused:
                        raise RuntimeError(f"{label}: {refused} tokens of the expected call were refused")
                shares[f"{label}, {4 + len(more)} tools"] = median(turns)
                print(f"{label}, {4 + len(more):3} tools {median(turns):8.2%} ({len(turns)} turns)", flush=True)
    print(f"median {median(shares.values()):.2%}, most {max(shares.values()):.2%}")
    return shares


async def _share(
    service: Service,
    text: Recorded,
    script: Scripted,
    form: CallForm,
    more: Sequence[Mapping[str, Any]],
    number: int,
) -> float:
    """One turn whose model writes the expected call in `form`; the share of its grammar.

    The model sees the tools of its task alone, so the prompt stays short with `more` declared tools.
    """
    task, text.shown = TASKS[number % _SETS], TASKS[number % _SETS].tools
    prompt = ChatPrompt([{"role": "user", "content": f"{task.ask} ({number})"}], [*task.tools, *more])
    await asyncio.to_thread(text.constraints, prompt)
    prose = "I look that up.\n" if form.opener else ""
    ids = text.tokenizer.encode(prose + written(form, [task.expected]), add_special_tokens=False)
    script.n_prompt = len((await text.encoded(prompt)).tokens)
    script.script = [*ids, *sorted(text.eos)[:1] * 64]
    text.spent.clear()
    began = time.process_time()
    answer = await service.generate(GenerateRequest(f"{number}", prompt, Sampling(max_tokens=256)))
    whole = time.process_time() - began
    if not isinstance(answer, Answer) or [call.name for call in answer.tool_calls] != [task.expected[0]]:
        raise RuntimeError(f"{form}: {answer}")
    return sum(text.spent) / whole


# ---- ready ----


def many_tools(number: int, properties: int, seed: int, described: int = 20) -> list[dict[str, Any]]:
    """Tools as a server of tools declares them, all different, with so many characters said of each argument."""
    said = ("What it is about, and how it is to be given. " * (described // 40 + 1))[:described]
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer", "minimum": 1, "maximum": 500},
        {"enum": ["open", "closed", "all"]},
        {"type": "array", "items": {"type": "string"}, "maxItems": 10},
        {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}, "required": ["a"]},
        {"type": "string", "format": "date-time"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "boolean"},
    ]
    tools = []
    for index in range(number):
        rng = random.Random(f"{seed}/{index}")
        given = {f"{rng.choice('abcdefgh')}_{i}": {**rng.choice(kinds), "description": said} for i in range(properties)}
        schema = {"type": "object", "properties": given, "required": list(given)[:2]}
        tools.append(_tool(f"tool_{seed}_{index}", schema))
    return tools


async def run_ready(rounds: int = 5, described: int = 160) -> None:
    """Milliseconds from a request with new tools to the engine. `described`: the characters said of an argument."""
    with TemporaryDirectory() as folder:
        random_model(Path(folder), VOCABULARIES[1])
        loaded = load_runner(replace(_CONFIG, model=folder))
        # No turn with these prompts is computed.
        loaded = replace(loaded, config=replace(loaded.config, context_length=1 << 18))
        seeds = count()
        async with serving(loaded, ToolFormat.HERMES, "schema") as (_, text):
            freeze_heap()  # as a server does
            threads = CompilerThreads()
            choices: tuple[Any, ...] = ("required", "auto")
            for properties, choice in product((6, 10), choices):
                encoding, rest = [], []
                for _ in range(rounds):
                    tools = many_tools(200, properties, next(seeds), described)
                    prompt = ChatPrompt([{"role": "user", "content": "Go."}], tools, choice)
                    began = time.perf_counter()
                    encoded = await text.encoded(prompt)
                    encoding.append((time.perf_counter() - began) * 1e3)
                    limits = await threads.run(partial(text.constraints, prompt))
                    text.after_thinking(GenerateRequest("", prompt, Sampling()), encoded, limits.matcher)
                    rest.append((time.perf_counter() - began) * 1e3 - encoding[-1])
                print(
                    f"200 tools of {properties} arguments, {choice}: {median(encoding):.0f} ms to tokenize "
                    f"{len(encoded.tokens):,} tokens, then {median(rest):.0f} ms until the engine has it "
                    f"(at most {max(rest):.0f})",
                    flush=True,
                )


# ---- whole ----


async def run_whole() -> dict[Guarantee, float]:
    """The share of whole ones among the turns that begin a call: greedy ones, and three drawn at temperature 1."""
    loaded, shares = load_runner(_CONFIG), dict[Guarantee, float]()
    settings = [Sampling(max_tokens=256), *(Sampling(256, temperature=1.0, seed=seed) for seed in range(3))]
    guarantees: tuple[Guarantee, ...] = ("off", "names", "schema")
    for guarantee in guarantees:
        async with serving(loaded, ToolFormat.HERMES, guarantee) as (service, text):
            counts = [_Counts(), _Counts()]  # greedy, and drawn
            for number, (task, sampling) in enumerate((task, each) for each in settings for task in TASKS):
                prompt, program = ChatPrompt([{"role": "user", "content": task.ask}], task.tools), f"{number}"
                answer = await service.generate(GenerateRequest(program, prompt, sampling, program_id=program))
                assert isinstance(answer, Answer), answer
                counts[sampling.temperature > 0].add(answer, text.detokenize(text.replies[program]), task)
        shares[guarantee] = sum(each.whole for each in counts) / sum(each.begun for each in counts)
        print(f"{guarantee:8} greedy: {counts[0]}; at temperature 1: {counts[1]}; {shares[guarantee]:.0%}", flush=True)
    return shares


@dataclass(slots=True)
class _Counts:
    """What came of turns that ask for a call."""

    turns: int = 0
    begun: int = 0
    whole: int = 0
    right: int = 0  # with the tool that is meant
    cut: int = 0

    def add(self, answer: Answer, drawn: str, task: CallTask) -> None:
        good = [call.closed and is_whole(call.name, call.arguments, task.tools) for call in answer.tool_calls]
        whole = bool(good) and all(good)
        self.turns += 1
        self.begun += "<tool_call>" in drawn
        self.whole += whole
        self.right += whole and answer.tool_calls[0].name == task.expected[0]
        self.cut += answer.reason == "length"

    def __str__(self) -> str:
        return (
            f"{self.turns} turns, {self.begun} begin a call, {self.whole} of them whole "
            f"({self.whole / max(self.begun, 1):.0%}), {self.right} with the right tool, {self.cut} cut"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what holds and what it costs; 1 where the law does not hold."""
    parser = argparse.ArgumentParser(prog="holdfast.loadgen.bench.calls")
    parser.add_argument("--turns", type=int, default=2000, help="of the law, over all models and formats")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of turns that are timed in each format")
    parser.add_argument("--models", default=",".join(MODELS), help="of the law")
    parser.add_argument("--model", default=_CONFIG.model, help="of time: pocket, or a folder of `holdfast inflate`")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the law and of time")
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args(arguments)
    wanted = options.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if unknown := set(options.formats.split(",")) - set(FORMATS):
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    formats = [ToolFormat(name) for name in options.formats.split(",")]
    held = True
    if "law" in wanted:
        held = asyncio.run(run_law(options.turns, options.models.split(","), formats)).holds
    if "time" in wanted:
        asyncio.run(run_time(options.rounds, formats, options.model))
    if "ready" in wanted:
        asyncio.run(run_ready())
    if "whole" in wanted:
        asyncio.run(run_whole())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
