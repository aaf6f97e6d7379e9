"""A program that tries grammars with a vocabulary of bytes. A schema below 1 KB may take minutes to compile, and only
the end of a process stops that. Its owner is `compiler.Trials`.
"""

import json
import os
import sys
from contextlib import suppress

_MEMORY = 2 * 2**30  # bytes of address space


def main(limits: str, *path: str) -> None:
    """Answer each line of the input, a grammar and seconds of processor time, with a line: an error, or "" for none.

    A line of its own says before that it is ready.
    """
    import resource

    sys.path.extend(path)  # where llguidance is
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer, bounds = LLTokenizer("byte"), LLParserLimits(**json.loads(limits))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    print(flush=True)
    for line in sys.stdin:
        lark, seconds = json.loads(line)
        used = sum(os.times()[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds + 1, hard))
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=bounds)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()) + "\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
