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
NGRAM_TOKENS = 2  # at the end of a text that have to have stood in it, or in another request's, before
DRAFTED = 3  # tokens that followed there, at most, and are verified in one step

SPARE_MIB = 1024  # of memory for prompts that lost their slot: it would take 8 GiB


def parameters(wheel: Any, options: argparse.Namespace) -> Any:
    """`CommonParams` of the wheel: every core, and a KV cache for each slot that is as long as the context."""
    found = wheel.CommonParams()
    found.model.path, found.model_alias, found.port = options.model, {options.alias}, options.port
    found.n_parallel, found.n_ctx = options.slots, options.context * options.slots
    found.kv_unified = False  # a slot's attention then reads its own cells only
    found.fit_params = False  # or it takes a shorter context than it is told
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    found.flash_attn_type = wheel.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    found.n_gpu_layers = -1 if options.gpu else 0
    found.cache_prompt = found.cont_batching = True
    found.cache_ram_mib = SPARE_MIB
    found.ui, found.verbosity = False, 1
    if options.ngram:
        found.speculative.types = [wheel.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_MOD]
        drafts = found.speculative.ngram_mod
        drafts.n_match, drafts.n_min, drafts.n_max = NGRAM_TOKENS, 1, DRAFTED
    return found


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(prog="llama_server", description=__doc__)
    found.add_argument("--model", required=True, help="a GGUF file")
    found.add_argument("--alias", default="m", help="the model's name over HTTP")
    found.add_argument("--port", type=int, default=8101)
    found.add_argument("--context", type=int, default=8192, help="tokens of each slot")
    found.add_argument("--slots", type=int, default=8, help="requests at once")
    found.add_argument("--ngram", action="store_true", help="with drafts from the text itself")
    found.add_argument("--gpu", action="store_true")
    return found


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    options = parser().parse_args()
    import xllamacpp

    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # also in the server's threads, which are started from here
    server = xllamacpp.Server(parameters(xllamacpp, options))
    print(f"llama.cpp serves {options.model} on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
