"""The validity and cost of guaranteed tool calls: `bench calls [--parts NAMES]`, in one process, without Ray and HTTP.

- `law`: sampled turns at temperature 0 and 1 in every format, of Pocket and of random models with vocabularies of 1,536
  and 128,000. Two of three begin a call. It counts calls to undeclared names, arguments outside their schemas, markup
  in the content, and turns whose guarantee was given up; all of these must be 0.
- `time`: the share of a turn's processor time that its grammar takes, for each form of each format, with 4 and 200
  tools. The model writes the expected call. Drafts and forced tokens are as in service. Grammars are compiled before.
- `ready`: the time from a request with 200 new tools until the engine has it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import torch
import transformers

from holdfast.loadgen.bench.call_tasks import TASKS
from holdfast.loadgen.bench.harness import Row, figure
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.replicas.config import EngineConfig, Guarantee
from holdfast.replicas.constraints.compiler import CompilerThreads
from holdfast.replicas.constraints.grammar import PYTHON, CallForm, forms_of
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Chunk, Drawn, Landed, Runner, Sampling, StepPlan
from holdfast.replicas.programs import Sequence as Running
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest, ModelCard, RawPrompt
from holdfast.replicas.service import Service, freeze_heap
from holdfast.replicas.speculation.ngrams import common_prefix
from holdfast.replicas.text.calls.formats import MARKERS, ToolFormat
from holdfast.replicas.text.conversation import Constraints, Encoded, TextSide

Made = TypeVar("Made")
FORMATS = tuple(each for each in ToolFormat if each is not ToolFormat.NONE)
VOCABULARIES = (1536, 128_000)
MODELS = ("pocket", *map(str, VOCABULARIES))
CONFIG = EngineConfig(cells=16384, threads=1)
_MAX_TOKENS = 160
_PROSE = ("", "I look that up.\n", "Well\n\n")  # before a call


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


def is_whole(name: str, arguments: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a call names one of `tools` and has arguments of its schema."""
    from jsonschema import validators  # type: ignore[import-untyped]  # a bare clone does without this benchmark

    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    try:
        value = json.loads(arguments)
    except ValueError:
        return False
    return name in schemas and bool(validators.validator_for(schemas[name])(schemas[name]).is_valid(value))


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
    result = transformers.PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
    )
    markers = [transformers.AddedToken(text, special=False) for text in sorted(MARKERS[tool_format])]
    if len(result) + len(markers) <= rows:
        result.add_tokens(markers)
    return result


def random_model(folder: Path, vocabulary: int) -> None:
    """A small Llama that was never trained, with Pocket's tokens and made-up ones up to `vocabulary`."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((WEIGHTS / name).read_bytes())
    content = json.loads((WEIGHTS / "tokenizer.json").read_text())
    rng, vocab = random.Random(vocabulary), content["model"]["vocab"]
    words = [text for text in vocab if text.isascii()]
    room = 64  # for the markers of a format
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
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


class Scripted:
    """A runner whose replies begin with the tokens of `scripts`, by request; after them the model draws.

    `live` holds the engine's sequences.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.live: Mapping[str, Running] = {}
        self.scripts: dict[str, list[int]] = {}

    def begin(self, plan: StepPlan) -> Landed:
        output = self._runner.begin(plan).land()
        rows = {each.row: each for each in self.live.values()}
        drawn = (
            None
            if each is None or chunk.draw is None
            else self._follow(rows[chunk.row], chunk, chunk.draw.drafts, each)
            for chunk, each in zip(plan.chunks, output.drawn, strict=True)
        )
        return Landed(replace(output, drawn=tuple(drawn)))

    def _follow(self, sequence: Running, chunk: Chunk, n_drafts: int, drawn: Drawn) -> Drawn:
        name, drafts = sequence.submit.request_id, chunk.tokens[len(chunk.tokens) - n_drafts :].tolist()
        at = chunk.start + len(chunk.tokens) - n_drafts - sequence.n_prompt
        script = self.scripts.get(name, [])[at : at + n_drafts + 1]
        return Drawn(tuple(script[: common_prefix(drafts, script) + 1])) if script else drawn


class Clocked:
    """`constraints.matcher.Matcher` that adds the processor seconds of `inner` to `spent`."""

    def __init__(self, inner: Matcher, seconds: list[float]) -> None:
        self._inner, self._spent = inner, seconds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return partial(clocked, self._spent, value) if callable(value) else value

    def copy(self) -> Clocked:
        return Clocked(clocked(self._spent, self._inner.copy), self._spent)


def clocked(seconds: list[float], act: Callable[..., Made], *arguments: Any) -> Made:
    """Call `act` and append its processor seconds to `spent`."""
    overhead_start = time.thread_time()  # the time of reading the clock is subtracted
    start = time.thread_time()
    result = act(*arguments)
    seconds.append(time.thread_time() - start - (start - overhead_start))
    return result


class ClockedText(TextSide):
    """`spent`: processor seconds of the grammars. `shown`: the tools that the model sees, if not the declared ones."""

    shown: Sequence[Mapping[str, Any]] | None = None
    spent: list[float]

    async def encoded(self, prompt: Any, scope: str = "", program: str = "") -> Encoded:
        visible = prompt if self.shown is None else replace(prompt, tools=self.shown)
        return await super().encoded(visible, scope, program)

    def constraints(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> Constraints:
        return clocked(self.spent, super().constraints, prompt, scope)

    def after_thinking(self, request: GenerateRequest, encoded: Encoded, matcher: Matcher | None) -> Matcher | None:
        inner = super().after_thinking(request, encoded, matcher)
        return cast(Matcher, Clocked(inner, self.spent)) if inner is not None else None


@dataclass(frozen=True, slots=True)
class Served:
    """A service over a loaded model whose calls are in one format, and its parts."""

    service: Service
    text: ClockedText
    script: Scripted

    def tokens(self, text: str) -> list[int]:
        return list(self.text.tokenizer.encode(text, add_special_tokens=False))

    async def answer(self, request: GenerateRequest) -> Answer:
        """The answer to a request. Raises RuntimeError where there is none."""
        answer = await self.service.generate(request)
        if not isinstance(answer, Answer):
            raise RuntimeError(f"{request.request_id}: {answer}")
        return answer


@asynccontextmanager
async def serving(loaded: LoadedRunner, tool_format: ToolFormat, guarantee: Guarantee) -> Any:
    """Serve until the block ends."""
    config, script = replace(loaded.config, tools_guarantee=guarantee), Scripted(loaded.runner)
    engine = Engine(config, script, loaded.eos, loaded.vocabulary, cost=loaded.cost, window=loaded.window)
    script.live = engine.live
    tokenizer = with_markers(loaded.tokenizer, tool_format, loaded.vocabulary)
    text = ClockedText(tokenizer, config, str(tool_format), loaded.eos)
    text.spent = []
    text.prepare()
    service = Service(engine, text, ModelCard("model", config.context_length, text.vocabulary))
    try:
        yield Served(service, text, script)
    finally:
        await service.close()


def _forms(tool_format: ToolFormat) -> tuple[CallForm, ...]:
    forms = forms_of(tool_format, lambda _: True)
    assert forms is not None
    return tuple(forms.all)


def _asks(text: str, tools: Sequence[Mapping[str, Any]], choice: Any = "auto") -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}], list(tools), choice)


# ---- law ----


@dataclass(slots=True)
class Law:
    """Counts of sampled turns. `undeclared`, `outside`, `markup` and `unguarded` must be 0."""

    turns: int = 0
    begun: int = 0  # turns that begin a call
    calls: int = 0
    cut: int = 0  # replies that ended by their length
    undeclared: int = 0
    outside: int = 0  # of the schema
    markup: int = 0
    unguarded: int = 0  # turns whose calls were free from some place on

    @property
    def broken(self) -> int:
        return self.undeclared + self.outside + self.markup + self.unguarded


def opens(form: CallForm, names: Iterable[str]) -> list[str]:
    """Texts that begin a call in `form` and are nothing else: its opener, or all up to the arguments."""
    return [form.opener] if form.opener else [form.until_arguments(name) for name in sorted(names)]


def shows_markup(text: str, tool_format: ToolFormat, names: Set[str], begun: bool) -> bool:
    """Whether a reply's content has parts of a call. A reply that has `begun` a call must show none."""
    start = text.strip()
    for form in _forms(tool_format):
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


async def law(loaded: LoadedRunner, tool_format: ToolFormat, turns: int, guarantee: Guarantee = "schema") -> Law:
    """Sampled turns in one format, half of them greedy."""
    rng, result = random.Random(str(tool_format)), Law(turns)
    names = {tool["function"]["name"] for tool in LAW_TOOLS}
    async with serving(loaded, tool_format, guarantee) as served:
        requests, begins = [], []
        for index in range(turns):
            form, name = rng.choice(_forms(tool_format)), f"{index}"
            text = (rng.choice(_PROSE) if form.opener else "") + rng.choice(opens(form, names))
            begins.append(text if index % 3 != 2 else "")
            served.script.scripts[name] = served.tokens(begins[-1]) if begins[-1] else []
            prompt = _asks(f"{rng.choice(TASKS).ask} ({name})", LAW_TOOLS)
            sampling = Sampling(max_tokens=_MAX_TOKENS, temperature=float(index % 2))
            requests.append(GenerateRequest(name, prompt, sampling, program_id=name))
        await asyncio.to_thread(served.text.constraints, requests[0].prompt)  # compiled before, however long that takes
        answers = await asyncio.gather(*map(served.answer, requests))
        result.unguarded = served.text.unguarded + served.service.engine.stats.unguarded
    for text, answer in zip(begins, answers, strict=True):
        result.begun += bool(text or answer.tool_calls)
        result.calls += len(answer.tool_calls)
        result.cut += answer.reason == "length"
        for call in answer.tool_calls:
            if call.name not in names:
                result.undeclared += 1
            elif call.closed or answer.reason != "length":
                result.outside += not (call.closed and is_whole(call.name, call.arguments, LAW_TOOLS))
        result.markup += shows_markup(answer.text or "", tool_format, names, bool(text))
    return result


def _laws(options: Namespace) -> Iterator[Row]:
    """A row for each model and format."""
    with TemporaryDirectory() as folder:
        for name in MODELS:
            model = name
            if name != "pocket":
                model = str(Path(folder, name))
                random_model(Path(model), int(name))
            loaded = load_runner(replace(CONFIG, model=model))
            for tool_format in options.formats:
                result = asyncio.run(law(loaded, tool_format, -(-options.turns // (len(MODELS) * len(FORMATS)))))
                counts = {f"law_{key}": value for key, value in asdict(result).items()}
                name_of = f"law, {name}, {tool_format}: broken in {result.calls} calls"
                yield figure(name_of, float(result.broken), "calls", 0.0) | counts
            del loaded


# ---- time ----


def _times(options: Namespace) -> Iterator[Row]:
    """The median share of a turn's processor time that its grammar takes, by form and number of tools."""
    # Without a cost of steps, drafts do not depend on time.
    loaded = replace(load_runner(replace(CONFIG, model=options.model)), cost=None)
    others, shares = many_tools(196, 4, 0), []
    for tool_format, more in product(options.formats, ((), others)):
        for form in _forms(tool_format):
            shares.append(asyncio.run(_share(loaded, tool_format, form, more, options.rounds)))
            yield figure(f"time, {tool_format} {form.opener or 'bare'}, {4 + len(more)} tools", shares[-1] * 100, "%")
    yield figure("time, median of all", median(shares) * 100, "%")


async def _share(
    loaded: LoadedRunner, tool_format: ToolFormat, form: CallForm, more: Sequence[Mapping[str, Any]], rounds: int
) -> float:
    """Turns whose model writes the expected call in `form`; the first two warm up. Raises RuntimeError.

    The model sees the tools of its task alone, so the prompt stays short with `more` declared tools.
    """
    shares = []
    async with serving(loaded, tool_format, "schema") as served:
        for number in range(-2, rounds):
            name, task = f"{number}", TASKS[number % len(TASKS)]
            served.text.shown, prompt = task.tools, _asks(f"{task.ask} ({number})", [*task.tools, *more])
            await asyncio.to_thread(served.text.constraints, prompt)
            ids = served.tokens(("I look that up.\n" if form.opener else "") + written(form, [task.expected]))
            served.script.scripts[name] = [*ids, min(served.text.eos)]
            served.text.spent.clear()
            began = time.process_time()
            answer = await served.answer(GenerateRequest(name, prompt, Sampling(max_tokens=256)))
            shares.append(sum(served.text.spent) / (time.process_time() - began))
            if [call.name for call in answer.tool_calls] != [task.expected[0]]:
                raise RuntimeError(f"{form}: {answer}")
        if refused := served.service.engine.stats.refused:
            raise RuntimeError(f"{form}: {refused} tokens of the expected call were refused")
    return float(median(shares[2:]))


# ---- ready ----


def many_tools(number: int, properties: int, seed: int, described: int = 20) -> list[dict[str, Any]]:
    """Tools as a server of tools declares them, all different, with so many characters said of each argument."""
    text = ("What it is about, and how it is to be given. " * (described // 40 + 1))[:described]
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
        given = {f"{rng.choice('abcdefgh')}_{i}": {**rng.choice(kinds), "description": text} for i in range(properties)}
        schema = {"type": "object", "properties": given, "required": list(given)[:2]}
        tools.append(_tool(f"tool_{seed}_{index}", schema))
    return tools


async def _ready(rounds: int = 5) -> list[Row]:
    """Milliseconds from a request with 200 new tools to the engine. Each argument is described in 160 characters."""
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        random_model(Path(folder), VOCABULARIES[1])
        loaded = load_runner(replace(CONFIG, model=folder))
    # No turn with these prompts is computed.
    loaded = replace(loaded, config=replace(loaded.config, context_length=1 << 18))
    async with serving(loaded, ToolFormat.HERMES, "schema") as served:
        freeze_heap()  # as a server does
        threads, text = CompilerThreads(), served.text
        for seed, (properties, choice) in enumerate(product((6, 10), ("required", "auto"))):
            encoding, rest_s = [], []
            for number in range(rounds):
                prompt = _asks("Go.", many_tools(200, properties, seed * rounds + number, 160), choice)
                began = time.perf_counter()
                encoded = await text.encoded(prompt)
                encoding.append((time.perf_counter() - began) * 1e3)
                limits = await threads.run(partial(text.constraints, prompt))
                text.after_thinking(GenerateRequest("", prompt, Sampling()), encoded, limits.matcher)
                rest_s.append((time.perf_counter() - began) * 1e3 - encoding[-1])
            name = f"ready, 200 tools of {properties} arguments, {choice}"
            rows.append(figure(f"{name}: tokenize {len(encoded.tokens):,} tokens", median(encoding), "ms"))
            rows.append(figure(f"{name}: until the engine has it", median(rest_s), "ms"))
            rows.append(figure(f"{name}: at most", max(rest_s), "ms"))
    return rows


PARTS: dict[str, Callable[[Namespace], Iterable[Row]]] = {
    "law": _laws,
    "time": _times,
    "ready": lambda options: asyncio.run(_ready()),
}


def calls(options: Namespace) -> Iterator[Row]:
    """The rows of the parts in `options.parts`. Raises ConfigError for an unknown part or format."""
    for name, known_names in (("parts", list(PARTS)), ("formats", list(map(str, FORMATS)))):
        if unknown := set(getattr(options, name)) - set(known_names):
            raise ConfigError(f"unknown {name}: {', '.join(sorted(unknown))}; there are {', '.join(known_names)}", name)
    options.formats = [ToolFormat(name) for name in options.formats]
    for name in options.parts:
        yield from PARTS[name](options)
