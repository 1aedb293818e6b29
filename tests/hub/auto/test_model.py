"""The model as transformers loads and calls it: equal to loopwise's own passes."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import ConfigError, DepthError, ExitError, ShapeError
from tests.hub.auto.folders import (
    ARCHITECTURES,
    IDS,
    build,
    depths_of,
    gap,
    plain_forward,
    reference,
    saved,
)

transformers = pytest.importorskip("transformers")
import loopwise.hub  # noqa: E402, F401 - what makes the Auto classes know us
from loopwise.hub.auto.cache import CACHE  # noqa: E402
from loopwise.hub.auto.model import LoopwiseForCausalLM  # noqa: E402

TOKENS = torch.tensor([IDS])
RULES = [
    "latent-change:0.9,max=6",
    "kl:0.2,max=6",
    "short-list-kl:0.2,max=6",
    "latent-change:1.0,min=2,patience=2,max=5",
    "argmax:0,patience=2,max=6",
]


def load(folder, name="recurrent", **kwargs):
    """In float64, as saved."""
    path = folder / name
    if not path.exists():
        saved(folder, name)
    return transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_auto_classes_load_every_architecture(folder, name):
    model = load(folder, name)
    assert type(model) is LoopwiseForCausalLM
    assert type(model.model) is type(build(name))
    assert model.dtype == torch.float64 and not model.training
    assert transformers.AutoConfig.from_pretrained(folder / name).num_loops == min(
        3, model.model.geometry.max_depth or 3
    )
    for depth in depths_of(model.model):
        with torch.no_grad():
            out = model(TOKENS, num_loops=depth)
        assert gap(out.logits[0], plain_forward(build(name), depth)) < 1e-9, depth
        assert out.exit_depths.tolist() == [[depth] * len(IDS)]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "dynamic") for name in ARCHITECTURES),
        ("recurrent", "dynamic of the config"),
        *((name, "static") for name in ("recurrent", "bare", "noise")),
    ],
)
@torch.no_grad()
def test_decode_equals_forward(folder, name, cache):
    model = load(folder, name)
    for depth in depths_of(model.model):
        whole = model(TOKENS, num_loops=depth).logits[0]
        at = model.config.at(depth)
        kv = {
            "dynamic": lambda: transformers.DynamicCache(),
            "dynamic of the config": lambda at=at: transformers.DynamicCache(config=at),
            "static": lambda at=at: transformers.StaticCache(config=at, max_cache_len=40),
        }[cache]()
        parts = []
        for ids in TOKENS.split([7, 1, 1, 5, *[1] * (len(IDS) - 14)], dim=1):
            parts.append(model(ids, num_loops=depth, past_key_values=kv, use_cache=True).logits[0])
        assert gap(torch.cat(parts), whole) < 1e-9, depth
        assert len(kv) == model.model.geometry.effective_layers(depth)


@torch.no_grad()
def test_decode_equals_forward_in_float32(tmp_path):
    model = load(tmp_path).float()
    for depth in (1, 2, 4):
        whole, kv = model(TOKENS, num_loops=depth), transformers.DynamicCache()
        parts = [model(ids, num_loops=depth, past_key_values=kv) for ids in TOKENS.split(1, dim=1)]
        assert gap(torch.cat([p.logits for p in parts], dim=1), whole.logits) < 1e-4


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(("recurrent", rule) for rule in RULES),
        *((n, r) for n in ARCHITECTURES if n not in ("recurrent", "fixed") for r in RULES[:2]),
    ],
)
@torch.no_grad()
def test_exits_equal_the_reference_decoder(folder, name, rule):
    """In one pass, in chunks over a cache, and in a padded batch: same depths, same logits."""
    model = load(folder, name)
    logits, depths = reference(build(name), rule)
    if name == "recurrent":
        assert len(set(depths)) > 1, f"{rule} should stop tokens at different depths"
    out = model(TOKENS, exit=rule)
    assert out.exit_depths[0].tolist() == depths
    assert gap(out.logits[0], logits) < 1e-5

    kv, parts = transformers.DynamicCache(), []
    for ids in TOKENS.split([9, 1, 1, 4, *[1] * (len(IDS) - 15)], dim=1):
        parts.append(model(ids, exit=rule, past_key_values=kv))
    assert torch.cat([p.exit_depths for p in parts], dim=1)[0].tolist() == depths
    assert gap(torch.cat([p.logits for p in parts], dim=1)[0], logits) < 1e-5

    pads = 6
    padded = torch.full((2, len(IDS) + pads), 7)
    mask = torch.zeros_like(padded)
    padded[0, pads:], mask[0, pads:] = TOKENS[0], 1
    padded[1, : len(IDS)], mask[1, : len(IDS)] = TOKENS[0], 1
    out = model(padded, attention_mask=mask, exit=rule)
    for row, places in ((0, slice(pads, None)), (1, slice(None, len(IDS)))):
        assert out.exit_depths[row, places].tolist() == depths
        assert gap(out.logits[row, places], logits) < 1e-5
    assert int(out.exit_depths[mask == 0].sum()) == 0, "padding does not run"
    assert bool(torch.isfinite(out.logits).all())


@torch.no_grad()
def test_exits_run_no_more_than_they_must(folder):
    """Rows that have stopped do not go through the core again."""
    model, rows = load(folder), []
    step = model.model.core_step
    model.model.core_step = lambda latent, *rest: rows.append(len(latent)) or step(latent, *rest)
    try:
        out = model(TOKENS, exit="latent-change:0.9,max=6")
    finally:
        del model.model.core_step
    assert sum(rows) == int(out.exit_depths.sum()) < 6 * len(IDS)


@torch.no_grad()
def test_labels_are_shifted_here(folder):
    model = load(folder)
    labels = TOKENS.clone()
    labels[0, 5] = -100
    out = model(TOKENS, labels=labels, num_loops=2)
    log_p = out.logits[0, :-1].float().log_softmax(dim=-1)
    each = -log_p.gather(1, TOKENS[0, 1:, None]).squeeze(1)
    kept = labels[0, 1:] != -100
    assert abs(float(out.loss) - float(each[kept].mean())) < 1e-6
    summed = model(TOKENS, labels=labels, num_loops=2, num_items_in_batch=4).loss
    assert abs(float(summed) - float(each[kept].sum()) / 4) < 1e-5


@torch.no_grad()
def test_logits_to_keep(folder):
    model = load(folder)
    for asked in ({"num_loops": 2}, {"exit": "kl:0.2"}, {"exit": "latent-change:0.9"}):
        whole = model(TOKENS, **asked).logits
        assert gap(model(TOKENS, logits_to_keep=3, **asked).logits, whole[:, -3:]) < 1e-12
        chosen = torch.tensor([0, 4])
        assert gap(model(TOKENS, logits_to_keep=chosen, **asked).logits, whole[:, chosen]) < 1e-12


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_u04_padding_on_either_side_changes_nothing(folder, kind, side):
    model = load(folder)
    for pads in (1, 6):
        ids = torch.full((2, len(IDS) + pads), 99)
        mask = torch.zeros_like(ids)
        places = slice(pads, None) if side == "left" else slice(None, len(IDS))
        ids[0, places], mask[0, places] = TOKENS[0], 1
        ids[1], mask[1] = torch.arange(len(IDS) + pads), 1
        out = model(ids, attention_mask=mask.to(kind), num_loops=3)
        alone = model(TOKENS, num_loops=3).logits[0]
        assert gap(out.logits[0, places], alone) < 1e-9
        assert gap(out.logits[1], model(ids[1:], num_loops=3).logits[0]) < 1e-9
        assert bool(torch.isfinite(out.logits).all())
        ids[0][mask[0] == 0] = 3  # what padding is filled with does not matter
        again = model(ids, attention_mask=mask.to(kind), num_loops=3)
        assert gap(again.logits[0, places], alone) < 1e-9


@torch.no_grad()
def test_u65_texts_packed_into_one_row_do_not_see_one_another(folder):
    """As transformers does it: positions that start again begin another text."""
    model = load(folder)
    two = torch.tensor([IDS[:9] + IDS[5:20]])
    positions = torch.tensor([[*range(9), *range(15)]])
    out = model(two, position_ids=positions, num_loops=3).logits[0]
    assert gap(out[:9], model(two[:, :9], num_loops=3).logits[0]) < 1e-9
    assert gap(out[9:], model(two[:, 9:], num_loops=3).logits[0]) < 1e-9
    assert gap(out[9:], model(two, num_loops=3).logits[0, 9:]) > 1e-3


@torch.no_grad()
def test_nothing_is_remembered_between_calls(folder):
    model = load(folder)
    before = model(TOKENS).logits
    config = model.config.to_dict()
    model(TOKENS, num_loops=1)
    model(TOKENS, exit="latent-change:0.9")
    model.generate(TOKENS, num_loops=5, max_new_tokens=2)
    assert torch.equal(model(TOKENS).logits, before)
    assert model.config.to_dict() == config and model.default_plan is None


@pytest.mark.parametrize(
    ("asked", "error", "part"),
    [
        ({"num_loops": 2, "exit": "kl:0.1"}, ConfigError, "contradict"),
        ({"num_loops": 0}, DepthError, "must be at least 1"),
        ({"num_loops": -3}, DepthError, "must be at least 1"),
        ({"num_loops": 10**6}, DepthError, "limit"),
        ({"num_loops": 2.0}, ConfigError, "whole number"),
        ({"num_loops": True}, ConfigError, "whole number"),
        ({"exit": "latnt-change:0.1"}, ExitError, "latent-change"),
        ({"exit": "balanced"}, ExitError, "no tier"),
        ({"exit": "oracle:0.1"}, ExitError, "later recurrences"),
        ({"exit": "probe:0.1"}, ExitError, "fitted"),
        ({"exit": 0.1}, ConfigError, "exit rule"),
        ({"output_attentions": True}, ConfigError, "output_attentions"),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, ConfigError, "inputs_embeds"),
        ({"exit": "kl:0.1", "output_hidden_states": True}, ConfigError, "num_loops"),
        ({"attention_mask": torch.ones(1, 3)}, ShapeError, "attention_mask is (1, 3)"),
        ({"attention_mask": torch.full((1, len(IDS)), 0.5)}, ShapeError, "0 and 1"),
        ({"attention_mask": torch.full((1, len(IDS)), 2)}, ShapeError, "0 and 1"),
        ({"position_ids": torch.arange(3)}, ShapeError, "position_ids"),
    ],
)
def test_what_cannot_be_done_is_refused(folder, asked, error, part):
    model = load(folder)
    with pytest.raises(error) as caught:
        model(TOKENS, **asked)
    assert part in str(caught.value)
    with pytest.raises(TypeError, match="num_loop"):
        model(TOKENS, num_loop=4)


def test_exits_are_refused_in_training(folder):
    model = load(folder).train()
    with pytest.raises(ConfigError, match="cannot be trained through"):
        model(TOKENS, exit="kl:0.1")


def test_a_limit_of_the_weights_is_kept(folder):
    model = load(folder, "fixed")
    assert model.config.num_loops == 1
    with pytest.raises(DepthError, match="limit of 1"):
        model(TOKENS, num_loops=2)


@torch.no_grad()
def test_latents_after_each_recurrence(folder):
    model = load(folder)
    out = model(TOKENS, num_loops=4, output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(1, len(IDS), 32)] * 5
    shallow = model(TOKENS, num_loops=2, output_hidden_states=True)
    assert torch.equal(out.hidden_states[2], shallow.hidden_states[-1])
    assert not torch.equal(out.hidden_states[3], out.hidden_states[4])
    assert model(TOKENS).hidden_states is None


@torch.no_grad()
def test_outputs_as_tuples(folder):
    model = load(folder)
    named, plain = model(TOKENS), model(TOKENS, return_dict=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], named.logits) and named[CACHE] is not None
    assert CACHE not in model(TOKENS, use_cache=False)


def test_u09_caches_are_sized_by_the_layers_a_token_passes(folder):
    model = load(folder)
    g = model.model.geometry
    assert model.config.num_physical_layers == g.n_layers == 4
    assert model.config.num_hidden_layers == g.effective_layers(3) == 8
    for make in (
        lambda: transformers.DynamicCache(config=model.config),
        lambda: transformers.StaticCache(config=model.config, max_cache_len=64),
    ):
        kv = make()
        text = model.generate(TOKENS, **{CACHE: kv}, max_new_tokens=10, do_sample=False)
        assert text.shape == (1, len(IDS) + 10) and len(kv) == 8
        model(text[:, -1:], past_key_values=kv)  # generate does not feed its last token
        lengths = {int(kv.get_seq_length(layer)) for layer in range(8)}
        assert lengths == {len(IDS) + 10}
    with pytest.raises(ConfigError, match="tuple"):
        model(TOKENS, past_key_values=((torch.zeros(1), torch.zeros(1)),))
    both = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    with pytest.raises(ConfigError, match="EncoderDecoderCache"):
        model(TOKENS, past_key_values=both)


def test_a_cache_of_another_depth_is_refused(folder):
    """Its layers would be read as those of other recurrences, and nothing would fail."""
    model, kv = load(folder), transformers.DynamicCache()
    model(TOKENS, num_loops=4, past_key_values=kv)
    for asked in ({"num_loops": 2}, {"num_loops": 8}, {"exit": "kl:0.1,max=4"}):
        with pytest.raises(ConfigError, match="has 10 layers"):
            model(TOKENS[:, :1], past_key_values=kv, **asked)
    with pytest.raises(ConfigError, match="same thing"):
        model(TOKENS, past_key_values=kv, cache=kv)
