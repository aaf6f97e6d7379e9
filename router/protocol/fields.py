"""What the fields of a request are called where an error names them.

Chat is the inner form: what checks a prompt, here or in a replica, knows a chat completion's fields. Each API has names
of its own for them, by which its clients are told.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.replicas.errors import ErrorInfo, HoldfastError
from holdfast.router.protocol.errors import ReplyError


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The fields of one request, by those of the chat completion that it becomes.

    `beginnings` of paths have other names. `tools` and `messages` are the fields that the tools and messages of the
    chat completion come from; None: it has the same ones. `schema` is the member of a tool that describes arguments,
    one for all tools or one for each.
    """

    beginnings: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[str] | None = None
    messages: Sequence[str] | None = None
    schema: str | Sequence[str] = "parameters"

    def of(self, name: str) -> str:
        """The request's own name of field `name` of the chat completion."""
        kind, _, rest = name.partition(".")
        at, _, rest = rest.partition(".")
        listed = {"tools": self.tools, "messages": self.messages}.get(kind)
        if listed is not None and at.isdigit() and int(at) < len(listed):
            if kind == "messages":  # what is in it need not be as in the item that it was made of
                return listed[int(at)]
            rest = rest.removeprefix("function.")
            if rest == "parameters" or rest.startswith("parameters."):
                schema = self.schema if isinstance(self.schema, str) else self.schema[int(at)]
                rest = schema + rest.removeprefix("parameters")
            return f"{listed[int(at)]}.{rest}".rstrip(".")
        for begins in sorted(self.beginnings, key=len, reverse=True):
            if name == begins or name.startswith(f"{begins}."):
                return self.beginnings[begins] + name[len(begins) :]
        return name

    def info(self, error: ErrorInfo) -> ErrorInfo:
        """`error` with the request's own names, in its message as well."""
        if error.field is None or (own := self.of(error.field)) == error.field:
            return error
        # A path as a whole, or in quotes: a name of one word may be a word of the message.
        written = rf"(?<![\w.]){re.escape(error.field)}(?!\w)" if "." in error.field else f"'{re.escape(error.field)}'"
        said = re.sub(written, lambda found: found[0].replace(error.field or "", own), error.message)
        return replace(error, field=own, message=said)

    def error(self, error: HoldfastError) -> HoldfastError:
        """`error`, of the same type, with the request's own names."""
        info = self.info(error.info)
        if info.field == error.field:
            return error
        if isinstance(error, ReplyError):
            return ReplyError(info, error.usage)
        error.message, error.field = info.message, info.field
        error.args = (info.message, info.field, error.retry_after_s)
        return error


CHAT_FIELDS = FieldNames()
