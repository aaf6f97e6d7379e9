"""What a layer costs besides its sums on a CPU: ``python -m holdfast.loadgen.bench.dispatch``.

A random Llama is so narrow that its products take almost no time. It is timed with few and with many layers. The
difference is what Python, torch and the calls of our kernels take for a layer; the rest is the runner's. Times are CPU
time of one thread, the least of many forwards.

``--shape llama-3.1-8b`` computes instead how well threads share the work: for each number of threads, the share of
their time that has work if they take the kernels' tasks in turn. Tasks of products are blocks of outputs, those of
attention the spans of `attention.cut`. Synchronisation and shared memory bandwidth are left out.
"""

import heapq
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from holdfast.kernels import attention, linear
from holdfast.kernels.kv import PagedBatch
from holdfast.loadgen.bench.attention_cpu import CASES, Case
from holdfast.loadgen.bench.forwards import StepShape, step_plan
from holdfast.loadgen.bench.harness import Row, parser, report, save_random_llama
from holdfast.loadgen.inflate.shapes import Shape, resolve_shape
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.runner import ModelRunner

_LAYERS = (4, 24)
_PAGES, _PAGE, _CACHED, _CONTEXT = 32, 16, 100, 512
_WARM = 20


def measure(rows: Sequence[int], repeat: int) -> Iterator[Row]:
    """Milliseconds of a forward of one sequence for each number of rows: of a layer, and of everything else.

    Leaves torch with one thread.
    """
    torch.set_num_threads(1)
    few, many = (_forwards(layers, rows, repeat) for layers in _LAYERS)
    for n, short, long in zip(rows, few, many, strict=True):
        layer = (long - short) / (_LAYERS[1] - _LAYERS[0])
        yield {"rows": n, "layer_ms": layer, "rest_ms": short - _LAYERS[0] * layer}


def _forwards(layers: int, rows: Sequence[int], repeat: int) -> list[float]:
    """The least milliseconds of a forward with so many layers, for each number of rows."""
    with TemporaryDirectory() as folder:
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
        path = Path(folder)
        config = save_random_llama(path, torch.bfloat16, **sizes, **heads, max_position_embeddings=_CONTEXT)
        shape = describe(config)
        assert shape is not None  # it is a Llama
        kv = KVTensors(shape.cell, _PAGES, _PAGE, torch.bfloat16, scratch=True)
        model = Decoder.load(folder, config, kv, _CONTEXT, None)
    assert model is not None
    runner = ModelRunner(model, kv, 8, _CONTEXT)
    least = []
    for n in rows:
        plan = step_plan(StepShape("", 1, n, _CACHED), _PAGE, _PAGES, scattered=False)
        times = []
        for _ in range(_WARM + repeat):
            began = time.thread_time()
            runner.begin(plan).land()
            times.append(time.thread_time() - began)
        least.append(min(times[_WARM:]) * 1e3)
    return least


def shared(tasks: Sequence[float], threads: int) -> float:
    """What share of the threads' time has work in it, if each draws the next of the tasks when it has done one."""
    ends = [0.0] * threads
    for task in tasks:
        heapq.heapreplace(ends, ends[0] + task)
    return sum(tasks) / threads / max(ends)


def product_tasks(outputs: int, inner: int) -> list[float]:
    """Of a product with a few rows by AVX512, in weights: see product_c.c."""
    block = next(variant.block for variant in linear.VARIANTS if variant.lanes == 16)
    return [float(block * inner)] * -(-outputs // block)


def attention_tasks(shape: Shape, case: Case, threads: int) -> list[float]:
    """In positions times rows, in the order in which they are drawn: see attention_c.c."""
    some = range(case.sequences)
    lengths, starts = [case.tokens for _ in some], [case.cached for _ in some]
    batch = PagedBatch(_PAGE, torch.empty(0), some, starts, lengths, torch.empty(0), ())
    spans, _ = attention.cut(batch, shape.group, shape.kv_heads, 0, threads)
    tasks = []
    for span in spans.tolist():
        low, high, rows = span[attention.LOW], span[attention.HIGH], span[attention.COUNT] * shape.group
        edges = [*range(low, high, attention.PART), high] if span[attention.SLOT] >= 0 else [low, high]
        for begin, end in pairwise(edges):
            tasks += [float((end - begin) * (attention._READING + rows))] * shape.kv_heads
    return tasks


def _print_shared(shape: Shape, threads: Sequence[int]) -> None:
    print(f"{'threads':24}" + "".join(f"{n:7}" for n in threads))
    width = shape.heads * shape.head_dim
    products = {
        "queries, keys, values": (width * (1 + shape.hybrid) + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        "attention's output": (shape.hidden, width),
        "gate and up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    if shape.linear is not None:
        values = shape.linear.value_heads * shape.linear.value_dim
        products["into linear attention"] = (shape.linear.channels + values, shape.hidden)
        products["out of linear attention"] = (shape.hidden, values)
    for name, size in products.items():
        print(f"{name:24}" + "".join(f"{shared(product_tasks(*size), n):7.2f}" for n in threads))
    for case in CASES:
        shares = (shared(attention_tasks(shape, case, n), n) for n in threads)
        print(f"{case.name:24}" + "".join(f"{share:7.2f}" for share in shares))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    command = parser("dispatch", "What a layer costs besides its sums.")
    command.add_argument("--rows", default="1,8", help="tokens of a forward, comma separated")
    command.add_argument("--repeat", type=int, default=150)
    command.add_argument("--shape", help="a name that `inflate` knows, or a config.json: how its work can be shared")
    command.add_argument("--threads", default="2,4,8,16,32,64", help="with a shape")
    options = command.parse_args(argv)
    if options.shape:
        _print_shared(resolve_shape(options.shape, context=_CONTEXT), [int(n) for n in options.threads.split(",")])
        return 0
    rows = measure([int(n) for n in options.rows.split(",")], options.repeat)
    report(rows, {"rows": ">5", "layer_ms": ">9.3f", "rest_ms": ">9.3f"}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
