"""Folders both ways: what transformers saves loopwise loads strictly, and the other way round."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopwise.errors import CheckpointError, ConfigError, LoopwiseError
from loopwise.hub.chat import write_templates
from loopwise.measure.tiers import tiers_of, write_tiers
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from tests.conftest import make_model
from tests.hub.auto.folders import ARCHITECTURES, IDS, TRAINING, build, gap, plain_forward, saved

transformers = pytest.importorskip("transformers")
import loopwise.hub  # noqa: E402, F401 - what makes the Auto classes know us
from loopwise.hub.auto.card import model_card  # noqa: E402
from loopwise.hub.auto.config import LoopwiseConfig  # noqa: E402
from loopwise.hub.auto.model import LoopwiseForCausalLM  # noqa: E402

TOKENS = torch.tensor([IDS])
TIERS = {
    "balanced": {
        "rule": "latent-change:0.9,max=6",
        "budget_nats": 0.02,
        "live": {"mean_depth": 2.5, "p95_depth": 5.0, "token_excess_nats": 0.011},
        "risk": {"upper_bound": 0.019},
    }
}


def load(path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_goes_through_transformers_to_the_bit(tmp_path, name):
    path = saved(tmp_path, name)
    load(path).save_pretrained(tmp_path / "again")
    before, after = (load_checkpoint(p, torch.float64) for p in (path, tmp_path / "again"))
    assert after.model.config == before.model.config and after.training == before.training
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    for key, tensor in load_file(path / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[key], tensor), key
    third = load(tmp_path / "again")
    assert torch.equal(third(TOKENS).logits, load(path)(TOKENS).logits)
    assert third.config.num_loops == load(path).config.num_loops


@pytest.mark.parametrize("tied", [True, False])
def test_u24_shared_weights_are_saved_once(tmp_path, tied):
    model = make_model(tie_embeddings=tied, d_model=128, d_ff=256)
    save_checkpoint(tmp_path / "a", model, ByteTokenizer(), TRAINING)
    loaded = load(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    file = tmp_path / "b" / "model.safetensors"
    unique = sum(p.numel() * p.element_size() for p in model.parameters())
    assert unique <= file.stat().st_size < 1.05 * unique
    again = load(tmp_path / "b")
    assert again.config.tie_word_embeddings is tied
    if tied:
        assert "unembedding.weight" not in load_file(file)
        head = again.model.head_weight
        assert head.data_ptr() == again.get_input_embeddings().weight.data_ptr()
    else:
        head = again.get_output_embeddings().weight
        assert torch.equal(head, model.unembedding.weight)
        assert not torch.equal(head, again.get_input_embeddings().weight)


def test_older_checkpoints_load_by_class_and_say_what_they_lack(tmp_path):
    """Before, config.json had no model_type, by which the Auto classes tell models apart."""
    path = saved(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["model_type"], config["num_loops"]
    (path / "config.json").write_text(json.dumps(config))
    model = LoopwiseForCausalLM.from_pretrained(path)
    assert model.config.num_loops == 3, "from training.json"
    whole = plain_forward(load_checkpoint(path, torch.float64).model, 3)
    assert gap(model(TOKENS).logits[0], whole) < 1e-9
    with pytest.raises(ValueError, match="model_type"):
        load(path)
    model.save_pretrained(path)  # brings it up to date
    assert torch.equal(load(path)(TOKENS).logits, model(TOKENS).logits)


def test_tiers_go_along_with_the_weights_they_are_for(tmp_path, caplog):
    path = saved(tmp_path)
    write_tiers(load_checkpoint(path, torch.float64), TIERS)
    model = load(path)
    model.save_pretrained(tmp_path / "same")
    model.save_pretrained(path)  # over what it was loaded from
    for folder in (tmp_path / "same", path):
        assert tiers_of(load_checkpoint(folder)) == TIERS
        assert "balanced" in (folder / "README.md").read_text()
    assert not caplog.records

    model = load(tmp_path / "same")
    with torch.no_grad():
        model.model.norm_final.weight.add_(0.1)
    model.save_pretrained(tmp_path / "same")
    after = load_checkpoint(tmp_path / "same")
    assert tiers_of(after) == {}
    assert "transformers" in after.training["weights_changed_by"]
    assert "exits.json is not saved" in caplog.text
    assert load(path, dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded") is None
    assert tiers_of(load_checkpoint(tmp_path / "rounded")) == {}


def test_stale_exits_are_not_made_valid_by_saving(tmp_path):
    path = saved(tmp_path)
    checkpoint = load_checkpoint(path, torch.float64)
    write_tiers(checkpoint, TIERS)
    text = (path / "exits.json").read_text().replace(checkpoint.weights_hash, "0" * 64)
    (path / "exits.json").write_text(text)
    load(path).save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "exits.json").exists()


@pytest.mark.parametrize("damage", ["missing", "unknown"])
def test_loading_is_strict(tmp_path, damage):
    path = saved(tmp_path)
    state = load_file(path / "model.safetensors")
    if damage == "missing":
        del state["adapter.weight"]
    else:
        state["extra.weight"] = torch.zeros(2)
    save_file(state, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{damage} .*(adapter|extra).weight"):
        load(path)


def _pointer(path):
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def _cut(path):
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _other_tokenizer(path):
    tokenizer = BPETokenizer.train([f"word{i} and more {i * 7919}" for i in range(400)], 700)
    (path / "tokenizer.json").write_text(tokenizer.to_json())


def _tokenizer_pointer(path):
    (path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")


def _no_weights(path):
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage", [_pointer, _cut, _other_tokenizer, _tokenizer_pointer, _no_weights]
)
def test_bad_folders_are_one_line_as_with_load_checkpoint(tmp_path, damage):
    path = saved(tmp_path)
    damage(path)
    with pytest.raises(LoopwiseError) as wanted:
        load_checkpoint(path)
    with pytest.raises(type(wanted.value)) as found:
        transformers.AutoModelForCausalLM.from_pretrained(path)
    assert str(found.value) == str(wanted.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_saving_without_training_does_not_say_it_was_trained_on(tmp_path, stored):
    """Loaded in float32, weights were taken for others than those stored in bfloat16."""
    path = saved(tmp_path, dtype=stored)
    model = load(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "Trained on with transformers" not in card
    assert load_checkpoint(tmp_path / "again").training == TRAINING
    if stored is torch.float32:
        load(path, dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded")
        card = (tmp_path / "rounded" / "README.md").read_text()
        assert "Rounded to bfloat16 since; not trained further" in card
        assert "Trained on" not in card
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    model.save_pretrained(tmp_path / "trained")
    assert "Trained on with transformers since" in (tmp_path / "trained" / "README.md").read_text()


def test_configs_are_checked():
    with pytest.raises(ConfigError, match="d_modle"):
        LoopwiseConfig(architecture="recurrent", model={"d_modle": 64})
    with pytest.raises(ConfigError, match="recurrent"):
        LoopwiseConfig(architecture="recurent")
    with pytest.raises(CheckpointError, match="checkpoint format 99"):
        LoopwiseConfig(version=99)
    with pytest.raises(CheckpointError, match="foreign"):
        LoopwiseConfig(format="other")


def test_a_model_from_scratch_is_initialised_by_its_architecture(tmp_path):
    """transformers' own initialisation would undo it."""
    config = LoopwiseConfig(architecture="looped", model={"d_model": 32, "d_ff": 48})
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert not model.model.core_blocks[0].out.weight.any(), "starts at zero"
    std = float(model.model.embedding.weight.detach().std())
    assert 0.8 * (2 / 5 / 32) ** 0.5 < std < 1.05 * (2 / 5 / 32) ** 0.5
    model.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    assert load_checkpoint(tmp_path / "new").model.config == config.settings


def test_resized_embeddings(tmp_path):
    """Tokens are added before fine-tuning; config, shape and file follow."""
    path = saved(tmp_path, "untied")
    model = load(path)
    before = model(TOKENS).logits
    model.resize_token_embeddings(264, mean_resizing=False)
    assert model.config.vocab_size == model.model.geometry.vocab_size == 264
    after = model(TOKENS, labels=TOKENS)
    assert after.logits.shape[-1] == 264 and gap(after.logits[..., :258], before) < 1e-12
    model.save_pretrained(tmp_path / "again")
    assert load_checkpoint(tmp_path / "again").model.geometry.vocab_size == 264
    tied = load(saved(tmp_path, "recurrent"))
    tied.resize_token_embeddings(264, mean_resizing=False)
    assert tied(TOKENS).logits.shape[-1] == 264


def test_spread_weights_are_refused(tmp_path):
    model = load(saved(tmp_path))
    with pytest.raises(CheckpointError, match="max_shard_size"):
        model.save_pretrained(tmp_path / "b", max_shard_size=10_000)


FRESH = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
try:
    AutoConfig.from_pretrained("moved")
except ValueError as err:
    said = " ".join(str(err).split())
else:
    raise SystemExit("loopwise was not imported, and yet...")
import loopwise.hub
model = AutoModelForCausalLM.from_pretrained("moved")
ids = AutoTokenizer.from_pretrained("moved")("Tom has a red ball.", return_tensors="pt")
assert "loopwise.cli" not in sys.modules
print(said)
torch.save((ids["input_ids"], model(**ids).logits.detach()), "found.pt")
"""


def test_u26_a_moved_folder_loads_in_a_fresh_process(tmp_path):
    """Before the import transformers does not know it, and its words are all a user reads then:
    they name our model type. What to do stands in the card, in those words."""
    model = load(saved(tmp_path))
    model.save_pretrained(tmp_path / "first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(tmp_path / "first", elsewhere / "moved")
    done = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=elsewhere, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ids, logits = torch.load(elsewhere / "found.pt")
    assert ids[0].tolist() == [256, *b"Tom has a red ball."]
    assert torch.equal(model(ids).logits, logits)
    said = "has model type `loopwise` but Transformers does not recognize this architecture"
    assert said in done.stdout
    card = (elsewhere / "moved" / "README.md").read_text()
    assert "model type `loopwise`" in card and "pip install loopwise" in card
    assert "import loopwise.hub" in card.split("model type `loopwise`")[1].split("\n\n")[0]


# The hub.


def test_what_is_uploaded_is_a_checkpoint_with_a_card(tmp_path, monkeypatch):
    import huggingface_hub

    path = saved(tmp_path)
    write_tiers(load_checkpoint(path, torch.float64), TIERS)
    calls = {}

    def upload_folder(self, *, repo_id, folder_path, **rest):
        shutil.copytree(folder_path, tmp_path / "uploaded", dirs_exist_ok=True)
        calls.update(repo_id=repo_id, rest=rest)
        return "https://example.org/commit"

    def create_repo(self, repo_id, **rest):
        calls.update(created=repo_id, private=rest["private"])

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "file_exists", lambda *_, **__: False)
    model = load(path)
    address = model.push_to_hub(
        "someone/tiny-loop", commit_message="first", private=True, tags=["stories"]
    )
    assert address == "https://example.org/commit"
    assert calls == {
        "repo_id": "someone/tiny-loop",
        "created": "someone/tiny-loop",
        "private": True,
        "rest": {"commit_message": "first"},
    }
    uploaded = tmp_path / "uploaded"
    assert {f.name for f in uploaded.iterdir()} == {
        "config.json",
        "exits.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "training.json",
    }
    assert tiers_of(load_checkpoint(uploaded)) == TIERS
    assert torch.equal(load(uploaded)(TOKENS).logits, model(TOKENS).logits)
    card = (uploaded / "README.md").read_text()
    for part in (
        "- stories",
        "pipeline_tag: text-generation",
        'from_pretrained("someone/tiny-loop")',
        "architecture | recurrent",
        "1 prelude, 2 core, 1 coda",
        "mean depth of 3.2 recurrences, 1 to 8",
        "| `balanced` | `latent-change:0.9,max=6` | 0.02 |",
        "| `balanced` | 2.5 | 5 | 0.011 | 0.019 |",
        'exit="balanced"',
    ):
        assert part in card, part
    assert str(tmp_path) not in card
    with pytest.raises(ConfigError, match="comit_message"):
        model.push_to_hub("someone/tiny-loop", comit_message="first")

    shutil.rmtree(uploaded)
    model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="someone/other")
    assert calls["repo_id"] == "someone/other" and (uploaded / "exits.json").is_file()


@pytest.mark.parametrize("card", ["mine\n", "edited", "bytes", "ours"])
def test_a_card_that_somebody_edited_is_kept(tmp_path, caplog, card):
    """Saving over a folder wrote its README.md anew, and what a person had written was lost."""
    path = saved(tmp_path)
    model = load(path)
    model.save_pretrained(path)
    file = path / "README.md"
    ours = file.read_bytes()
    texts = {"mine\n": b"mine\n", "bytes": b"\xff", "ours": ours}
    there = texts.get(card, ours.replace(b"library_name", b"license: mit\nlibrary_name"))
    file.write_bytes(there)
    with torch.no_grad():
        model.model.norm_final.weight.add_(0.1)
    model.save_pretrained(path)
    if card == "ours":
        assert "Trained on with transformers since" in file.read_text() and not caplog.records
    else:
        assert file.read_bytes() == there
        assert f"{file} is kept as it is" in caplog.text


@pytest.mark.parametrize("there", [None, "ours", "edited"])
def test_uploading_keeps_a_card_that_somebody_edited_on_the_hub(
    tmp_path, monkeypatch, caplog, there
):
    import huggingface_hub

    def card_of(text):
        (tmp_path / "card").write_text(text)
        return str(tmp_path / "card")

    model, calls = load(saved(tmp_path)), []
    ours = model_card(model.model, TRAINING, {}, name="someone/tiny-loop", num_loops=2)
    on_hub = {"ours": ours, "edited": ours.replace("again and again", "often")}
    for name, answer in {
        "create_repo": lambda *_, **__: None,
        "file_exists": lambda *_, **__: there is not None,
        "hf_hub_download": lambda *_, **__: card_of(on_hub[there]),
        "upload_folder": lambda _, **given: calls.append(given.get("ignore_patterns")),
    }.items():
        monkeypatch.setattr(huggingface_hub.HfApi, name, answer)
    model.push_to_hub("someone/tiny-loop")
    assert calls == [["README.md"] if there == "edited" else None]
    assert ("README.md of someone/tiny-loop is kept" in caplog.text) == (there == "edited")


def test_the_card_of_a_model_of_one_recurrence_promises_no_depth(tmp_path):
    """Its layers run once: it was called depth-recurrent, with tiers to be made."""
    load(saved(tmp_path, "fixed")).save_pretrained(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "layers that run once" in card and "None: there is one depth." in card
    for part in ("depth-recurrent", "again and again", "num_loops", "calibrate", "mean depth"):
        assert part not in card, part


@pytest.mark.parametrize(
    ("since", "told"),
    [({}, True), ({"tokens_seen": 512}, False), ({"weights_changed_by": "transformers"}, False)],
)
def test_the_card_says_that_a_retrofit_was_not_trained_yet(since, told):
    layers = {"prelude": [0], "core": [1], "coda": [2]}
    once = {"true_mean": 1.0, "min": 1, "max": 1}
    facts = {"retrofitted_from": {"checkpoint": "x", "layers": layers}, "depth": once, **since}
    card = model_card(build("raven"), facts, {}, name="y", num_loops=1)
    assert ("Not trained since: what it says beyond depth 1" in card) == told
    assert "Trained at a depth of 1 recurrence. Runs 1 recurrence unless" in card


def test_what_lies_on_the_hub_is_read_beside_the_weights(tmp_path, monkeypatch):
    """Files the repository lacks are left out; where it is is passed on."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    from loopwise.hub.auto.folder import read_beside

    path = saved(tmp_path)
    template = {"chat_template": "of settings"}
    (path / "tokenizer_config.json").write_text(json.dumps(template))
    asked = []

    def download(repo_id, filename, *, subfolder=None, **where):
        asked.append((repo_id, filename, subfolder, where))
        if not (path / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(path / filename)

    def snapshot(repo_id, *, allow_patterns, **where):
        assert (repo_id, where) == ("someone/tiny-loop", {"revision": "main"})
        assert allow_patterns == ["v1/additional_chat_templates/*.jinja"]
        write_templates(path, {"tools": "x"})
        return str(path.parent)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    beside = read_beside("someone/tiny-loop", "v1", revision="main")
    assert beside.training == TRAINING and beside.exits == {} and beside.path == Path(path)
    assert asked[0] == ("someone/tiny-loop", "tokenizer.json", "v1", {"revision": "main"})
    assert [name for _, name, _, _ in asked[1:]] == [
        "training.json",
        "exits.json",
        "chat_template.jinja",
        "tokenizer_config.json",
    ]
    assert beside.chat_templates == {"default": "of settings", "tools": "x"}


def test_saving_keeps_a_model_of_its_own_shape(tmp_path):
    """`build` and the folder agree: a guard against a test that compares a thing with itself."""
    path = saved(tmp_path, "raven")
    assert load(path).model.config == build("raven").config
