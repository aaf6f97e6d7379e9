"""Third-party clients at pinned versions in a folder of their own. `make clients` installs them; they run offline.

    python tools/real_clients.py FOLDER [NAME,NAME ...]     installs all clients, or the named ones

Each client runs in a fresh home, with telemetry and updates off. Its proxy address has no listener, so it reaches this
machine alone.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from doc_commands import blocks

DEAD = "http://127.0.0.1:9"
PATIENCE_S = 240.0
WEIGHTS = Path(__file__).resolve().parents[1] / "replicas" / "pocket" / "weights"


@dataclass(frozen=True)
class Client:
    """A client. Its `packages` come from npm if `npm`, else from PyPI, and go to an environment called `home`."""

    name: str
    packages: tuple[str, ...]
    home: str
    npm: bool = False

    @property
    def version(self) -> str:
        """Version of the first package."""
        return self.packages[0].rpartition("@" if self.npm else "==")[2]


CLIENTS = {
    each.name: each
    for each in (
        Client("Claude Code", ("@anthropic-ai/claude-code@2.1.328",), "npm", npm=True),
        Client("Codex CLI", ("@openai/codex@0.169.0",), "npm", npm=True),
        Client("OpenCode", ("opencode-ai@1.18.33",), "npm", npm=True),
        Client("LiteLLM", ("litellm==1.106.2", "openai==2.54.0"), "sdk"),
        Client("OpenAI Agents SDK", ("openai-agents==0.20.0", "openai==2.54.0"), "sdk"),
        Client("guidellm", ("guidellm==0.8.1",), "guidellm"),
        Client("aiperf", ("aiperf==0.13.0",), "aiperf"),
    )
}

DEVELOPMENT = ("openai", "anthropic", "LangGraph")  # clients in the environment of the tests


def folder() -> Path | None:
    """The folder of the installed clients; None if HOLDFAST_CLIENTS is not set."""
    path = os.environ.get("HOLDFAST_CLIENTS")
    return Path(path).resolve() if path else None


def program(client: str, name: str) -> Path | None:
    """The executable `name` of a client; None if the client is not installed."""
    home = folder()
    if home is None:
        return None
    entry = CLIENTS[client]
    path = home / entry.home / ("node_modules/.bin" if entry.npm else "bin") / name
    return path if path.exists() else None


def run(
    command: Sequence[str | Path], home: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a client to its end. Its home is `home`, and it reaches only loopback."""
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "HTTP_PROXY": DEAD,
        "HTTPS_PROXY": DEAD,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        **(env or {}),
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd or home,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def documented(language: str, address: str) -> str:
    """The block of docs/clients.md in `language`, with a server's address in it."""
    [text] = [block.text for block in blocks("clients.md") if block.language == language]
    return text.replace("http://127.0.0.1:8000", address)


def claude(program: Path, address: str, home: Path, work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Claude Code once; it uses `/v1/messages`."""
    words = shlex.split(documented("sh", address))
    position = words.index("claude")
    env = {
        **dict(word.split("=", 1) for word in words[:position]),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }
    common = ("-p", *arguments, *words[position + 1 :], "--allowedTools", "Read", "--output-format", "json")
    return run((program, *common), home, env, work)


def codex(program: Path, address: str, home: Path, work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Codex CLI once; it uses `/v1/responses`."""
    quiet = "check_for_update_on_startup = false\nanalytics.enabled = false\n"
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(quiet + documented("toml", address))
    common = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json")
    return run((program, *common, *arguments), home, {}, work)


def opencode(program: Path, address: str, home: Path, work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run OpenCode once; it uses `/v1/chat/completions`."""
    settings = {"autoupdate": False, "share": "disabled", **json.loads(documented("json", address))}
    (work / "opencode.json").write_text(json.dumps(settings))
    env = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    return run((program, "run", "--format", "json", *arguments), home, env, work)


def install(folder: Path, names: Sequence[str]) -> None:
    """Install the missing clients at their pinned versions. Raises KeyError for an unknown name."""
    packages_by_home: dict[tuple[str, bool], list[str]] = {}
    for name in names or tuple(CLIENTS):
        if name in DEVELOPMENT:
            continue
        client = CLIENTS[name]
        packages_by_home.setdefault((client.home, client.npm), []).extend(client.packages)
    for (home, npm), packages in packages_by_home.items():
        path, stamp = folder / home, folder / home / ".installed"
        content = "\n".join(sorted(set(packages)))
        if stamp.exists() and stamp.read_text() == content:
            continue
        print("installing", *sorted(set(packages)), flush=True)
        path.mkdir(parents=True, exist_ok=True)
        if npm:
            # Some packages have a script that installs their program.
            subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(path), *packages],
                check=True,
            )
        else:
            venv.create(path, with_pip=True)
            pip = [str(path / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *packages], check=True)
        stamp.write_text(content)


if __name__ == "__main__":
    install(Path(sys.argv[1]), [name.strip() for name in " ".join(sys.argv[2:]).split(",") if name.strip()])
