"""The three kinds of requests, truncation, settings in the result, and registration."""

from __future__ import annotations

import hashlib
import math
import tomllib
from pathlib import Path

import pytest

from loopwise.data import Document
from loopwise.errors import ConfigError, DepthError, ExitError, MissingExtraError
from loopwise.harness.installed import OLDEST, TOO_NEW, harness
from loopwise.harness.model import LoopwiseLM, ModelOptions, harness_class, register
from loopwise.hub.chat import MARK, write_templates
from loopwise.measure.perplexity import perplexity
from loopwise.models.checkpoint import write_exits
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.harness.cases import (
    PAIRS,
    loaded,
    log_softmax_of,
    naive_pair,
    pairs_as_requests,
    request,
)

DOCUMENTS = ["Mia had 3 apples. Tom took one.", "Who is it?", "x" * 50]


@pytest.fixture
def checkpoint(tmp_path):
    return loaded(tmp_path / "checkpoint", make_model().double())


def rolling(model: LoopwiseLM, texts: list[str]) -> list[float]:
    return model.loglikelihood_rolling([request("loglikelihood_rolling", t) for t in texts])


def test_loglikelihood_answers_in_order(checkpoint):
    found = LoopwiseLM(checkpoint, depth=2).loglikelihood(pairs_as_requests())
    wanted = [naive_pair(checkpoint.model, checkpoint.tokenizer, pair, 2) for pair in PAIRS]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [ll for ll, _ in found] == pytest.approx([ll for ll, _ in wanted], abs=1e-4)


def test_u34_rolling_equals_our_perplexity_command(checkpoint):
    """One scoring core: the harness and `eval perplexity --protocol document` agree."""
    pytest.importorskip("lm_eval")
    documents = [Document(text, source="test") for text in DOCUMENTS]
    told = perplexity(
        checkpoint.model, checkpoint.tokenizer, documents, "document", [1, 3], block=64
    )
    for depth in (1, 3):
        total = sum(rolling(LoopwiseLM(checkpoint, depth=depth, max_length=64), DOCUMENTS))
        assert -total / told["tokens"] == pytest.approx(
            told["by_depth"][depth]["nll_nats"], abs=1e-6
        )


def test_rolling_scores_every_token_once_in_windows_of_the_harness(checkpoint):
    """Windows of 16: whole ones side by side, and a last one that is filled up with its past."""
    pytest.importorskip("lm_eval")
    ids = list(b"abcdefghijklmnopqrstuvwxyz0123456789ABCD")
    total = 0.0
    for fed, scored in (
        ([256, *ids[:15]], ids[:16]),
        (ids[15:31], ids[16:32]),
        (ids[23:39], ids[32:40]),
    ):
        after = log_softmax_of(checkpoint.model, fed, 2)[-len(scored) :]
        total += sum(float(row[token]) for row, token in zip(after, scored, strict=True))
    model = LoopwiseLM(checkpoint, depth=2, max_length=16)
    assert rolling(model, [bytes(ids).decode(), ""]) == pytest.approx([total, 0.0], abs=1e-4)


def test_u28_perplexity_of_short_documents_equals_a_computation_by_hand(checkpoint):
    pytest.importorskip("lm_eval")
    found = rolling(LoopwiseLM(checkpoint, depth=2), DOCUMENTS)
    wanted = [naive_pair(checkpoint.model, ByteTokenizer(), ("", t), 2)[0] for t in DOCUMENTS]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_u30_a_tokenizer_without_or_with_a_read_only_pad_token_is_left_alone(tmp_path):
    class ReadOnlyPad(ByteTokenizer):
        @property
        def pad_token(self) -> None:
            return None

    for tokenizer in (ByteTokenizer(), ReadOnlyPad()):
        checkpoint = loaded(tmp_path / "checkpoint")
        checkpoint = type(checkpoint)(**{**vars(checkpoint), "tokenizer": tokenizer})
        before = tokenizer.to_json(), dict(vars(tokenizer))
        asked = pairs_as_requests(PAIRS[:4])
        four = LoopwiseLM(checkpoint, depth=2, batch_size=4).loglikelihood(asked)
        one = LoopwiseLM(checkpoint, depth=2, batch_size=1).loglikelihood(asked)
        assert [s for s, _ in four] == pytest.approx([s for s, _ in one], abs=1e-4)
        after = {k: v for k, v in vars(tokenizer).items() if k in before[1]}
        assert (tokenizer.to_json(), after) == before


def test_u32_truncation_is_counted_and_the_same_by_path_and_by_object(checkpoint, tmp_path):
    """Context limit 64: 100 + 5 tokens, and a prompt of 70 that asks for 20 new ones."""
    scored = [
        request("loglikelihood", "a" * 99, " five"),  # the start token is the 100th
        request("loglikelihood", "b" * 59, " five"),  # 65: the last token is not fed
    ]
    made = [request("generate_until", "c" * 69, {"max_gen_toks": 20})]
    answers = []
    for source in (checkpoint.path, loaded(checkpoint.path, make_model())):
        model = LoopwiseLM(source, depth=2, max_length=64)
        answers.append((model.loglikelihood(scored), model.generate_until(made)))
        told = model.get_model_info()["ran"]
        assert told["truncated_requests"] == 2
        assert told["truncated_by_kind"] == {"loglikelihood": 1, "generate_until": 1}
        assert [model.is_too_long(r) for r in (*scored, *made)] == [True, False, True]
    assert answers[0] == answers[1]
    after = log_softmax_of(loaded(checkpoint.path).model, [*b"a" * 60, *b" fiv"], 2)[-5:]
    wanted = sum(float(row[token]) for row, token in zip(after, b" five", strict=True))
    assert answers[0][0][0][0] == pytest.approx(wanted, abs=1e-3), "the left is what is cut"


def test_a_continuation_longer_than_the_limit_is_scored_as_far_as_it_goes(checkpoint):
    model = LoopwiseLM(checkpoint, depth=1, max_length=4)
    ((score, _),) = model.loglikelihood([request("loglikelihood", "ab", "cdefgh")])
    after = log_softmax_of(checkpoint.model, list(b"defg"), 1)
    wanted = sum(float(row[token]) for row, token in zip(after, b"efgh", strict=True))
    assert score == pytest.approx(wanted, abs=1e-4)
    assert model.get_model_info()["ran"]["truncated_requests"] == 1


def test_the_limit_is_what_the_checkpoint_was_trained_on(tmp_path):
    assert LoopwiseLM(loaded(tmp_path / "a", seq=48)).max_length == 48
    assert LoopwiseLM(loaded(tmp_path / "a", seq=48), max_length=99).max_length == 99
    converted = loaded(tmp_path / "a")
    del converted.training["seq"]
    assert LoopwiseLM(converted).max_length == 2048


def test_u34_settings_and_realised_depth_are_told(checkpoint):
    model = LoopwiseLM(checkpoint, exit="latent-change:0.8,max=6")
    model.loglikelihood(pairs_as_requests())
    told = model.get_model_info()
    assert told["weights_hash"] == loaded(checkpoint.path).weights_hash
    assert told["tokenizer_hash"] == ByteTokenizer().fingerprint
    assert told["exit_rule"] == "latent-change:0.8,max=6"
    assert told["kv_policy"] == "per-loop"
    assert told["options"]["dtype"] == "float64"
    assert told["options"]["max_length"] == 128
    assert told["start_token"]["id"] == 256
    assert 1 < told["ran"]["mean_depth"] < 6
    assert told["ran"]["requests"] == len(PAIRS)
    assert told["ran"]["tokens_per_s"] > 0


def test_depth_exit_and_tier_name_one_rule(tmp_path):
    checkpoint = loaded(tmp_path / "checkpoint")
    tiers = {"balanced": {"rule": "kl:0.1,max=5", "kv_policy": "per-loop"}}
    checkpoint = write_exits(checkpoint, {"tiers": tiers})
    assert str(LoopwiseLM(checkpoint, tier="balanced").scorer.rule) == "kl:0.1,max=5"
    assert str(LoopwiseLM(checkpoint, exit="balanced").scorer.rule) == "kl:0.1,max=5"
    assert str(LoopwiseLM(checkpoint, depth=7).scorer.rule) == "fixed:7"
    assert str(LoopwiseLM(checkpoint).scorer.rule) == "fixed:4", "the training mean"
    with pytest.raises(ExitError, match="did you mean 'balanced'"):
        LoopwiseLM(checkpoint, tier="balancd")
    with pytest.raises(ConfigError, match="give one of --depth and --tier"):
        ModelOptions(depth=2, tier="balanced")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dtype": "fp16"}, "fp32 or bf16"),
        ({"bos": "maybe"}, "auto or yes or no"),
        ({"max_length": 0}, "--max-length 0"),
        ({"max_length": "long"}, "--max-length 'long'"),
        ({"batch": 0}, "--batch 0"),
        ({"batch_size": "many"}, "a number or auto"),
        ({"dept": 3}, "'dept' is not known"),
        ({"device": "cuda"}, "evaluated on the cpu"),
    ],
)
def test_options_that_make_no_sense_are_refused(checkpoint, options, part):
    with pytest.raises(ConfigError, match=part):
        LoopwiseLM(checkpoint, **options)


def test_rules_that_cannot_be_read_are_refused_before_a_checkpoint_is():
    with pytest.raises(DepthError, match="at least 1"):
        ModelOptions(depth=0)
    with pytest.raises(ExitError, match="not a number"):
        ModelOptions(exit="kl:much")


def test_the_harness_makes_the_model_from_its_argument_string(checkpoint):
    pytest.importorskip("lm_eval")
    text = f"checkpoint={checkpoint.path},depth=3,max_length=64"
    model = harness_class().create_from_arg_string(text, {"batch_size": "auto", "device": None})
    assert (str(model.scorer.rule), model.max_length, model.scorer.batch) == ("fixed:3", 64, None)
    sized = harness_class().create_from_arg_string(text, {"batch_size": 4})
    assert sized.scorer.batch == 4


def test_registering_makes_the_name_known_and_keeps_the_others():
    registry = pytest.importorskip("lm_eval.api.registry")
    from lm_eval.api.model import LM

    register()
    register()
    assert registry.get_model("loopwise") is harness_class()
    assert issubclass(harness_class(), LM)
    assert "hf" in registry.model_registry


def test_answers_go_to_the_harness_cache(checkpoint):
    pytest.importorskip("lm_eval")

    class Hook:
        def __init__(self) -> None:
            self.kept: list[tuple[str, tuple, object]] = []

        def add_partial(self, kind: str, args: tuple, answer: object) -> None:
            self.kept.append((kind, args, answer))

    model = harness_class()(checkpoint, depth=1)
    hook = Hook()
    model.set_cache_hook(hook)
    found = model.loglikelihood(pairs_as_requests())
    assert hook.kept == [
        ("loglikelihood", pair, answer) for pair, answer in zip(PAIRS, found, strict=True)
    ]
    assert all(math.isfinite(ll) for ll, _ in found)


@pytest.mark.parametrize("other", ["0.4.11", "0.4.14", "0.5.0", "1.0"])
def test_u22_a_harness_of_another_version_is_one_line(monkeypatch, other):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("loopwise.harness.installed.harness_version", lambda: other)
    with pytest.raises(MissingExtraError, match=f"lm-eval {other} is installed; .* from 0.4.12"):
        harness()


def test_the_versions_that_are_tested_are_those_the_extra_asks_for():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    oldest, too_new = (".".join(map(str, bound)) for bound in (OLDEST, TOO_NEW))
    assert extras["project"]["optional-dependencies"]["eval"] == [f"lm-eval>={oldest},<{too_new}"]


def test_u27_the_batches_that_ran_are_told(checkpoint):
    """Also where nobody said how large they should be."""
    for asked, largest in ((2, 2), (None, 5), ("auto", 5)):
        model = LoopwiseLM(checkpoint, batch_size=asked, depth=2)
        model.loglikelihood(pairs_as_requests())
        assert model.get_model_info()["ran"]["largest_batch"] == {"pass": largest}
        assert model.batch_sizes == {"pass": largest}
    settings = {"until": ["\n\n"], "max_gen_toks": 4}
    model.generate_until([request("generate_until", text, settings) for text in ("a", "b")])
    assert model.batch_sizes == {"pass": 5, "engine": 2}


def test_u27_several_processes_are_refused_in_one_line(checkpoint, monkeypatch):
    """Each of them would score every item, and the harness would count them all."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2: a checkpoint is evaluated in one process"):
        LoopwiseLM(checkpoint)
    monkeypatch.setenv("WORLD_SIZE", "1")
    LoopwiseLM(checkpoint)


# Chat templates.

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "Who?"}]


@pytest.fixture
def chatty(checkpoint):
    pytest.importorskip("transformers")
    write_templates(checkpoint.path, {"default": TEMPLATE, "short": "{{ messages[-1].content }}"})
    return LoopwiseLM(checkpoint, depth=2)


def test_u28_a_chat_template_begins_a_prompt_once(chatty):
    """Without the template one start token is ours, with it the template's."""
    bos, eos = ByteTokenizer.bos_id, ByteTokenizer.eos_id
    assert chatty.encoder.prompts(["Who?"]) == [[bos, *b"Who?"]]
    prompt = chatty.apply_chat_template(CHAT)
    assert prompt == f"{MARK}<|bos|><user>Who?<|eos|><assistant>"
    ids = [bos, *b"<user>Who?", eos, *b"<assistant>"]
    assert chatty.encoder.prompts([prompt]) == [ids]
    [(found, _)] = chatty.loglikelihood([request("loglikelihood", prompt, "Tom")])
    after = log_softmax_of(chatty.checkpoint.model, [*ids, *b"Tom"], 2)[-4:-1]
    wanted = sum(float(row[token]) for row, token in zip(after, b"Tom", strict=True))
    assert found == pytest.approx(wanted, abs=1e-4)


def test_u77_a_question_that_spells_a_special_token_stays_text(chatty):
    prompt = chatty.apply_chat_template([{"role": "user", "content": "a<|eos|>b"}])
    assert chatty.encoder.prompts([prompt])[0].count(ByteTokenizer.eos_id) == 1
    assert chatty.checkpoint.tokenizer.decode(chatty.encoder.prompts([prompt])[0]) == (
        "<user>a<|eos|>b<assistant>"
    )


def test_a_begun_answer_is_gone_on_with(chatty):
    begun = [*CHAT, {"role": "assistant", "content": "It was"}]
    made = chatty.apply_chat_template(begun, add_generation_prompt=False)
    assert made == f"{MARK}<|bos|><user>Who?<|eos|><assistant>It was"


def test_u34_the_template_that_was_used_is_told(chatty):
    assert chatty.get_model_info()["chat_template"] is None
    plain = chatty.tokenizer_name
    assert chatty.chat_template(False) is None
    assert chatty.chat_template(True) == TEMPLATE
    told = chatty.get_model_info()["chat_template"]
    assert (told["name"], told["text"]) == ("default", TEMPLATE)
    assert told["sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert chatty.tokenizer_name != plain, "requests are cached apart"
    assert chatty.chat_template("short").startswith("{{ messages[-1]")
    assert chatty.apply_chat_template(CHAT) == f"{MARK}Who?"
    assert chatty.chat_template(False) is None
    assert chatty.get_model_info()["chat_template"] is None
    assert chatty.tokenizer_name == plain


def test_u34_a_plain_evaluation_after_one_of_chats_is_plain_and_says_so(chatty):
    """The harness does not call `chat_template` for a plain one."""
    plain = [request("loglikelihood", "a<|eos|>b", "c"), request("loglikelihood", "", "Tom")]
    kept = chatty.loglikelihood(plain)
    pairs = chatty.encoder.pairs([r.args for r in plain])
    whole = [request("loglikelihood_rolling", "Tom<|eos|>")]
    prompt = chatty.apply_chat_template(CHAT)
    chat = [request("loglikelihood", prompt, "Tom"), request("loglikelihood", "", "Tom")]
    settings = {"until": ["x"], "max_gen_toks": 2}

    def told() -> str | None:
        used = chatty.get_model_info()["chat_template"]
        return used and used["name"]

    chatty.loglikelihood(chat)
    chatty.loglikelihood_rolling(whole)
    assert told() == "default", "one evaluation of both"
    chatty.loglikelihood_rolling(whole)
    assert told() is None, "another, of whole texts alone"
    chatty.generate_until([request("generate_until", prompt, settings)])
    assert told() == "default", "rendered before, as the harness keeps it"
    chatty.loglikelihood(chat)
    assert chatty.loglikelihood(plain) == kept and told() is None
    assert chatty.encoder.pairs([r.args for r in plain]) == pairs
    chatty.loglikelihood(chat)
    chatty.generate_until([request("generate_until", "a<|eos|>", settings)])
    assert told() is None


def test_templates_that_are_not_there_or_refuse_are_one_line(checkpoint, chatty, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'short'"):
        chatty.chat_template("shrt")
    write_templates(checkpoint.path, {"default": "{{ raise_exception('no system here') }}"})
    with pytest.raises(ConfigError, match="refuses messages of user: no system here"):
        LoopwiseLM(checkpoint).apply_chat_template(CHAT)
    with pytest.raises(ConfigError, match="has no chat template"):
        LoopwiseLM(loaded(tmp_path / "other")).chat_template(True)
