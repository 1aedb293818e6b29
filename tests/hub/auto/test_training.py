"""Training with transformers: gradients, checkpointing, Trainer."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import ConfigError
from loopwise.models.checkpoint import load_checkpoint
from tests.hub.auto.folders import IDS, saved

transformers = pytest.importorskip("transformers")
import loopwise.hub  # noqa: E402, F401 - what makes the Auto classes know us
from loopwise.hub.auto.cache import CACHE  # noqa: E402

TOKENS = torch.tensor([IDS])


def load(path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)


def gradients(model, **asked):
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS, **asked).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}


def checkpointing(model, *settings):
    """By its present name, or by the one of early versions."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(*settings)
    assert model.recurrence.gradient_checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_u25_checkpointing_changes_no_gradient_and_writes_no_cache(tmp_path, reentrant):
    model = load(saved(tmp_path)).train()
    assert model.config.use_cache is True
    plain_loss, plain = gradients(model, num_loops=4)
    steps = []
    handle = model.recurrence.register_forward_hook(lambda *_: steps.append(1))
    checkpointing(model, {"use_reentrant": reentrant})
    loss, grads = gradients(model, num_loops=4, use_cache=True)
    handle.remove()
    assert abs(loss - plain_loss) < 1e-6
    assert grads.keys() == plain.keys()
    for name, grad in plain.items():
        assert bool(grad.any()), f"{name} does not learn"
        assert torch.allclose(grads[name], grad, atol=1e-6), name
    assert CACHE not in model(TOKENS, use_cache=True)
    with pytest.raises(ConfigError, match="while training"):
        model(TOKENS, past_key_values=transformers.DynamicCache())

    model.eval()
    seen = []
    model.recurrence.register_forward_hook(lambda _, given, out: seen.append(out.shape[1]))
    model.generate(TOKENS, num_loops=1, max_new_tokens=8, min_new_tokens=8)
    assert seen == [len(IDS)] + [1] * 7, "the cache is used as before"


def test_checkpointing_recomputes_the_core(tmp_path):
    """A guard: that gradients agree would say nothing if nothing were recomputed."""
    model, calls = load(saved(tmp_path)).train(), []
    step = model.model.core_step
    model.model.core_step = lambda *given: calls.append(1) or step(*given)
    gradients(model, num_loops=4)
    assert len(calls) == 4
    checkpointing(model)
    gradients(model, num_loops=4)
    assert len(calls) == 4 + 8


class Texts(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(97, 103, (8, 24), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index].clone()
        mask = torch.ones(24, dtype=torch.int64)
        mask[20 + index % 4 :] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }


def arguments(folder, **changes):
    usual = {
        "output_dir": str(folder),
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 5,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 0,
    }
    return transformers.TrainingArguments(**{**usual, **changes})


def test_u04_ten_steps_of_trainer_saved_and_resumed(tmp_path, capsys):
    """With the int64 masks of a tokenizer; the folder it leaves is a loopwise checkpoint."""
    pytest.importorskip("accelerate")
    path = saved(tmp_path, dtype=torch.float32)
    model = load(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path / "run"),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        processing_class=tokenizer,
    )
    assert trainer.model_accepts_loss_kwargs
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.state.global_step == 10
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.5

    last = load_checkpoint(tmp_path / "run" / "checkpoint-10")
    for key, tensor in model.model.state_dict().items():
        assert torch.equal(last.model.state_dict()[key], tensor), key
    assert last.tokenizer.fingerprint == load_checkpoint(path).tokenizer.fingerprint
    assert "weights_changed_by" in last.training

    again = transformers.Trainer(
        model=load(path), args=arguments(tmp_path / "run"), train_dataset=Texts()
    )
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert again.state.global_step == 10
    for (name, left), right in zip(again.model.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-5), name


def test_loading_a_state_dict_takes_both_spellings(tmp_path):
    model = load(saved(tmp_path))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    plain = {k.removeprefix("model."): v for k, v in state.items()}
    for given in (state, plain):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert model.load_state_dict(dict(given)).missing_keys == []
        assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    with pytest.raises(RuntimeError, match="nonsense"):
        model.load_state_dict({**plain, "nonsense": torch.zeros(1)})
