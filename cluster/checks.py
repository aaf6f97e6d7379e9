"""What can be known to fail before anything is started: each check is cheap and raises ConfigError naming the field."""

from hashlib import sha256
from pathlib import Path

from holdfast.cluster import model_files, ports, redis
from holdfast.cluster.config import Settings, check_tenants
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model import folder as models
from holdfast.replicas.retention.policy import retention_policy
from holdfast.replicas.scheduling.queue import request_order
from holdfast.replicas.text.calls.formats import hermes_may_be_told

ANSWERING = (
    "dtype",
    "device",
    "decoder",
    "context_length",
    "prompt_seed",
    "early_stop",
    "tool_format",
    "tools_guarantee",
)
"""The engine's settings that decide what an answer says; the others decide when it comes and what it costs."""
MOST_READ = 2**23  # bytes of a file's beginning, and of its end: templates and tokenizers whole, weights in samples


def check(settings: Settings) -> None:
    """Everything below, the quickest first."""
    check_tenants(settings)
    template(settings.engine)
    policies(settings.engine)
    listening(settings)
    if settings.redis.url:
        redis.ping(settings.redis.url, settings.redis.timeout_s, settings.redis.ca_file)


def policies(engine: EngineConfig) -> None:
    """Whether the classes that the configuration names as policies can be made here, as each replica makes its own."""
    try:
        request_order(engine.order)
        retention_policy(engine.retention.policy)
    except ConfigError as error:
        raise ConfigError(f"engine.{error.message}", f"engine.{error.field}") from error


def listening(settings: Settings) -> None:
    """Whether the ports of the configuration can be listened on."""
    ports.check(settings.server.host, settings.server.port)
    if settings.server.ray_metrics_port:
        ports.check("0.0.0.0", settings.server.ray_metrics_port, "server.ray_metrics_port")


def model_folder(model: str) -> Path:
    """Where `model` lies; see `replicas.model.folder`."""
    try:
        return models.model_folder(model)
    except ConfigError as error:
        raise ConfigError(error.message, "engine.model") from error


def template(engine: EngineConfig) -> str:
    """The text of the chat template that is served with; "" where there is none. Raises ConfigError."""
    if not engine.chat_template:
        return model_files.template(model_folder(engine.model))
    try:
        return models.read_chat_template(engine.chat_template)
    except ConfigError as error:
        raise ConfigError(error.message, "engine.chat_template") from error


def tools_as_text(engine: EngineConfig) -> bool:
    """Whether the chat template takes no tools, so that they are told in the system prompt: it does not name them.

    An engine renders the template to see. Raises ConfigError.
    """
    text = template(engine)
    return bool(text) and "tools" not in text and hermes_may_be_told(text, engine.tool_format)


def settings_digest(engine: EngineConfig, version: str) -> str:
    """A digest of the settings in ANSWERING and the `version` of Holdfast."""
    return sha256(repr([version, *(getattr(engine, name) for name in ANSWERING)]).encode()).hexdigest()


def fingerprint(folder: Path, engine: EngineConfig, version: str) -> str:
    """A digest that changes with what answers requests: the files in `folder`, a chat template's and `settings_digest`.

    Copies of a model have the same digest, whenever they were made.
    """
    digest = sha256(settings_digest(engine, version).encode())
    template = [Path(engine.chat_template).expanduser()] if engine.chat_template else []
    for path in (*sorted(folder.iterdir()), *template):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(MOST_READ))
                file.seek(max(size - MOST_READ, 0))
                digest.update(file.read(MOST_READ))
    return digest.hexdigest()
