"""Tiny random checkpoints with a layer for multi-token prediction, and what transformers' own layer predicts.

`learned`: the layer was trained on what the model answers to `PROMPTS`, so that its drafts are often right.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import torch
import transformers as tf
from families import spread
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, HEADS, LINEAR, add_tokenizer, greedy, words
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

Family: TypeAlias = Literal["qwen3_5", "qwen3_next", "glm4_moe"]
_FOLDERS = TemporaryDirectory(prefix="tiny-mtp")
_CONFIGS = {
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**LINEAR, tie_word_embeddings=True),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**LINEAR, **EXPERTS),
    "glm4_moe": lambda: tf.Glm4MoeConfig(
        **HEADS | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        use_qk_norm=True,
        num_mtp_layers=1,
    ),
}
_NAMES = {  # of the layer's parts in the checkpoints, by those in transformers
    "mtp": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "post_norm": "mtp.norm",
        "mtp_block": "mtp.layers.0",
    },
    "behind": {
        "enorm": "model.layers.2.enorm",
        "hnorm": "model.layers.2.hnorm",
        "eh_proj": "model.layers.2.eh_proj",
        "post_norm": "model.layers.2.shared_head.norm",
        "mtp_block": "model.layers.2",
    },
}


PROMPTS = [words(50 + i, 11 + 3 * i) for i in range(4)]


class TinyMtp:
    """A model, its layer, and the folder of both."""

    def __init__(self, family: Family, learned: bool) -> None:
        torch.manual_seed(3)
        config = _CONFIGS[family]()
        config._attn_implementation = "eager"
        config.num_mtp_layers = 1
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = ["full_attention"]
        self.model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        spread(self.model)
        self.layer = MtpModel(self.model, 1).eval()
        spread(self.layer.layers)
        self._config = config.get_mtp_config()
        if learned:
            self._learn()
        self.folder = Path(_FOLDERS.name) / f"{family}-{learned}"
        self.model.save_pretrained(self.folder)
        file = self.folder / "model.safetensors"
        names = _NAMES["behind" if family == "glm4_moe" else "mtp"]
        save_file(load_file(file) | dict(self._stored(names)), file, {"format": "pt"})
        add_tokenizer(self.folder)

    def _stored(self, names: dict[str, str]):
        """The layer's tensors as checkpoints have them: those of each expert by themselves."""
        for name, tensor in self.layer.layers[0].state_dict().items():
            part, rest = name.split(".", 1)
            at, value = f"{names[part]}.{rest}", tensor.detach().clone().contiguous()
            if ".experts." not in at:
                yield at, value
                continue
            for i, expert in enumerate(value):
                parts = expert.chunk(2) if "gate_up" in at else (expert,)
                each = ("gate_proj", "up_proj") if "gate_up" in at else ("down_proj",)
                for kind, matrix in zip(each, parts, strict=True):
                    yield f"{at.rsplit('.', 1)[0]}.{i}.{kind}.weight", matrix.contiguous()

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Of what is predicted after each token but the first, [n - 1, vocabulary]."""
        ids = torch.tensor([tokens])
        with torch.no_grad():
            hidden = self.model.model(ids).last_hidden_state
        where, cache = torch.arange(1, len(tokens))[None], MtpCache(config=self._config)
        embedded, layer = self.layer.embed_tokens(ids[:, 1:]), self.layer
        if hasattr(layer, "forward_layer"):
            out = layer.forward_layer(0, hidden[:, :-1], where, cache, inputs_embeds=embedded)
        else:  # older versions of transformers
            masks = layer.create_masks_for_mtp_layer(0, embedded, cache, where)
            angles = layer.rotary_emb(embedded, position_ids=where)
            both = {"position_embeddings": angles, "position_ids": where}
            out = layer.layers[0](embedded, hidden[:, :-1], **both, past_key_values=cache, **masks)
            out = layer.shared_post_norm(out) if layer.use_shared_post_norm else out
        return layer._project_to_logits(out)[0]

    @torch.no_grad()
    def predicted(self, tokens: tuple[int, ...]) -> int:
        """The token after these."""
        return int(self.logits(tokens)[-1].argmax())

    def _learn(self) -> None:
        texts = [(*prompt, *greedy(self.model, prompt, 24)) for prompt in PROMPTS]
        self.layer.layers.requires_grad_(True)
        optimizer = torch.optim.Adam(self.layer.layers.parameters(), lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            for prompt, text in zip(PROMPTS, texts, strict=True):
                first = len(prompt) - 1  # what comes after the first drawn token on
                logits = self.logits(text)[first:-1]
                torch.nn.functional.cross_entropy(logits, torch.tensor(text[first + 2 :])).backward()
            optimizer.step()
        self.layer.layers.requires_grad_(False)


@cache
def tiny_mtp(family: Family, learned: bool = False) -> TinyMtp:
    return TinyMtp(family, learned)
