"""Commands that stand in pages of the documentation, block by block."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MARK = 'title="needs a cluster"'
AGENTS = ("Orchestrator", "OpenAI", "ChatOpenAI")  # what each example of `docs/agents.md` imports
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code; `cluster`: it is marked as needing one."""

    language: str
    text: str
    cluster: bool

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block: lines, with those that a quote, a here-document or a backslash goes on to."""
        found: list[str] = []
        open_until = ""
        for line in self.text.splitlines():
            if found and (open_until or _open(found[-1])):
                found[-1] += f"\n{line}"
                if line == open_until:
                    open_until = ""
                continue
            if line.strip() and not line.startswith("#"):
                found.append(line)
                heredoc = re.search(r"<<\s*'?(\w+)'?", line)
                open_until = heredoc.group(1) if heredoc else ""
        return found


def blocks(page: str) -> list[Block]:
    """The blocks of `docs/page`."""
    text = (ROOT / "docs" / page).read_text()
    return [Block(language, body, MARK in rest) for language, rest, body in _BLOCK.findall(text)]


def _open(command: str) -> bool:
    return command.endswith("\\") or command.replace("\\'", "").count("'") % 2 == 1


def agent(name: str, address: str) -> str:
    """The example of `docs/agents.md` that imports `name`, for the server at `address`."""
    (found,) = (block.text for block in blocks("agents.md") if f"import {name}\n" in block.text)
    assert "http://127.0.0.1:8000" in found
    return found.replace("http://127.0.0.1:8000", address)
