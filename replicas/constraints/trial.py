"""Whether the library takes a grammar, found out in a process that can be ended: a schema below 1 KB may take minutes.

Run as a program it tries one grammar after another, with a vocabulary of bytes. Ending it is all that its owner needs.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

TOO_LONG = "it takes too long to compile"
_WAITS = 3  # times the processor time that a grammar is allowed, on a machine that has other work
_SLOW_S = 1.0  # a grammar that takes longer goes on at a lower priority
_NICE = 5
_IDLE = 2  # processes that are kept
_MEMORY = 2 * 2**30  # bytes of address space


class Trials:
    """Processes that try grammars, each one at a time. Any thread may ask, and none waits for another."""

    def __init__(self, limits: Mapping[str, int | bool]) -> None:
        self._limits = json.dumps(limits)
        self._idle: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def complaint(self, lark: str, seconds: int) -> str:
        """Why the library does not take `lark`, in its words, or `TOO_LONG` after `seconds` of processor time; ""
        where it takes it.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._begun()
        try:
            found = _asked(process, json.dumps([lark, seconds]), seconds)
        except BaseException:
            _end(process)
            raise
        with self._lock:
            keep = found is not None and len(self._idle) < _IDLE and not _slowed(process)
            if keep:
                self._idle.append(process)
        if not keep:
            _end(process)
        return TOO_LONG if found is None else found

    def close(self) -> None:
        """End the processes that wait. Another one begins with the next grammar."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _begun(self) -> "subprocess.Popen[str]":
        import llguidance

        packages = os.path.dirname(os.path.dirname(llguidance.__file__))
        command = [sys.executable, "-I", __file__, packages, self._limits]
        pipe = subprocess.PIPE
        # A session of its own: an interrupt from the terminal is its owner's to handle, whose end it sees.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _asked(process: "subprocess.Popen[str]", line: str, seconds: int) -> str | None:
    """The answer of a process to `line`; None where it has none in time, or has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    if not process.stdout.readline():
        return None  # it says when it is ready
    with suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
    waits = select.poll()
    waits.register(process.stdout, select.POLLIN | select.POLLHUP)
    if not waits.poll(_SLOW_S * 1000):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        if not waits.poll((seconds * _WAITS - _SLOW_S) * 1000):
            return None
    answer = process.stdout.readline()
    return str(json.loads(answer)) if answer else None


def _slowed(process: "subprocess.Popen[str]") -> bool:
    try:
        return os.getpriority(os.PRIO_PROCESS, process.pid) == _NICE
    except OSError:
        return True


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def main(packages: str, limits: str) -> None:
    """Answer each line of the input, a grammar and seconds, with a line: an error, or "" for none."""
    import resource

    sys.path.append(packages)
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer, bounds = LLTokenizer("byte"), LLParserLimits(**json.loads(limits))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while True:
        print(flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        lark, seconds = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard))
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=bounds)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
