"""The law: greedy tokens through pages, chunks and mixed batches are transformers' own, in every family."""

import functools

import numpy as np
import pytest
import torch
from tiny_decoder import ROOM, replayed

from holdfast.kernels import native
from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.replicas.kv.pages import PageCopy
from holdfast.replicas.model import any_model
from holdfast.replicas.model.decoder import PageTable, build_batch
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt_neox", "gpt2"]
COUNT = 12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 1000), (16, 16), (1, 16), (1, 1), (16, 1)])
def test_chunked_prefill_and_decode_give_the_reference_tokens(tiny, family, page_size, chunk):
    prompt = tiny.prompt(37)
    expected = tiny.reference(family, prompt, COUNT)
    assert tiny.Loop(family, page_size).generate(prompt, COUNT, chunk=chunk) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_of_every_position_are_the_plain_models(tiny, family, page_size):
    tokens = np.array(tiny.prompt(60), dtype=np.int32)
    loop = tiny.Loop(family, page_size)
    table = PageTable(1, 512 // page_size, page_size, loop.kv.pages)
    table.write(RowWrite(0, 0, np.array(loop.free[: -(-60 // page_size)], dtype=np.int32)))
    parts = []
    for start, end in ((0, 21), (21, 22), (22, 25), (25, 45), (45, 60)):
        chunk = Chunk(0, start, tokens[start:end], Draw(Sampling(), 0, drafts=end - start - 1))
        parts.append(loop.model.forward(build_batch((chunk,), table)))
    model = tiny.model(family)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0]
    assert torch.allclose(torch.cat(parts), plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2"])
def test_on_a_gpu_its_attention_is_the_kernel_that_our_decoder_has(tiny, family, monkeypatch):
    def by_the_kernel(q, kv, layer, batch, scale, window=None, softcap=None, sinks=None):
        return attend_gpu(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)

    prompt = tiny.prompt(30)
    loop = tiny.Loop(family)
    monkeypatch.setattr(any_model, "paged_attention", by_the_kernel)
    loop.runner = GpuRunner(loop.model, loop.kv, 4, 512)
    assert loop.generate(prompt, 5) == tiny.reference(family, prompt, 5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_steps_of_it_run_in_graphs_once_its_layers_have_said_what_they_ask_for(tiny, family, monkeypatch):
    def by_the_kernel(q, kv, layer, batch, scale, window=None, softcap=None, sinks=None):
        return attend_gpu(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)

    prompt = tiny.prompt(30)
    loop = tiny.Loop(family, scratch=True)
    monkeypatch.setattr(any_model, "paged_attention", by_the_kernel)
    loop.runner = GpuRunner(loop.model, loop.kv, 4, 512)
    assert loop.model.attention == ()
    assert not loop.runner.capture(replayed, ROOM, print)
    chunk = Chunk(0, 0, np.array([1, 2], np.int32))
    loop.runner.begin(StepPlan((chunk,), (RowWrite(0, 0, np.array([5], np.int32)),))).land()
    assert loop.model.attention[0].windows == {"llama": (0,)}.get(family, (0, 20))
    assert loop.runner.capture(replayed, ROOM, print)
    assert loop.generate(prompt, 5) == tiny.reference(family, prompt, 5)
    assert loop.runner.replayed == 4


def test_what_would_change_the_attention_and_is_not_known_is_refused(tiny):
    state = any_model.PagedState(tiny.Loop("llama").kv, None, set())
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="Module asks for position_bias, which is not known here"):
        any_model.paged_attention_forward(
            torch.nn.Module(), x, x, x, None, dropout=0.0, position_bias=x, paged_state=state
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_change_nothing(tiny, family):
    lengths, chunks = (5, 40, 23, 1, 31, 64, 2, 17), (1000, 7, 16, 1, 1000, 20, 1, 3)
    prompts = [tiny.prompt(n, seed) for seed, n in enumerate(lengths)]
    loop = tiny.Loop(family)
    streams = [loop.stream(p, chunk=c) for p, c in zip(prompts, chunks, strict=True)]
    # One more joins at every step, so prefills and decodes of all ages meet.
    for step in range(60):
        active = [s for s, p in zip(streams, prompts, strict=True) if len(s.tokens) < len(p) + COUNT]
        if not active:
            break
        loop.step([s for s in active if s.row <= step])
    for stream, prompt in zip(streams, prompts, strict=True):
        assert tuple(stream.tokens[len(prompt) :]) == tiny.reference(family, prompt, COUNT)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("shared", [32, 41])
def test_an_aliased_prefix_with_a_page_copy_gives_the_reference_tokens(tiny, family, shared):
    donor_prompt = tiny.prompt(50)
    prompt = donor_prompt[:shared] + tiny.prompt(9, seed=3)
    loop = tiny.Loop(family)
    donor = loop.stream(donor_prompt)
    loop.step([donor])
    whole, rest = divmod(shared, loop.page_size)
    heir = loop.stream(prompt, computed=shared, pages=donor.pages[:whole])
    copies = ()
    if rest:
        heir.pages.append(loop.free.pop(0))
        copies = (PageCopy(donor.pages[whole], heir.pages[-1], rest),)
    pages = np.array(heir.pages, dtype=np.int32)
    step = loop.write

    def write_all(stream, end):
        return (RowWrite(heir.row, 0, pages), *step(stream, end)) if stream is heir else step(stream, end)

    loop.write = write_all
    loop.step([donor, heir], copies=copies)
    loop.write = step
    for _ in range(COUNT - 1):
        loop.step([heir, donor])
    assert tuple(heir.tokens[len(prompt) :]) == tiny.reference(family, prompt, COUNT)
    assert tuple(donor.tokens[50:]) == tiny.reference(family, donor_prompt, COUNT + 1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_right_and_wrong_drafts_give_the_same_tokens(tiny, family, shuffle):
    prompt = tiny.prompt(30)
    expected = list(tiny.reference(family, prompt, 40))
    rng = np.random.default_rng(1)
    loop = tiny.Loop(family, shuffle=shuffle)
    stream, plain = loop.stream(prompt), loop.stream(tiny.prompt(11, seed=5))
    loop.step([stream, plain])
    while (done := len(stream.tokens) - len(prompt)) < 30:
        drafts = expected[done : done + int(rng.integers(0, 7))]
        right = int(rng.integers(0, len(drafts) + 1))
        wrong = [(token + 1) % tiny.vocabulary for token in drafts[right:]]
        loop.step([plain, stream], {stream.row: (*drafts[:right], *wrong)})
        assert len(stream.drawn[-1].tokens) == right + 1
    made = stream.tokens[len(prompt) :]
    assert made == expected[: len(made)]
    assert (
        tuple(plain.tokens[11:31]) == tiny.reference(family, tiny.prompt(11, seed=5), 40)[: len(plain.tokens) - 11][:20]
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_without_our_kernels_scattered_pages_give_the_reference_tokens(tiny, family, monkeypatch):
    monkeypatch.setattr(native, "level", functools.cache(lambda: "torch"))
    prompts = [tiny.prompt(70), tiny.prompt(45, seed=1)]
    loop = tiny.Loop(family, cells=256)
    streams = [loop.stream(prompt, chunk=29) for prompt in prompts]
    while len(streams[0].tokens) < 70 + COUNT:
        loop.step(streams)
    for stream, prompt in zip(streams, prompts, strict=True):
        assert tuple(stream.tokens[len(prompt) :][:COUNT]) == tiny.reference(family, prompt, COUNT)
