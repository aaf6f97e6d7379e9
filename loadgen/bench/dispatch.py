"""What a layer costs besides its sums on a CPU: ``python -m holdfast.loadgen.bench.dispatch``.

A random Llama so narrow that products take next to nothing, once with few layers and once with many: the difference,
over the layers, is what Python, torch and the calls of our kernels take for one of them; what is left is the runner's.
By the thread's own CPU time, on one thread, the least of many forwards, so that other work on the machine adds little.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
import transformers

from holdfast.loadgen.bench.forwards import StepShape, step_plan
from holdfast.replicas.kv.tensors import CellShape, KVTensors
from holdfast.replicas.model.decoder import Decoder, decoder_shape
from holdfast.replicas.model.runner import ModelRunner

_LAYERS = (4, 24)
_PAGES, _PAGE, _CACHED, _CONTEXT = 32, 16, 100, 512
_WARM = 20


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Milliseconds of a forward of `rows` tokens of one sequence: of a layer, and of all that is no layer."""

    rows: int
    layer: float
    rest: float


def measure(rows: Sequence[int], repeat: int) -> list[Dispatch]:
    """One for each number of rows. Leaves torch with one thread."""
    torch.set_num_threads(1)
    taken = [_forwards(layers, rows, repeat) for layers in _LAYERS]
    found = []
    for n, few, many in zip(rows, *taken, strict=True):
        layer = (many - few) / (_LAYERS[1] - _LAYERS[0])
        found.append(Dispatch(n, layer, few - _LAYERS[0] * layer))
    return found


def _forwards(layers: int, rows: Sequence[int], repeat: int) -> list[float]:
    """The least milliseconds of a forward with so many layers, for each number of rows."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
    )
    shape = decoder_shape(config)
    assert shape is not None  # it is a Llama
    kv = KVTensors(CellShape(shape.layers, shape.kv_heads, shape.head_dim), _PAGES, _PAGE, torch.bfloat16, scratch=True)
    with TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        model = Decoder.load(folder, config, kv, _CONTEXT, None)
    assert model is not None
    runner = ModelRunner(model, kv, 8, _CONTEXT)
    least = []
    for n in rows:
        plan = step_plan(StepShape("", 1, n, _CACHED), _PAGE, _PAGES, scattered=False)
        times = []
        for _ in range(_WARM + repeat):
            began = time.thread_time()
            runner.run(plan)
            times.append(time.thread_time() - began)
        least.append(min(times[_WARM:]) * 1e3)
    return least


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench dispatch", description="What a layer costs besides its sums.")
    parser.add_argument("--rows", default="1,8", help="tokens of a forward, comma separated")
    parser.add_argument("--repeat", type=int, default=150)
    options = parser.parse_args(argv)
    print(f"{'rows':>5} {'ms a layer':>11} {'ms besides':>11}")
    for each in measure([int(n) for n in options.rows.split(",")], options.repeat):
        print(f"{each.rows:5} {each.layer:11.3f} {each.rest:11.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
