"""Compiles the Triton kernels for a GPU that need not be there, and prints what each program takes, as JSON.

A process of its own: Triton decides at its first import whether it compiles or interprets.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdfast.kernels import attention_gpu, mlp, norm, rope_gpu, sampling_gpu

HALF = "*bf16"
ATTENTION = {
    **dict.fromkeys(("q", "keys", "values"), HALF),
    **dict.fromkeys(("page_table", "positions", "order", "items", "count"), "*i32"),
    "out": HALF,
    **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    "window": "i32",
    **dict.fromkeys(
        ("q_token", "q_head", "cell_stride", "head_stride", "table_stride", "out_token", "out_head"), "i32"
    ),
}
MERGE = {
    "merges": "*i32",
    "partial": "*fp32",
    "partial_lse": "*fp32",
    "out": HALF,
    "out_token": "i32",
    "out_head": "i32",
}
ROPE = {
    "qkv": HALF,
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("positions", "cells"), "*i64"),
    **dict.fromkeys(("keys", "values", "q_weight", "k_weight"), HALF),
    "eps": "fp32",
    **dict.fromkeys(("token_stride", "table_stride", "cell_stride", "head_stride"), "i32"),
}
NORM = {**dict.fromkeys(("x", "residual", "weight", "out"), HALF), "eps": "fp32", "row_stride": "i32"}
MLP = {"gate_up": HALF, "out": HALF, "row_stride": "i32"}
BEST = {
    "logits": HALF,
    "temperatures": "*fp32",
    "keys": "*i32",
    "cutoff": "*fp32",
    "best": "*fp32",
    "best_token": "*i32",
    "row_stride": "i32",
}
VERIFY = {"best": "*fp32", **dict.fromkeys(("best_token", "first_rows", "drafts", "drawn", "accepted"), "*i32")}
CUTOFF = {"scaled": "*fp32", "top_k": "*i32", **dict.fromkeys(("top_p", "min_p", "cutoff"), "*fp32")}


def attention(rows, page, keys, warps, **other):
    sizes = {"DIM": 128, "DIM_TILE": 128, "GROUP": 4, "PAGE": page, "ROWS": rows, "KEYS": keys}
    flags = dict.fromkeys(("SOFTCAP", "WINDOW", "EXACT", "WIDEN", "LOOP"), False) | {"LOG2E": 1.4426950408889634}
    return attention_gpu._attend_items, ATTENTION, sizes | flags | other, {"num_warps": warps, "num_stages": 3}


PROGRAMS = {
    "attention, decode": attention(16, 16, 64, 4),
    "attention, decode, pages of 1": attention(16, 1, 64, 4),
    "attention, verification": attention(64, 16, 64, 4),
    "attention, decode in a graph": attention(16, 16, 64, 4, LOOP=True),
    "attention, chunk": attention(128, 16, 64, 8),
    "attention, chunk, window and softcap": attention(128, 16, 64, 8, SOFTCAP=True, WINDOW=True),
    "merge": (attention_gpu._merge_parts, MERGE, {"DIM": 128, "DIM_TILE": 128, "HEADS": 32}, {"num_warps": 1}),
    "rotate and store": (
        rope_gpu._rotate_and_store,
        ROPE,
        {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_TILE": 64, "HEADS_TILE": 8, "NORM": True},
        {"num_warps": 4},
    ),
    "norm": (norm._add_norm, NORM, {"WIDTH": 4096, "TILE": 4096, "ADD": True}, {"num_warps": 8}),
    "silu": (mlp._silu_and_mul, MLP, {"INNER": 14336, "TILE": 1024}, {"num_warps": 4}),
    "draw": (
        sampling_gpu._best_of_part,
        BEST,
        {"VOCABULARY": 128256, "PARTS": 32, "TILE": 4096, "FILTER": True, "SAMPLE": True},
        {"num_warps": 4},
    ),
    "verify": (sampling_gpu._verify, VERIFY, {"VOCABULARY": 128256, "PARTS": 32, "PARTS_TILE": 32}, {"num_warps": 1}),
    "cutoff": (sampling_gpu._find_cutoff, CUTOFF, {"VOCABULARY": 128256, "TILE": 4096}, {"num_warps": 8}),
}


def compiled(kernel, types, constants, options, capability):
    """What a program takes. Pointers and strides are multiples of 16, as they are on a device."""
    aligned = [name for name in types if types[name].startswith("*") or name.endswith(("_token", "_head", "stride"))]
    attributes = {(list(types).index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assembly = program.asm["ptx"]
    return {
        "shared_bytes": program.metadata.shared,
        "tensor_cores": "wgmma" in assembly or "mma.sync" in assembly,
        "copies_ahead": "cp.async" in assembly,
    }


if __name__ == "__main__":
    print(json.dumps({name: compiled(*program, int(sys.argv[1])) for name, program in PROGRAMS.items()}))
