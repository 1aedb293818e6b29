"""Stock generation: greedy, sampling, beams, assisted; at a depth and under exit rules."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import ConfigError, DepthError, ExitError
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.measure.tiers import write_tiers
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint, write_exits
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import BPETokenizer
from tests.conftest import TINY
from tests.hub.auto.folders import IDS, TRAINING, build, gap, saved

transformers = pytest.importorskip("transformers")
import loopwise.hub  # noqa: E402, F401 - what makes the Auto classes know us
from loopwise.engine.reference import ReferenceDecoder  # noqa: E402
from loopwise.hub.auto.cache import CACHE  # noqa: E402

PROMPT = torch.tensor([IDS])
RULES = ["latent-change:0.9,max=6", "kl:0.2,max=6", "fixed:4"]
GREEDY = {"do_sample": False, "pad_token_id": 0}


def load(path, **kwargs):
    """A model whose texts do not end: random ones would end anywhere."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def model(path):
    return load(path)


def continued(rule_text, prompt, n, model=None):
    """What the reference decoder goes on with, greedily."""
    rule = parse_rule(rule_text)
    model = model or build("recurrent")
    decoder = ReferenceDecoder(model, rule, build_policy(rule, None, model))
    fed = list(decoder.generate(prompt, n))
    made = [token.token_id for token in fed[len(prompt) :]]
    assert len(made) == n
    return made, [token.exit_depth for token in fed]


@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_that_of_the_reference_decoder(model, rule):
    wanted, depths = continued(rule, IDS, 12)
    text = model.generate(PROMPT, exit=rule, max_new_tokens=12, **GREEDY)
    assert text[0, len(IDS) :].tolist() == wanted
    again = model(text, exit=rule)  # the depths of a text, prompt and all
    assert again.exit_depths[0].tolist() == depths


def test_depth_is_an_argument_of_generation(model):
    texts = []
    for depth in (1, 2, 4, 8):
        wanted, _ = continued(f"fixed:{depth}", IDS, 8)
        text = model.generate(PROMPT, num_loops=depth, max_new_tokens=8, **GREEDY)
        assert text[0, len(IDS) :].tolist() == wanted
        texts.append(tuple(wanted))
    assert len(set(texts)) > 1, "depth should matter"
    usual = model.generate(PROMPT, max_new_tokens=8, **GREEDY)
    assert usual[0, len(IDS) :].tolist() == continued("fixed:3", IDS, 8)[0]


@pytest.mark.parametrize("asked", [{"num_loops": 1}, {"exit": "latent-change:0.9,max=6"}])
def test_a_generation_config_may_say_the_depth(model, path, asked):
    """Once it was ignored: `GenerationConfig` takes any name, and nobody looked for these."""
    settings = {"max_new_tokens": 8, **GREEDY}
    wanted = model.generate(PROMPT, **asked, **settings)
    other = model.generate(PROMPT, num_loops=5, **settings)
    assert not torch.equal(wanted, other), "depth should matter"
    config = transformers.GenerationConfig(**settings, **asked)
    assert torch.equal(model.generate(PROMPT, generation_config=config), wanted)
    assert torch.equal(model.generate(PROMPT, config), wanted)
    assert torch.equal(model.generate(PROMPT, generation_config=config, num_loops=5), other)
    draft, depths = load(path, num_loops=2), set()  # keeps its own depth
    draft.recurrence.register_forward_hook(lambda _, given, out: depths.add(given[2]))
    text = model.generate(PROMPT, generation_config=config, assistant_model=draft)
    assert torch.equal(text, wanted) and depths == {1, 2}
    model.generation_config = config
    assert torch.equal(model.generate(PROMPT), wanted)


def test_stop_strings(model, path):
    """transformers hands the tokenizer that they need on to the model, which has no use for it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    new = model.generate(PROMPT, max_new_tokens=40, **GREEDY)[0, len(IDS) :].tolist()
    at = next(n for n, i in enumerate(new) if chr(i).isascii() and chr(i).isprintable())
    stop = {"stop_strings": [chr(new[at])], "tokenizer": tokenizer}
    text = model.generate(PROMPT, **stop, max_new_tokens=40, **GREEDY)
    assert text[0, len(IDS) :].tolist() == new[: at + 1]


@pytest.mark.parametrize(
    ("asked", "error", "part"),
    [
        ({"num_loops": 2, "exit": "kl:0.1"}, ConfigError, "contradict"),
        ({"exit": "balanced"}, ExitError, "no tier"),
        ({"num_loop": 2}, ValueError, "num_loop"),
        ({"num_loops": 0}, DepthError, "num_loops=0 must be at least 1"),
        ({"assistant_early_exit": 2}, ConfigError, "num_loops=2 and give it as assistant_model"),
    ],
)
def test_what_cannot_be_done_is_refused(model, asked, error, part):
    with pytest.raises(error, match=part):
        model.generate(PROMPT, max_new_tokens=2, **asked)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
@pytest.mark.parametrize("asked", [{"num_loops": 3}, {"exit": "kl:0.2,max=6"}])
def test_u04_a_batch_of_prompts_generates_what_each_does_alone(model, kind, asked):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator) for n in (3, 9, 17)]
    ids, mask = torch.full((3, 17), 88), torch.zeros(3, 17, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, 17 - len(prompt) :], mask[row, 17 - len(prompt) :] = prompt, 1
    texts = model.generate(ids, attention_mask=mask.to(kind), max_new_tokens=16, **asked, **GREEDY)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], max_new_tokens=16, **asked, **GREEDY)
        assert texts[row, 17:].tolist() == alone[0, len(prompt) :].tolist(), f"prompt {row}"


@pytest.mark.parametrize("asked", [{}, {"num_loops": 5}, {"exit": "latent-change:0.9,max=6"}])
@pytest.mark.parametrize("rule", [{"exit": "kl:0.2,max=6"}, {}])
def test_a_static_cache_says_the_same(model, asked, rule):
    asked = asked or rule
    plain = model.generate(PROMPT, max_new_tokens=9, **asked, **GREEDY)
    static = model.generate(
        PROMPT, max_new_tokens=9, cache_implementation="static", **asked, **GREEDY
    )
    assert torch.equal(static, plain)
    ids, mask = torch.cat((torch.zeros(1, 3).long(), PROMPT), dim=1), torch.ones(1, 3 + len(IDS))
    mask[:, :3] = 0
    padded = model.generate(
        ids,
        attention_mask=mask.long(),
        max_new_tokens=9,
        cache_implementation="static",
        **asked,
        **GREEDY,
    )
    assert torch.equal(padded[:, 3:], plain)


def test_u25_the_cache_is_used(model):
    """After the prompt, one token at a time goes through the core."""
    seen = []
    handle = model.recurrence.register_forward_hook(lambda _, given, out: seen.append(out.shape[1]))
    model.generate(PROMPT, num_loops=2, max_new_tokens=6, **GREEDY)
    handle.remove()
    assert seen == [len(IDS)] * 2 + [1] * 10


def test_without_a_cache_the_text_is_the_same(model):
    plain = model.generate(PROMPT, max_new_tokens=6, **GREEDY)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=6, use_cache=False, **GREEDY), plain)


@pytest.mark.parametrize("asked", [{"num_loops": 3}, {"exit": "latent-change:0.9,max=6"}])
def test_beams(model, asked):
    """The cache follows its beams: without one the same texts win."""
    settings = {"num_beams": 3, "max_new_tokens": 7, "num_return_sequences": 3, **asked, **GREEDY}
    texts = model.generate(PROMPT, **settings)
    assert texts.shape == (3, len(IDS) + 7)
    assert torch.equal(model.generate(PROMPT, use_cache=False, **settings), texts)
    assert len({tuple(text.tolist()) for text in texts}) == 3


@pytest.mark.parametrize("asked", [{"num_loops": 3}, {"exit": "kl:0.2,max=6"}])
def test_sampling(model, asked):
    settings = {"do_sample": True, "top_k": 50, "max_new_tokens": 8, **asked}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(PROMPT, **{**GREEDY, **settings})[0].tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("asked", [{}, {"num_loops": 4}, {"exit": "latent-change:0.9,max=6"}])
def test_a_shallow_model_drafts_for_a_deep_one(model, path, asked):
    """Assisted generation says what greedy generation does; the draft keeps its own depth."""
    plain = model.generate(PROMPT, max_new_tokens=12, **asked, **GREEDY)
    draft, depths = load(path, num_loops=1), set()
    assert draft.config.num_loops == 1
    draft.recurrence.register_forward_hook(lambda _, given, out: depths.add(given[2]))
    text = model.generate(PROMPT, assistant_model=draft, max_new_tokens=12, **asked, **GREEDY)
    assert torch.equal(text, plain)
    assert depths == {1}


@pytest.mark.parametrize("tied", [True, False])
def test_sampling_with_an_assistant_of_other_tokens_is_refused(model, path, tmp_path, tied):
    """transformers cuts the assistant's head; it was an AttributeError out of its own code."""
    tokenizer = BPETokenizer.train(["the cat sat on the mat and the dog on the log; " * 8], 300)
    sizes = {**TINY, "tie_embeddings": tied}
    small = RecurrentModel(RecurrentConfig(vocab_size=tokenizer.vocab_size, **sizes))
    save_checkpoint(tmp_path / "draft", small, tokenizer, TRAINING)
    draft = load(tmp_path / "draft")
    own, its = map(transformers.AutoTokenizer.from_pretrained, (path, tmp_path / "draft"))
    asked = {"assistant_model": draft, "tokenizer": own, "assistant_tokenizer": its}
    asked |= {"max_new_tokens": 6, "pad_token_id": 0}
    sampled = transformers.GenerationConfig(do_sample=True, max_new_tokens=6, pad_token_id=0)
    for how in ({"do_sample": True}, {"generation_config": sampled}):
        with pytest.raises(ConfigError, match="use do_sample=False, or an assistant of the model"):
            model.generate(PROMPT, **asked, **how)
    plain = model.generate(PROMPT, max_new_tokens=6, **GREEDY)
    if transformers.__version__ != "5.0.0":  # which gives the assistant a mask of another length
        assert torch.equal(model.generate(PROMPT, **asked, do_sample=False), plain)
    with pytest.raises(ConfigError, match="has tokens that the model does not have"):
        draft.set_output_embeddings(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    same = {"assistant_model": load(path), "do_sample": True, "max_new_tokens": 6}
    assert model.generate(PROMPT, **same, pad_token_id=0).shape == (1, len(IDS) + 6)


def test_drafts_by_looking_up_the_prompt(model):
    ids = torch.tensor([[*IDS, *IDS, *IDS[:5]]])
    # Early versions look for an end and do not find None.
    settings = {"eos_token_id": 257, "min_new_tokens": 10, "max_new_tokens": 10, **GREEDY}
    for asked in ({"num_loops": 3}, {"exit": "kl:0.2,max=6"}):
        plain = model.generate(ids, **asked, **settings)
        text = model.generate(ids, prompt_lookup_num_tokens=3, **asked, **settings)
        assert torch.equal(text, plain)


def test_generation_goes_on_from_a_cache(model):
    kv = transformers.DynamicCache()
    first = model.generate(PROMPT, max_new_tokens=5, **{CACHE: kv}, **GREEDY)
    more = model.generate(first, max_new_tokens=5, **{CACHE: kv}, **GREEDY)
    assert torch.equal(more, model.generate(PROMPT, max_new_tokens=10, **GREEDY))


def test_scores_are_the_logits_of_a_plain_pass(model):
    out = model.generate(
        PROMPT,
        num_loops=4,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_logits=True,
        **GREEDY,
    )
    whole = model(out.sequences, num_loops=4).logits[0, len(IDS) - 1 : -1]
    assert gap(torch.stack(out.logits)[:, 0], whole.detach()) < 1e-5  # generate keeps float32


def test_texts_end_and_are_padded_with_the_ids_of_the_checkpoint(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.generation_config.bos_token_id == 256
    assert model.generation_config.eos_token_id == 257
    assert model.generation_config.pad_token_id == 257


def test_a_calibrated_tier_by_its_name(tmp_path):
    path = saved(tmp_path)
    checkpoint = load_checkpoint(path, torch.float64)
    write_tiers(checkpoint, {"balanced": {"rule": "latent-change:0.9,max=6"}})
    model = load(path)
    named = model(PROMPT, exit="balanced")
    assert torch.equal(named.exit_depths, model(PROMPT, exit="latent-change:0.9,max=6").exit_depths)
    assert len(set(named.exit_depths[0].tolist())) > 1
    text = model.generate(PROMPT, exit="balanced", max_new_tokens=5, **GREEDY)
    assert text[0, len(IDS) :].tolist() == continued("latent-change:0.9,max=6", IDS, 5)[0]
    with pytest.raises(ExitError, match="did you mean 'balanced'"):
        model(PROMPT, exit="balancd")


def test_tiers_of_other_weights_are_refused(tmp_path):
    path = saved(tmp_path)
    checkpoint = load_checkpoint(path, torch.float64)
    write_exits(checkpoint, {"tiers": {"balanced": {"rule": "kl:0.1"}}})
    text = (path / "exits.json").read_text().replace(checkpoint.weights_hash, "0" * 64)
    (path / "exits.json").write_text(text)
    with pytest.raises(ExitError, match="other weights"):
        load(path)(PROMPT, exit="balanced")


# Generated once with transformers 5.24.0, greedily at depth 3; every version must say the same.
PINNED = [219, 197, 219, 246, 219, 17, 49, 49]


def test_u22_pinned_text_without_a_word_of_deprecation(path):
    """Loaded by auto class and by class; at the oldest and at the newest version."""
    import logging

    from loopwise.hub.auto.model import LoopwiseForCausalLM

    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listening = Listening()
    logging.getLogger("transformers").addHandler(listening)
    try:
        for kind in (transformers.AutoModelForCausalLM, LoopwiseForCausalLM):
            text = kind.from_pretrained(path).generate(PROMPT, max_new_tokens=8, **GREEDY)
            assert text[0, len(IDS) :].tolist() == PINNED
    finally:
        logging.getLogger("transformers").removeHandler(listening)
    assert not [line for line in said if "deprecat" in line.lower() or "renamed" in line]
