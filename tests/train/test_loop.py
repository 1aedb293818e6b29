"""The training loop: exact resume, no silent trouble, safe checkpoints."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from loopwise.errors import CheckpointError, ConfigError, NonFiniteError, WriteError
from loopwise.measure.evaluate import batches, loss_by_depth
from loopwise.models import checkpoint as checkpoint_module
from loopwise.models.checkpoint import load_checkpoint
from loopwise.tokenizer import ByteTokenizer
from loopwise.train.loop import Interrupted, TrainConfig, Trainer
from loopwise.train.metrics import MetricLog, read_metrics
from loopwise.train.optim import OptimConfig, lr_factor
from loopwise.train.recurrence import DepthConfig, DepthSchedule
from tests.conftest import full_disk, make_blocks, make_model
from tests.memory import LiveBytes


def make_trainer(folder: Path, *, steps: int = 12, optim: str = "muon", **changes) -> Trainer:
    settings = {
        "seq": 32,
        "micro_batch": 2,
        "eval_every": 5,
        "eval_blocks": 2,
        "eval_depths": (1, 4),
        "save_every": 5,
        "dtype": "fp32",
        "compile": "off",
        **changes,
    }
    return Trainer(
        make_model(),
        ByteTokenizer(),
        make_blocks(documents=6),
        make_blocks(documents=3, first=100, shuffle=False),
        config=TrainConfig(steps=steps, **settings),
        optim=OptimConfig(name=optim),
        depth=DepthConfig(mean=3.0, backprop_depth=2),
        seed=3,
        folder=folder,
    )


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder).model.state_dict()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2")  # on one core
@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_u56_resume_is_bit_equal_to_an_unbroken_run(tmp_path, optim, monkeypatch):
    """Mid-epoch, shuffled, two loader workers, accumulation 3; the kill comes between saves."""
    changes = {"steps": 40, "workers": 2, "accumulation": 3, "save_every": 10, "optim": optim}
    straight = make_trainer(tmp_path / "straight", **changes)
    straight.run()
    broken = make_trainer(tmp_path / "broken", **changes)
    one_step = broken._one_step

    def dies_at_17(micro_batches):
        if broken.step == 17:
            raise KeyboardInterrupt
        one_step(micro_batches)

    monkeypatch.setattr(broken, "_one_step", dies_at_17)
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    make_trainer(tmp_path / "broken", **changes).run(resume=True)
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "broken")]
    assert [e["step"] for e in logs[1]] == list(range(1, 41))
    for a, b in zip(*logs, strict=True):
        assert [a[k] for k in ("loss_nats", "depth", "lr", "grad_norm")] == [
            b[k] for k in ("loss_nats", "depth", "lr", "grad_norm")
        ]
    for name, tensor in _weights(tmp_path / "straight").items():
        assert torch.equal(tensor, _weights(tmp_path / "broken")[name]), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_state_that_resumes(tmp_path, number):
    trainer = make_trainer(tmp_path)
    trainer._on_event = lambda e: (
        os.kill(os.getpid(), number) if e["event"] == "step" and e["step"] == 7 else None
    )
    with pytest.raises(Interrupted, match="after step 7, which is saved"):
        trainer.run()
    assert make_trainer(tmp_path).run(resume=True)["step"] == 12
    straight = tmp_path / "straight"
    make_trainer(straight).run()
    for name, tensor in _weights(straight).items():
        assert torch.equal(tensor, _weights(tmp_path)[name]), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_last_state_is_saved_is_answered(tmp_path, monkeypatch, number):
    """It was noted and forgotten: a study went on to hours of measuring."""
    trainer = make_trainer(tmp_path)
    save = trainer._save

    def hit_while_saving():
        if trainer.step == 12:
            os.kill(os.getpid(), number)
        return save()

    monkeypatch.setattr(trainer, "_save", hit_while_saving)
    with pytest.raises(Interrupted, match="after step 12, which is saved"):
        trainer.run()
    assert load_checkpoint(tmp_path).training["step"] == 12
    again = make_trainer(tmp_path).run(resume=True)
    straight = make_trainer(tmp_path / "straight").run()
    assert again["loss_nats_by_depth"] == straight["loss_nats_by_depth"]


def test_a_signal_is_not_lost_where_a_run_ends_by_an_error(tmp_path):
    """Whoever catches the error, to go on with another run, must not be the one who hears of it."""
    trainer = make_trainer(tmp_path)

    def hit_and_fail(event):
        if event["event"] == "step" and event["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)
            raise ZeroDivisionError

    trainer._on_event = hit_and_fail
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.run()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert load_checkpoint(tmp_path).training["step"] == 5
    assert make_trainer(tmp_path).run(resume=True)["step"] == 12


def test_u60_accumulation_weights_by_target_tokens(tmp_path):
    """Eight unequal sequences as 8x1, 4x2 and 1x8 give one gradient."""
    norms, losses = [], []
    for micro_batch in (8, 4, 2, 1):
        folder = tmp_path / str(micro_batch)
        trainer = make_trainer(
            folder, steps=1, micro_batch=micro_batch, accumulation=8 // micro_batch
        )
        trainer.run()
        step = read_metrics(folder / "metrics.jsonl")[0]
        norms.append(step["grad_norm"])
        losses.append(step["loss_nats"])
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_u60_accumulated_batches_keep_no_graphs(tmp_path):
    peaks = []
    for accumulation in (1, 8):
        folder = tmp_path / str(accumulation)
        trainer = make_trainer(folder, steps=1, micro_batch=1, accumulation=accumulation)
        with LiveBytes() as memory:
            trainer.run()
        peaks.append(memory.peak)
    assert peaks[1] < 1.2 * peaks[0]


def _poison(trainer: Trainer, at_step: int) -> None:
    collect = trainer.optimizer.collect_gradients

    def poisoned():
        norm = collect()
        return torch.tensor(float("nan")) if trainer.step + 1 == at_step else norm

    trainer.optimizer.collect_gradients = poisoned


def test_u59_a_non_finite_gradient_stops_before_the_update_and_names_the_step(tmp_path):
    trainer = make_trainer(tmp_path)
    _poison(trainer, 8)
    before = {}
    trainer._on_event = lambda e: (
        before.update({k: v.clone() for k, v in trainer.optimizer.masters.items()})
        if e.get("step") == 7
        else None
    )
    with pytest.raises(NonFiniteError, match="step 8"):
        trainer.run()
    for name, master in trainer.optimizer.masters.items():
        assert torch.equal(master, before[name]), name
    assert load_checkpoint(tmp_path).training["step"] == 5
    events = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "non_finite"
    assert events[-1]["norm"] is None  # valid JSON


def test_u59_skip_mode_counts_and_goes_on(tmp_path):
    trainer = make_trainer(tmp_path, non_finite="skip")
    _poison(trainer, 8)
    trainer.run()
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert steps[-1]["step"] == 12
    assert steps[-1]["skipped_steps"] == 1


def test_in_training_loss_equals_the_loss_of_the_saved_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path)
    final = trainer.run()
    loaded = load_checkpoint(tmp_path)
    held_out = make_blocks(documents=3, first=100, shuffle=False)
    again = loss_by_depth(loaded.model, batches(held_out, 2, 2), [1, 4])
    for depth, loss in final["loss_nats_by_depth"].items():
        assert again[int(depth)] == pytest.approx(loss, abs=1e-5)


def test_u58_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer._on_event = lambda e: (
        monkeypatch.setattr(checkpoint_module, "save_file", full) if e.get("step") == 7 else None
    )
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.run()
    assert load_checkpoint(tmp_path).training["step"] == 5
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))


@pytest.mark.parametrize(("room", "error"), [(0, WriteError), (200_000, CheckpointError)])
def test_u58_a_disk_that_fills_up_while_training_is_one_line(tmp_path, room, error):
    """The log, or the optimiser's state, whose writer does not say OSError."""
    trainer = make_trainer(tmp_path)
    later = ExitStack()  # 200,000 bytes: between the weights and the optimiser's state
    trainer._on_event = lambda e: (
        later.enter_context(full_disk(room)) if e.get("step") == 7 else None
    )
    with later, pytest.raises(error, match=r"cannot (write|save) .*free some space"):
        trainer.run()
    assert load_checkpoint(tmp_path).training["step"] == 5
    assert make_trainer(tmp_path).run(resume=True)["step"] == 12


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    make_trainer(tmp_path, steps=21, save_every=3, keep=2).run()
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-0000018", "step-0000021"]


_KILLED = """
import sys
from pathlib import Path
from tests.train.test_loop import make_trainer
trainer = make_trainer(Path(sys.argv[1]), steps=400, save_every=1, eval_every=400)
trainer.run(resume=len(sys.argv) > 2)
"""


def test_u58_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path):
    """SIGKILL while saving after every step, again and again, resuming from what is there."""
    root = Path(__file__).parents[2]
    last = -1
    pointer = tmp_path / "checkpoints" / "latest"
    for attempt, delay in enumerate((0.03, 0.11, 0.27, 0.05)):
        arguments = [sys.executable, "-c", _KILLED, str(tmp_path)]
        arguments += ["resume"] if pointer.exists() else []
        before = pointer.read_text() if pointer.exists() else ""
        process = subprocess.Popen(arguments, cwd=root, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 180
            while not pointer.exists() or pointer.read_text() == before:
                assert time.monotonic() < deadline, "no checkpoint within three minutes"
                assert process.poll() is None, "the run ended by itself"
                time.sleep(0.005)
            time.sleep(delay)
        finally:
            process.kill()
            process.wait()
        step = load_checkpoint(tmp_path).training["step"]
        assert step > last, f"attempt {attempt} lost ground"
        last = step


def test_low_precision_weights_are_copies_of_float32_masters(tmp_path):
    trainer = make_trainer(tmp_path, dtype="bf16", steps=6)
    trainer.run()
    saved = _weights(tmp_path)
    for name, master in trainer.optimizer.masters.items():
        assert torch.equal(saved[name], master), name
        assert torch.equal(trainer.optimizer.params[name], master.bfloat16()), name


def test_u80_readers_keep_the_latest_segment_after_a_crash(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in range(1, 28):
        log.write({"event": "step", "step": step, "loss_nats": float(step)})
    with path.open("a") as file:
        file.write('{"segment": 1, "event": "st')  # killed while writing
    log = MetricLog(path)
    assert log.segment == 2
    for step in range(21, 26):
        log.write({"event": "step", "step": step, "loss_nats": float("nan")})
    events = read_metrics(path)
    assert [e["step"] for e in events] == list(range(1, 26))
    assert [e["loss_nats"] for e in events[19:21]] == [20.0, None]


def test_schedule_warms_up_stays_and_decays():
    config = OptimConfig(warmup_fraction=0.1, decay_fraction=0.2, final_lr_fraction=0.1)
    factors = [lr_factor(config, step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:80] == [1.0] * 70
    assert factors[-1] == pytest.approx(0.1 + 0.9 / 20)
    assert max(factors) == 1.0


def test_a_run_killed_before_its_first_save_starts_again(tmp_path):
    trainer = make_trainer(tmp_path, steps=4)

    def dies(micro_batches):
        raise KeyboardInterrupt

    trainer._one_step = dies
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert make_trainer(tmp_path, steps=4).run(resume=True)["step"] == 4


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer/optimizer.pt", "trainer/state.json"]
)
def test_u58_a_damaged_checkpoint_is_named_when_it_is_gone_on_from(tmp_path, name):
    make_trainer(tmp_path, steps=5).run()
    file = tmp_path / "checkpoints" / "step-0000005" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"step-0000005' cannot be read .*copy it again"):
        make_trainer(tmp_path, steps=5).run(resume=True)


def test_a_checkpoint_of_another_model_is_not_gone_on_from(tmp_path):
    make_trainer(tmp_path, steps=5).run()
    wider = make_trainer(tmp_path, steps=5)
    wider.optimizer.masters["embedding.weight"] = torch.zeros(258, 64)
    with pytest.raises(CheckpointError, match="weights of another model"):
        wider.run(resume=True)


@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_only_named_parameters_learn(tmp_path, optim):
    trainer = make_trainer(tmp_path / "run", steps=3, optim=optim, only=("adapter*", "*.norm_*"))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.run()
    moved = {name for name, p in _weights(tmp_path / "run").items() if not p.equal(before[name])}
    assert moved == {n for n in before if n.startswith("adapter") or ".norm_" in n}
    again = make_trainer(tmp_path / "run", steps=4, optim=optim, only=("adapter*", "*.norm_*"))
    assert again.run(resume=True)["step"] == 4
    warnings = [
        e for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if e["event"] == "warning"
    ]
    assert not warnings, "what is frozen on purpose is no surprise"


def test_a_pattern_that_fits_no_parameter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no parameter fits 'adaptor"):
        make_trainer(tmp_path / "run", only=("adaptor*",))


def test_a_curriculum_starts_at_one_recurrence(tmp_path):
    trainer = make_trainer(tmp_path / "run", steps=6)
    trainer.schedule = DepthSchedule(DepthConfig(mean=6.0, curriculum="linear"), 6)
    trainer.run()
    depths = [
        e["depth"] for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if e["event"] == "step"
    ]
    assert depths[0] == 1
    assert max(depths) > 2
