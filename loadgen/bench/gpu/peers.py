"""transformers on the same machine, with the same weights and prompts: `generate` with prompt lookup, and its
continuous batching.

Neither keeps a conversation between its turns by itself; what prefixes continuous batching shares is left to its
defaults. The ends of turns are ignored, as they are by our engine: every reply has the length on record.
"""

import time
from collections.abc import Sequence
from typing import Any, Self

import torch
import transformers as tf

from holdfast.loadgen.bench.gpu.stage import Exchange, TurnSizes

_LOOKUP = 10  # tokens that are drafted at a time
_NO_END = -1


def load_model(folder: str, device: str, dtype: torch.dtype) -> Any:
    """transformers' own model, which ends no turn by itself.

    Without cuDNN's attention, for all: it makes a plan for each length anew, which took most of the time of a reply.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    model.generation_config = tf.GenerationConfig(do_sample=False, pad_token_id=0)
    model.config.eos_token_id = None
    return model.eval().to(device)


class PromptLookup:
    """One program: `generate`, which drafts from the prompt."""

    def __init__(self, model: Any, sizes: TurnSizes) -> None:
        self._model, self._device = model, sizes.device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, exchanges: Sequence[Exchange]) -> float:
        """One program after the other. Raises RuntimeError for a reply of another length."""
        began = _now(self._device)
        for exchange in exchanges:
            ids = torch.from_numpy(exchange.prompt).long()[None].to(self._device)
            count = len(exchange.reply)
            with torch.inference_mode():
                found = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    prompt_lookup_num_tokens=_LOOKUP,
                )
            _expect(found.shape[1] - ids.shape[1], count)
        return _now(self._device) - began


class Batching:
    """Many programs at once: one manager for all turns, so that it may keep what it computed."""

    def __init__(self, model: Any, sizes: TurnSizes) -> None:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        settings = tf.GenerationConfig(do_sample=False, eos_token_id=_NO_END, pad_token_id=0, max_new_tokens=256)
        hints = WorkloadHints(
            max_prompt_length=sizes.most_tokens, max_generated_length=256, num_requests=max(sizes.rows)
        )
        self._device = sizes.device
        self._open = model.continuous_batching_context_manager(
            generation_config=settings,
            timeout=5,
            continuous_batching_config=tf.ContinuousBatchingConfig(
                num_blocks=sizes.peer_blocks, max_batch_tokens=sizes.peer_step
            ),
            workload_hints=hints,
        )
        self._manager: Any = None

    def __enter__(self) -> Self:
        self._manager = self._open.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(None, None, None)

    def ask(self, exchanges: Sequence[Exchange]) -> float:
        """All at once. Raises RuntimeError where one fails, or its thread has died."""
        began, wanted = _now(self._device), {}
        for exchange in exchanges:
            count = len(exchange.reply)
            name = self._manager.add_request(exchange.prompt.tolist(), max_new_tokens=count, eos_token_id=_NO_END)
            if name is None:
                raise RuntimeError("continuous batching refuses a request")
            wanted[name] = count
        while wanted:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
                continue
            if not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            _expect(len(result.generated_tokens), wanted.pop(result.request_id))
        return _now(self._device) - began


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"transformers gave {found} tokens, not {wanted}")


def _now(device: str) -> float:
    """Seconds, once the device has nothing left to do."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()
