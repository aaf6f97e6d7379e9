"""The fixed text of the calls to declared tools, as tokens: made once for a list of tools, shared by its requests."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from holdfast.replicas.speculation.skeleton import SkeletonSet
from holdfast.replicas.speculation.templates import CallFormat, ValueEndings, compile_tools, value_endings
from holdfast.replicas.text.formats import ToolFormat

_ENTRIES = 256  # lists of tools whose skeletons are kept


class CallSkeletons:
    """Skeletons for one tokenizer. Only the Hermes format has one text for a call; for others there are none."""

    def __init__(self, tokenizer: Any, tool_format: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._form: CallFormat | None = None
        if tool_format is ToolFormat.HERMES:
            self._form = CallFormat(after="}\n</tool_call>" + (tokenizer.eos_token or ""))
        self._sets: OrderedDict[str, SkeletonSet] = OrderedDict()

    def of(self, tools: Sequence[Mapping[str, Any]]) -> SkeletonSet | None:
        """The skeletons of `tools`, in OpenAI's format."""
        if self._form is None:
            return None
        key = json.dumps(tools)
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = compile_tools(tools, self._encode, self._endings, self._form)
            if len(self._sets) > _ENTRIES:
                self._sets.popitem(last=False)
        else:
            self._sets.move_to_end(key)
        return found

    def _encode(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _endings(self) -> ValueEndings:
        backend = self._tokenizer.backend_tokenizer
        ids = range(backend.get_vocab_size())
        texts = backend.decode_batch([[token] for token in ids], skip_special_tokens=False)
        return value_endings(zip(ids, texts, strict=True))
