"""A tiny random checkpoint of Qwen3.5: three linear layers and one of full attention, and what transformers says."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
import torch
import transformers as tf

VOCABULARY = 97
_FOLDER = TemporaryDirectory(prefix="tiny-hybrid")


@cache
def tiny_hybrid() -> tuple[Path, torch.nn.Module]:
    """Its folder, and the model. Weights are spread, so that attention and states matter."""
    torch.manual_seed(3)
    config = tf.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        max_position_embeddings=512,
    )
    model = tf.Qwen3_5ForCausalLM._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("conv1d.weight"):
                weight.normal_(std=0.5)
            elif weight.dim() == 2:
                weight.normal_(std=0.25)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    folder = Path(_FOLDER.name)
    model.save_pretrained(folder)
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return folder, model


@cache
def answer(prompt: tuple[int, ...], new: int) -> list[int]:
    """The greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = tiny_hybrid()[1].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()
