"""When bfloat16 is asked for at all, and that the faster one wins."""

import pytest
import torch
import transformers as tf

from holdfast.kernels import linear
from holdfast.replicas.model import startup as probe

SMALL = tf.LlamaConfig(hidden_size=64, intermediate_size=128)
LARGE = tf.LlamaConfig(hidden_size=1024, intermediate_size=1024)


@pytest.mark.parametrize(("config", "checkpoint"), [(SMALL, "bfloat16"), (LARGE, "float32"), (LARGE, "float16")])
def test_small_models_and_other_checkpoints_stay_exact_without_a_measurement(config, checkpoint, monkeypatch):
    monkeypatch.setattr(probe, "_seconds", lambda *_: pytest.fail("measured"))
    assert probe.faster_dtype(config, checkpoint) == "float32"


@pytest.mark.parametrize(("slower", "chosen"), [(2.0, "bfloat16"), (1.1, "float32"), (0.5, "float32")])
def test_bfloat16_must_be_clearly_faster(slower, chosen, monkeypatch):
    monkeypatch.setattr(probe, "can_pack", lambda _: True)
    monkeypatch.setattr(probe, "_seconds", lambda _o, _i, dtype: slower if dtype == torch.float32 else 1.0)
    assert probe.faster_dtype(LARGE, "bfloat16") == chosen


def test_a_core_without_bfloat16_products_is_not_asked(monkeypatch):
    monkeypatch.setattr(linear.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(probe, "_seconds", lambda *_: pytest.fail("measured"))
    assert probe.faster_dtype(LARGE, "bfloat16") == "float32"


def test_the_measurement_itself(monkeypatch):
    monkeypatch.setattr(probe, "_MATRICES_BYTES", 1 << 20)
    assert probe._seconds(1024, 1024, torch.float32) > 0
