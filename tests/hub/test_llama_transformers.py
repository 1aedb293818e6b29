"""Where transformers is installed: what it writes itself becomes a model with its own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.tokenizer import ByteTokenizer
from tests.hub.folders import IDS, converted, decode, forward, gap

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}},
        {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e4}},
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "max_position_embeddings": 256},
    ],
    ids=["tied", "untied", "llama3"],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPE, **changes, initializer_range=0.3, attn_implementation="eager"
    )
    peer = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in peer.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    source = tmp_path / "llama"
    peer.save_pretrained(source)
    (source / "tokenizer.json").write_text(ByteTokenizer().to_json())
    ids = IDS * 5  # long enough for the slow frequencies to turn
    with torch.no_grad():
        wanted = peer(torch.tensor([ids])).logits[0]
    assert wanted.std() > 0.1
    model = converted(source, torch.float32)
    assert gap(forward(model, 1, ids), wanted) < 1e-4
    assert gap(decode(model, 1, ids), wanted) < 1e-4
