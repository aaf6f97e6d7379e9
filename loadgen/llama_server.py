"""llama.cpp's own server out of the wheel `xllamacpp`, which has it as a class and brings no command for it.

``python llama_server.py --model FILE.gguf --port 8101``, run by the Python that has the wheel: nothing of Holdfast is
imported here. `serve-peer llama.cpp` prints the line, with the settings of `peers.llama_cpp`.
"""

import argparse
import os
import signal
import sys
from typing import Any

# Of five kinds of n-grams in 30 settings, on 24 turns of `bugfix` and `webapp`: 2.18 tokens a forward. That is 0.56 of
# the cost of no drafts where a drafted row adds a tenth of a forward, the least of all; 0.86 where it adds 0.38, where
# the best has 0.85.
NGRAM_TOKENS = 2  # at the end of a text that must occur earlier in it, or in another request's text
DRAFTED = 3  # at most, tokens that followed there, verified in one step

SPARE_MIB = 1024  # of memory for prompts that lost their slot; its own default is 8 GiB


def parameters(wheel: Any, options: argparse.Namespace) -> Any:
    """`CommonParams` of the wheel: every core, and a KV cache for each slot that is as long as the context."""
    params = wheel.CommonParams()
    params.model.path, params.model_alias, params.port = options.model, {options.alias}, options.port
    params.n_parallel, params.n_ctx = options.slots, options.context * options.slots
    params.kv_unified = False  # a slot's attention reads its own cells only
    params.fit_params = False  # else it may choose a shorter context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.flash_attn_type = wheel.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.n_gpu_layers = -1 if options.gpu else 0
    params.cache_prompt = params.cont_batching = True
    params.cache_ram_mib = SPARE_MIB
    params.ui, params.verbosity = False, 1
    if options.ngram:
        params.speculative.types = [wheel.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_MOD]
        drafts = params.speculative.ngram_mod
        drafts.n_match, drafts.n_min, drafts.n_max = NGRAM_TOKENS, 1, DRAFTED
    return params


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    result = argparse.ArgumentParser(prog="llama_server", description=__doc__)
    result.add_argument("--model", required=True, help="a GGUF file")
    result.add_argument("--alias", default="m", help="the model's name over HTTP")
    result.add_argument("--port", type=int, default=8101)
    result.add_argument("--context", type=int, default=8192, help="tokens of each slot")
    result.add_argument("--slots", type=int, default=8, help="requests at once")
    result.add_argument("--ngram", action="store_true", help="with drafts from the text itself")
    result.add_argument("--gpu", action="store_true")
    return result


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    options = parser().parse_args()
    import xllamacpp

    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # also in the server's threads, which are started from here
    server = xllamacpp.Server(parameters(xllamacpp, options))
    print(f"llama.cpp serves {options.model} on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
