"""Which tools a finished reply called, and whether its program's turns are over with it (Continuum, section 5.2). Pure.

With the function interface the tracker has read the calls, in whatever format the model writes them. Without it a
program runs what stands in a bash block; its commands are the tools.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCK = re.compile(r"```bash[ \t]*\n(.*?)```", re.DOTALL)
_JOINED = re.compile(r"&&|\|\|")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Called:
    """`tools`: names, in the order of the calls, none twice. `last`: the program is not expected to come back."""

    tools: tuple[str, ...] = ()
    last: bool = False


def called(names: Sequence[str], text: str, *, interface: bool, cut: bool, ends: bool) -> Called:
    """What a reply with calls of `names`, or with `text`, waits for now.

    `interface`: the request declared tools. `cut`: the reply ended for its length, or inside of a call. `ends`: the
    request said that it is the program's last. A reply that is whole and calls nothing is a final answer.
    """
    found = tuple(dict.fromkeys(names if names or interface else commands(text)))
    return Called(found, ends or not (found or cut))


def commands(text: str) -> tuple[str, ...]:
    """The first word of each part of the one bash block in `text`, parts joined by `&&` or `||`.

    None for no block, or several: then nobody knows which one is run. Variables that are set for a command are no word
    of it: their values would make a tool each.
    """
    blocks = _BLOCK.findall(text)
    if len(blocks) != 1:
        return ()
    parts = (part.split() for part in _JOINED.split(blocks[0]))
    firsts = (next((word for word in words if not _ASSIGNMENT.match(word)), "") for words in parts)
    return tuple(first for first in firsts if first)
