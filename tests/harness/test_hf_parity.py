"""The same weights under the harness's own Hugging Face backend give the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.data import Document
from loopwise.harness.model import harness_class, register
from loopwise.hub.convert import convert
from loopwise.measure.perplexity import perplexity
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import BPETokenizer
from tests.harness.cases import PAIRS, framed, log_softmax_of, write_local
from tests.naive import roughen

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LIMIT = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A random Llama as transformers saves it, as it is converted, and question sets."""
    root = tmp_path_factory.mktemp("parity")
    data = write_local(root / "data")
    texts = [path.read_bytes().decode("utf-8", "ignore") for path in data.glob("*.jsonl")]
    tokenizer = BPETokenizer.train(texts, 400)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=LIMIT,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    source = root / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    (source / "tokenizer.json").write_text(tokenizer.to_json())
    convert(source, root / "converted")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    ).save_pretrained(source)
    return source, root / "converted", data


@pytest.fixture(scope="module")
def both(folders) -> tuple[Any, Any]:
    from lm_eval.models.huggingface import HFLM

    source, converted, _ = folders
    theirs = HFLM(pretrained=str(source), device="cpu", dtype="float32", batch_size=3)
    ours = harness_class()(converted, depth=1, max_length=LIMIT)
    assert (theirs.max_length, theirs.prefix_token_id) == (LIMIT, ours.encoder.start.id)
    return theirs, ours


@pytest.mark.parametrize("starts", [False, True], ids=["plain", "start token"])
def test_a_tokenizer_that_puts_a_start_token_first_is_followed(folders, tmp_path, starts):
    """Llama's put one before every text, SmolLM2's do not; both as the Hugging Face backend."""
    from lm_eval.models.huggingface import HFLM

    source, converted, _ = folders
    checkpoint = load_checkpoint(converted)
    if starts:
        checkpoint = replace(checkpoint, tokenizer=framed(checkpoint.tokenizer))
    file = tmp_path / "tokenizer.json"
    file.write_text(checkpoint.tokenizer.to_json())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    theirs = HFLM(
        pretrained=str(source), tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=2
    )
    ours = harness_class()(checkpoint, depth=1, max_length=LIMIT)
    assert ours.encoder.start.added is starts
    scored = instances("loglikelihood", *PAIRS)
    assert [ll for ll, _ in ours.loglikelihood(scored)] == pytest.approx(
        [ll for ll, _ in theirs.loglikelihood(scored, disable_tqdm=True)], abs=1e-4
    )
    settings = {"until": ["\n\n\n"], "max_gen_toks": 8, "do_sample": False}
    made = instances("generate_until", ("Mia had", settings), ("Who?", settings))
    assert ours.generate_until(made) == theirs.generate_until(made, disable_tqdm=True)
    # Their whole texts then begin with two start tokens, ours with one (docs/architecture.md).
    whole = instances("loglikelihood_rolling", ("Mia had 3 apples.",))
    bos, ids = checkpoint.tokenizer.bos_id, checkpoint.tokenizer.encode("Mia had 3 apples.")
    fed = [bos, bos, *ids] if starts else [bos, *ids]
    after = log_softmax_of(checkpoint.model, fed, 1)[:-1]
    by_hand = float(after.gather(1, torch.tensor(fed[1:])[:, None]).sum())
    assert theirs.loglikelihood_rolling(whole, disable_tqdm=True) == pytest.approx(
        [by_hand], abs=1e-3
    )
    after = log_softmax_of(checkpoint.model, [bos, *ids], 1)[:-1]
    once = float(after.gather(1, torch.tensor(ids)[:, None]).sum())
    assert ours.loglikelihood_rolling(whole) == pytest.approx([once], abs=1e-3)


@pytest.fixture(scope="module")
def own(folders) -> Path:
    """A checkpoint as training here leaves it: texts begin with a start token."""
    root = folders[0].parent
    tokenizer = load_checkpoint(folders[1]).tokenizer
    torch.manual_seed(1)
    config = RecurrentConfig(
        vocab_size=tokenizer.vocab_size, d_model=48, n_heads=4, n_kv_heads=2, d_ff=64
    )
    training = {"seq": LIMIT, "depth": {"true_mean": 3.0}}
    model = RecurrentModel(config)
    roughen(model, 1)
    save_checkpoint(root / "own", model, tokenizer, training)
    return root / "own"


def hf_of(path: Path, **options: Any) -> Any:
    """Their backend on a folder of ours, which it loads by the Auto classes."""
    from lm_eval.models.huggingface import HFLM

    import loopwise.hub  # noqa: F401 - what makes the Auto classes know us

    return HFLM(
        pretrained=str(path),
        device="cpu",
        dtype="float32",
        batch_size=2,
        max_length=LIMIT,
        **options,
    )


def test_a_folder_of_ours_scores_the_same_under_their_backend(own):
    """Its tokenizer decoded the start token to nothing, so they took every text to begin with it
    and left it out."""
    theirs, ours = hf_of(own), harness_class()(own)
    assert ours.encoder.start.added
    assert theirs.tok_encode("Tom") == ours.encoder.prompts(["Tom"])[0]
    scored = instances("loglikelihood", *PAIRS, ("many words " * 40, " and an end"))
    wanted = theirs.loglikelihood(scored, disable_tqdm=True)
    assert [ll for ll, _ in ours.loglikelihood(scored)] == pytest.approx(
        [ll for ll, _ in wanted], abs=1e-4
    )
    settings = {"until": ["\n\n\n"], "max_gen_toks": 8, "do_sample": False}
    made = instances("generate_until", ("Mia had", settings), ("Who?", settings))
    assert ours.generate_until(made) == theirs.generate_until(made, disable_tqdm=True)
    # Of whole texts theirs scores a second start token, as with Llama; told to add none, it agrees.
    whole = instances("loglikelihood_rolling", ("Mia had 3 apples.",), ("a longer one " * 30,))
    once = hf_of(own, add_bos_token=False).loglikelihood_rolling(whole, disable_tqdm=True)
    assert ours.loglikelihood_rolling(whole) == pytest.approx(once, abs=1e-3, rel=1e-5)
    twice = theirs.loglikelihood_rolling(whole[:1], disable_tqdm=True)
    ids = theirs.tok_encode("Mia had 3 apples.")
    fed = [ids[0], *ids]
    after = log_softmax_of(load_checkpoint(own).model, fed, 3)[:-1]
    by_hand = float(after.gather(1, torch.tensor(fed[1:])[:, None]).sum())
    assert twice == pytest.approx([by_hand], abs=1e-3)


def test_a_converted_folder_scores_the_same_under_their_backend(folders):
    """Its source puts no start token before a text, and neither do we, whole texts among them."""
    theirs, ours = hf_of(folders[1]), harness_class()(folders[1], max_length=LIMIT)
    assert not ours.encoder.start.added
    scored = instances("loglikelihood", *PAIRS)
    assert [ll for ll, _ in ours.loglikelihood(scored)] == pytest.approx(
        [ll for ll, _ in theirs.loglikelihood(scored, disable_tqdm=True)], abs=1e-4
    )
    whole = instances("loglikelihood_rolling", ("Mia had 3 apples.",), ("a longer one " * 30,))
    wanted = theirs.loglikelihood_rolling(whole, disable_tqdm=True)
    assert ours.loglikelihood_rolling(whole) == pytest.approx(wanted, abs=1e-3, rel=1e-5)
    text = "Mia had 3 apples."
    checkpoint = load_checkpoint(folders[1])
    found = perplexity(checkpoint.model, checkpoint.tokenizer, [Document(text)], "document", [1])
    n = len(checkpoint.tokenizer.encode(text))
    assert found["by_depth"][1]["nll_nats"] * n == pytest.approx(-wanted[0], abs=1e-3)


def instances(kind: str, *arguments: tuple) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_loglikelihoods_are_the_same_empty_contexts_and_long_ones_among_them(both):
    theirs, ours = both
    long = ("many words " * 40, " and an end")
    asked = instances("loglikelihood", *PAIRS, long, ("trailing  ", "spaces"))
    wanted = theirs.loglikelihood(asked, disable_tqdm=True)
    found = ours.loglikelihood(asked)
    assert [ll for ll, _ in found] == pytest.approx([ll for ll, _ in wanted], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert ours.get_model_info()["ran"]["truncated_requests"] == 1


def test_rolling_is_the_same_over_one_window_and_over_several(both):
    theirs, ours = both
    texts = ["short text", "a longer one, " * 3, "one that needs windows. " * 40]
    asked = instances("loglikelihood_rolling", *((text,) for text in texts))
    wanted = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(wanted, rel=1e-5)


def test_greedy_answers_are_the_same_stop_strings_and_truncation_among_them(both):
    theirs, ours = both
    settings = {"until": ["e"], "max_gen_toks": 10, "do_sample": False}
    free = {**settings, "until": ["\n\n\n\n"]}
    asked = instances(
        "generate_until",
        ("Mia had", settings),
        ("Who has the red ball?", free),
        ("many words " * 40, free),
    )
    wanted = theirs.generate_until(asked, disable_tqdm=True)
    assert ours.generate_until(asked) == wanted
    assert any(wanted)


def test_tasks_score_the_same_to_four_decimals(folders):
    """Through ``simple_evaluate`` with both models by name, and perplexity of whole texts."""
    from lm_eval.tasks import TaskManager

    from loopwise.harness.tasks import write_tasks

    source, converted, data = folders
    write_tasks(source.parent / "tasks", data, blimp=False)
    register()
    names = ["piqa_local", "arc_easy_local", "hellaswag_local", "winogrande_local"]
    names += ["lambada_openai_local", "copa_local", "wikitext_local"]
    models = {
        "hf": {"pretrained": str(source), "dtype": "float32", "device": "cpu"},
        "loopwise": {"checkpoint": str(converted), "depth": 1, "max_length": LIMIT},
    }
    found = {
        name: lm_eval.simple_evaluate(
            model=name,
            model_args=arguments,
            tasks=names,
            batch_size=4,
            bootstrap_iters=0,
            task_manager=TaskManager(
                include_path=str(source.parent / "tasks"), include_defaults=False
            ),
        )
        for name, arguments in models.items()
    }
    compared = 0
    for task in names:
        for metric, value in found["hf"]["results"][task].items():
            if isinstance(value, float):
                assert found["loopwise"]["results"][task][metric] == pytest.approx(
                    value, rel=1e-4
                ), (task, metric)
                compared += 1
        pairs = zip(found["hf"]["samples"][task], found["loopwise"]["samples"][task], strict=True)
        for theirs, ours in pairs:
            assert flat(ours["resps"]) == pytest.approx(flat(theirs["resps"]), abs=1e-4)
    assert compared == 13
    told = found["loopwise"]["config"]
    assert told["exit_rule"] == "fixed:1" and told["ran"]["mean_depth"] == 1.0


def flat(value: Any) -> list[float]:
    """Numbers of nested answers; whole texts have large ones, so by their order of magnitude."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in flat(part)]
    return [float(value) / max(1.0, abs(float(value)) / 10)]
