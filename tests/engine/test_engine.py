"""The engine equals the reference decoder: tokens, depths, log-probabilities, whatever it does."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.engine import Engine, EngineConfig
from loopwise.engine.kv_policy import parse_kv_policy
from loopwise.errors import ExitError
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.models.costs import kv_bytes_per_token
from loopwise.tokenizer import ByteTokenizer
from tests.engine.decoding import (
    ARCHITECTURES,
    ASKING,
    KV_POLICIES,
    LOOPED,
    MAX_DEPTH,
    TEXT,
    Job,
    answer_of,
    build,
    check,
    check_all_came_back,
    engine_for,
    finish,
    job,
    live_rules,
    poison,
    reference,
    rule_for,
    run,
)
from tests.engine.test_reference import FITTED, forward

USUAL_RULES = ["kl", "latent-change", "second-difference", "probe", "fixed"]
USUAL_RULES += ["short-list-kl", "sketched-kl", "certified"]


def targets(name: str, shift: int) -> list[Job]:
    """Prompts of 1, 4 and 9 tokens, each under another rule."""
    rules = [rule_for(name, USUAL_RULES[(shift + i) % len(USUAL_RULES)]) for i in range(3)]
    return [
        job(TEXT[:1], rules[0], 3, seed=2),
        job(TEXT[:4], rules[1], 3, temperature=1.0, seed=11),
        job(TEXT[:9], rules[2], 2, repetition_penalty=1.4, seed=-5),
    ]


def strangers(name: str, rng: random.Random, n: int = 31) -> list[Job]:
    made = []
    for _ in range(n):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.3:
            prompt = [*TEXT[: rng.randint(1, 6)], *prompt[:3]]  # begins like a target
        rule = rule_for(name, rng.choice(USUAL_RULES))
        made.append(job(prompt, rule, rng.randint(1, 2), temperature=1.0, seed=rng.randrange(99)))
    return made


def run_late(engine: Engine, jobs: Sequence[Job], rng: random.Random) -> list[Any]:
    """In an order of its own, one after another while it runs."""
    order = list(range(len(jobs)))
    rng.shuffle(order)
    requests = {}
    for i in order:
        requests[i] = jobs[i].submit(engine)
        if rng.random() < 0.2:
            engine.step()
    finish(engine)
    return [requests[i].generation() for i in range(len(jobs))]


def kv_policies_of(name: str) -> list[str]:
    """All for the architectures with unique layers; the looped ones are alike but for the core."""
    if name == "fixed":
        return KV_POLICIES[:2]
    if name in ASKING:
        return [KV_POLICIES[0], KV_POLICIES[1 + ASKING.index(name)]]
    if name in LOOPED:
        return ["per-loop", *(KV_POLICIES[3:] if LOOPED.index(name) % 2 else KV_POLICIES[1:3])]
    return KV_POLICIES


@pytest.mark.parametrize(
    ("name", "kv"), [(a, kv) for a in ARCHITECTURES for kv in kv_policies_of(a)]
)
def test_the_engine_equals_the_reference_alone_and_among_31_strangers(name, kv):
    """U01, U02, U04, U12, U15, U42: every architecture and KV policy, exits and sizes by turns."""
    turn = ARCHITECTURES.index(name) * len(KV_POLICIES) + KV_POLICIES.index(kv)
    rng = random.Random(turn)
    chunk = [4, 3, 6, 32, 1][turn // 2 % 5]
    jobs = targets(name, turn)
    wanted = [reference(name, j, kv, 1 if kv == "per-loop" else chunk) for j in jobs]
    shape: dict[str, Any] = {"kv_policy": kv, "chunk": chunk}
    crowd = engine_for(
        name,
        **shape,
        page_size=[4, 3, 8, 1][turn % 4],
        slots=[34, 11][turn % 2],
        pages=[None, 40][turn % 2],
        prefill_rows=[120, 32][turn // 2 % 2],
        prefix_cache=turn % 3 != 0,
    )
    found = run_late(crowd, [*jobs, *strangers(name, rng)], rng)
    for generation, answer in zip(found, wanted, strict=False):
        check(generation, answer, "in a crowd")
    alone = jobs[turn % 3]
    solo = run(engine_for(name, **shape, slots=1, page_size=[16, 1, 5][turn % 3]), [alone])[0]
    check(solo, wanted[turn % 3], "alone")
    if name != "fixed":
        assert len({d for answer in wanted for d in answer.depths}) >= 2, "tests little"


@pytest.mark.parametrize("name", ["add", "ouro"])
@pytest.mark.parametrize("kv", KV_POLICIES)
def test_every_exit_rule_serves_side_by_side_with_all_others(kv, name):
    """U19: the rule belongs to the request; each equals its solo run by the reference."""
    chunk, rules = 4, live_rules(name)
    assert ("gate" in rules) is (name == "ouro")
    jobs = [job(TEXT[:7], rule_for(name, policy), 2) for policy in rules]
    jobs += [job(TEXT[:7], rule_for(name, "kl", min_depth=2, patience=2), 2)]
    jobs += [job(TEXT[:7], f"fixed:{depth}", 2) for depth in (1, MAX_DEPTH)]
    wanted = [reference(name, j, kv, 1 if kv == "per-loop" else chunk) for j in jobs]
    found = run(engine_for(name, kv_policy=kv, chunk=chunk, page_size=2), jobs)
    for j, generation, answer in zip(jobs, found, wanted, strict=True):
        check(generation, answer, str(j.rule))
    varied = [len(set(answer.depths)) >= 2 for answer in wanted[: len(rules)]]
    assert sum(varied) >= len(rules) - 2, "one depth for all tests little"
    assert set(wanted[-1].depths) == {MAX_DEPTH} and set(wanted[-2].depths) == {1}


@pytest.mark.parametrize("policy", [n for n in EXITS if EXITS[n].reads is Reads.LATENT])
def test_without_room_for_readings_latent_rules_decode_the_same(policy):
    name = "ouro" if policy == "gate" else "add"
    j = job(TEXT[:9], rule_for(name, policy), 3)
    engine = engine_for(name, logits_exits=False)
    check(run(engine, [j])[0], reference(name, j))


@pytest.mark.parametrize("policy", [n for n in EXITS if EXITS[n].reads.runs_coda])
def test_without_room_for_readings_rules_that_run_the_coda_are_refused(policy):
    engine = engine_for("add", logits_exits=False)
    with pytest.raises(ExitError, match=f"'{policy}' reads logits or what they are made of"):
        engine.submit([1], exit=rule_for("add", policy))


def test_a_gate_rule_needs_a_model_that_has_one():
    with pytest.raises(ExitError, match="this model has none.*latent-kl"):
        engine_for("add").submit([1], exit="gate:0.5")


@pytest.mark.parametrize("name", ["add", "ouro"])
def test_a_rule_takes_the_passes_it_declares(name):
    """What is charged by replay and live is what an engine runs, row by row."""
    for policy in live_rules(name):
        j = job(TEXT[:9], rule_for(name, policy), 3)
        engine = engine_for(name, prefix_cache=False, chunk=4)
        depths = np.array(answer_of(run(engine, [j])[0]).depths)
        stats, n = engine.stats(), len(depths)
        reads, outputs = EXITS[policy].reads, 3  # logits of prompt tokens but the last: not needed
        codas = depths.sum() if reads.runs_coda else n
        if name == "ouro" and not reads.runs_coda:
            codas = outputs  # no coda layers: nothing to leave an entry in
        assert stats["coda_rows"] == codas, policy
        if reads is Reads.LOGITS:
            assert stats["head_rows"] == codas, policy
        elif reads is Reads.LATENT:
            assert stats["head_rows"] == outputs, policy
        elif policy in ("short-list-kl", "sketched-kl"):  # once at 1, and the output, if later
            assert stats["head_rows"] == n + outputs - (depths[-3:] == 1).sum(), policy
        else:
            assert outputs <= stats["head_rows"] < codas + outputs, policy


@pytest.mark.parametrize("name", ["add", "attn-all"])
def test_float32_stays_within_a_ten_thousandth(name):
    jobs = [job(TEXT[:n], f"fixed:{depth}", 3) for n, depth in ((14, 3), (5, 5), (1, 2))]
    wanted = [reference(name, j, dtype=torch.float32) for j in jobs]
    engine = engine_for(name, torch.float32, page_size=4, chunk=5)
    rng = random.Random(3)
    for found, answer in zip(run(engine, [*jobs, *strangers(name, rng, 12)]), wanted, strict=False):
        check(found, answer)


def mixed(name: str) -> list[Job]:
    """Rules, lengths, greedy and drawn, one and two choices."""
    policies = ("kl", "latent-change", "second-difference", "fixed")
    rules = [rule_for(name, policy) for policy in policies]
    return [
        job(TEXT[:1], rules[0], 3),
        job(TEXT[:4], rules[1], 3, temperature=1.0, seed=1, n=2),
        job(TEXT[:9], rules[2], 3),
        job(TEXT[:14], rules[3], 3, temperature=1.0, seed=3, n=2),
    ]


def check_float32(name: str, kv: str, found: Sequence[Any], jobs: Sequence[Job]) -> None:
    chunk = 1 if kv == "per-loop" else 4
    for generation, j in zip(found, jobs, strict=False):
        for index in range(j.params.n):
            wanted = reference(name, j, kv, chunk, index, torch.float32)
            check(generation, wanted, f"{j.rule}, choice {index}", index)


@pytest.mark.parametrize("kv", KV_POLICIES)
@pytest.mark.parametrize("name", ["add", "residual-all", "ouro", "dory", "parcae"])
def test_in_float32_too_live_exits_equal_the_reference_in_a_crowd(name, kv):
    """What is promised is float32. These loops are smooth: they grow no rounding past 1e-5."""
    jobs, rng = mixed(name), random.Random(KV_POLICIES.index(kv))
    engine = engine_for(name, torch.float32, kv_policy=kv, chunk=4, page_size=3, slots=12)
    check_float32(name, kv, run_late(engine, [*jobs, *strangers(name, rng, 12)], rng), jobs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv", ["per-loop", "last"])
def test_on_cuda_the_engine_equals_the_reference_on_the_cpu(kv):
    jobs = mixed("add")
    model = copy.deepcopy(build("add", torch.float32)).to("cuda")
    config = EngineConfig(
        exit="fixed:5", max_depth=MAX_DEPTH, kv_policy=kv, chunk=4, page_size=3, max_seq=32
    )
    engine = Engine(model, ByteTokenizer(), config, FITTED)
    check_float32("add", kv, run(engine, jobs), jobs)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("name", ["concat, two cores", "noise", "residual-all"])
def test_uniform_depth_under_per_loop_is_the_plain_forward_pass(name, depth):
    """The training pass, with no cache at all, in one call."""
    seed = 9
    j = job(TEXT[:10], f"fixed:{depth}", 6, seed=seed)
    engine = engine_for(name, chunk=4, page_size=3)
    found = run(engine, [j])[0].completions[0]
    whole = forward(build(name), [*j.prompt, *found.token_ids], depth, seed)[9:-1].float()
    assert tuple(whole.argmax(-1).tolist()) == found.token_ids
    log_p = whole.log_softmax(-1).amax(-1)
    assert (log_p - torch.tensor(found.logprobs)).abs().max() < 1e-4


# Whatever the engine does.

JOBS_PER_EXAMPLE = 5


def menu(name: str) -> list[Job]:
    """Few enough that the reference needs to run each only once."""
    kl, latent = rule_for(name, "kl"), rule_for(name, "latent-change")
    return [
        job(TEXT[:17], kl, 4),
        job(TEXT[:12], latent, 5, temperature=1.0, seed=4, presence_penalty=0.5),
        job(TEXT[:9], kl, 6, temperature=0.8, seed=9, n=3),
        job([*TEXT[:9], 7, 7, 7], kl, 2),
        job(TEXT[:3], "fixed:2", 12, top_k=5, temperature=1.0),
    ]


engines = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 5, 16]),
        "slots": st.sampled_from([1, 2, 5, 32]),
        "few_pages": st.booleans(),
        "prefill_rows": st.sampled_from([None, 40]),
        "prefix_cache": st.booleans(),
        "coda": st.sampled_from([0, 2, 4]),
        "max_wait": st.sampled_from([0, 5, 1000]),
    }
)


@pytest.mark.parametrize("kv", ["per-loop", "ring-2"])
@settings(deadline=None, max_examples=5)
@given(shape=engines, chunk=st.sampled_from([1, 4, 7, 32]), seed=st.integers(0, 10**6))
def test_no_stream_of_arrivals_and_cancellations_changes_an_answer(kv, shape, chunk, seed):
    """U40, U42, U47: order, lateness, preemption, sharing, priorities, choices, departures."""
    rng = random.Random(seed)
    name = "add"
    chunk = chunk if kv == "per-loop" else 4
    size = shape.pop("page_size")
    delay = shape.pop("coda")
    pages = -(-24 // size) + rng.randint(0, 6) if shape.pop("few_pages") else None
    engine = engine_for(
        name,
        kv_policy=kv,
        chunk=chunk,
        page_size=size,
        max_seq=24,
        pages=pages,
        coda_delay=delay,
        **{**shape, "prefill_rows": shape["prefill_rows"]},
    )
    jobs = [rng.choice(menu(name)) for _ in range(JOBS_PER_EXAMPLE)]
    leavers = strangers(name, rng, 5)
    requests, gone = [], []
    queue = [*((j, True) for j in jobs), *((j, False) for j in leavers)]
    rng.shuffle(queue)
    while queue or not engine.idle:
        if queue and rng.random() < 0.5:
            j, stays = queue.pop()
            request = j.submit(engine, rng.choice([0, 0, 1]))
            (requests if stays else gone).append((j, request))
        if gone and rng.random() < 0.2:
            engine.cancel(rng.choice(gone)[1])
        engine.step()
        assert engine.stats()["ticks"] < 5000, "it hangs"
    check_all_came_back(engine)
    for j, request in requests:
        found = request.generation()
        for index in range(j.params.n):
            wanted = reference(name, j, kv, 1 if kv == "per-loop" else chunk, index)
            check(found, wanted, f"{j} choice {index}", index)


@pytest.mark.parametrize("policy", ["latent-change", "probe", "margin"])
def test_a_seat_keeps_nothing_of_its_last_tenant(policy):
    """Hits and memory begin anew; these rules can be hit at recurrence 1 already."""
    rule = rule_for("add", policy, patience=2)
    engine = engine_for("add", slots=1, chunk=1, prefix_cache=False)
    for i in range(3):
        j = job([*TEXT[: 3 + i], i], rule, 2)
        check(run(engine, [j])[0], reference("add", j), f"tenant {i}")


def test_preempted_requests_lose_nothing():
    """Pages for one and a half requests: the younger is thrown out and computed again."""
    jobs = [job([*TEXT[:6], i], rule_for("add", "kl"), 8, temperature=1.0, seed=i) for i in (1, 2)]
    for kv in ("per-loop", "last"):
        engine = engine_for("add", kv_policy=kv, chunk=4, page_size=4, max_seq=16, pages=5)
        found = run(engine, jobs)
        assert engine.stats()["preempted"] > 0
        for j, generation in zip(jobs, found, strict=True):
            check(generation, reference("add", j, kv, 1 if kv == "per-loop" else 4), kv)
            assert generation.reused_tokens <= len(j.prompt)


@pytest.mark.parametrize("kv", ["per-loop", "last"])
def test_a_shared_beginning_is_computed_once_and_changes_nothing(kv):
    rule = rule_for("add", "kl")
    first, second = job(TEXT[:17], rule, 3), job([*TEXT[:15], 9, 9], rule, 3)
    shared = 14 if kv == "per-loop" else 12  # whole pages; whole chunks where they matter
    engine = engine_for("add", kv_policy=kv, chunk=4, page_size=2)
    check(run(engine, [first])[0], reference("add", first, kv, 4))
    steps = engine.stats()["core_row_steps"]
    found = run(engine, [second])[0]
    wanted = reference("add", second, kv, 4)
    check(found, wanted)
    assert found.reused_tokens == shared
    assert found.prompt_exit_depths[:shared] == (None,) * shared
    assert engine.stats()["core_row_steps"] - steps == sum(wanted.depths[shared:])
    other = job(first.prompt, rule_for("add", "latent-change"), 3)
    assert run(engine, [other])[0].reused_tokens == 0, "its entries have other depths"
    engine = engine_for("add", kv_policy=kv, chunk=4, page_size=2, prefix_cache=False)
    run(engine, [first])
    assert run(engine, [second])[0].reused_tokens == 0


def test_a_noisy_start_shares_no_beginning_with_another_seed():
    rule = rule_for("noise", "kl")
    engine = engine_for("noise", page_size=2)
    jobs = [job(TEXT[:9], rule, 2, seed=seed) for seed in (1, 2, 1)]
    found = [run(engine, [j])[0] for j in jobs]
    assert [g.reused_tokens for g in found] == [0, 0, 8]
    for j, generation in zip(jobs, found, strict=True):
        check(generation, reference("noise", j))


def test_the_depth_of_a_token_depends_on_its_past_only():
    """Longer prompts and other continuations leave the depths of what came before alone."""
    rule = rule_for("add", "kl")
    whole = reference("add", job(TEXT[:17], rule, 4)).depths[:17]
    engine = engine_for("add", prefix_cache=False, chunk=7)
    for n in (1, 6, 7, 12):
        found = run(engine, [job([*TEXT[:n], 5, 6], rule, 1)])[0]
        assert found.prompt_exit_depths[:n] == whole[:n]
    assert len(set(whole)) >= 2


def test_two_engines_in_one_process_do_not_meet():
    a, b = (job(TEXT[:9], rule_for(name, "kl"), 4) for name in ("add", "attn-all"))
    one, two = engine_for("add"), engine_for("attn-all", page_size=2)
    requests = [a.submit(one), b.submit(two)]
    while not (one.idle and two.idle):
        one.step()
        two.step()
    check(requests[0].generation(), reference("add", a))
    check(requests[1].generation(), reference("attn-all", b))
    assert one.stats()["tokens"] == two.stats()["tokens"] == 4


def test_neighbours_of_equal_shape_change_no_bit():
    """U42: other contents in the same places, float32, uniform depth."""
    mine = job(TEXT[:9], "fixed:3", 5)

    def logprobs(other: int) -> tuple[float, ...]:
        engine = engine_for("add", torch.float32)
        others = [job([other + i, *[other] * 6], "fixed:3", 5, stop_ids=()) for i in range(3)]
        return run(engine, [mine, *others])[0].completions[0].logprobs

    assert logprobs(20) == logprobs(90) == logprobs(150)


def test_a_departure_at_any_tick_harms_nobody():
    jobs = [job([*TEXT[:9], i], rule_for("add", "kl"), 4) for i in range(3)]
    wanted = [reference("add", j) for j in jobs]
    for tick in range(0, 30, 6):
        engine = engine_for("add", page_size=3, chunk=4)
        requests = [j.submit(engine) for j in [*jobs, job(TEXT[:12], rule_for("add", "kl"), 9)]]
        for _ in range(tick):
            engine.step()
        engine.cancel(requests[-1])
        engine.cancel(requests[-1])
        finish(engine)
        for request, answer in zip(requests, wanted, strict=False):
            check(request.generation(), answer, f"left at tick {tick}")
        last = requests[-1].generation().completions[0]
        assert last.finish_reason == "cancelled"
        assert len(last.token_ids) < 9


# Seeds and choices.


def test_a_seeded_request_says_the_same_in_any_company():
    """U40: alone, with unseeded neighbours, joined midway, in another order, after a restart."""
    mine = job(TEXT[:6], "fixed:3", 8, temperature=1.0, seed=7)
    wanted = answer_of(run(engine_for("add"), [mine])[0])
    others = [job(TEXT[:n], "fixed:3", 8, temperature=1.0, seed=n) for n in (2, 6, 9)]
    assert answer_of(run(engine_for("add"), [mine, *others])[0]) == wanted
    assert answer_of(run(engine_for("add"), [*others, mine])[-1]) == wanted
    engine = engine_for("add")
    request = mine.submit(engine)
    for j in others:
        engine.step()
        j.submit(engine)
    finish(engine)
    assert answer_of(request.generation()) == wanted
    changed = job(TEXT[:6], "fixed:3", 8, temperature=1.0, seed=8)
    assert answer_of(run(engine, [changed])[0]).token_ids != wanted.token_ids


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_all_choices_are_there_and_complete(prefix_cache):
    """U47: n = 5 under load; each is its own reference, and the prompt is computed once."""
    j = job(TEXT[:9], rule_for("add", "kl"), 5, temperature=1.0, seed=3, n=5)
    engine = engine_for("add", slots=4, page_size=4, prefix_cache=prefix_cache)
    found, *_ = run(engine, [j, *strangers("add", random.Random(5), 10)])
    assert [c.index for c in found.completions] == [0, 1, 2, 3, 4]
    assert len({c.token_ids for c in found.completions}) >= 4, "choices differ"
    for index, made in enumerate(found.completions):
        assert (len(made.token_ids), made.finish_reason) == (5, "length")
        check(found, reference("add", j, index=index), f"choice {index}", index)
    assert engine.scheduler.counts["reused_tokens"] >= 3 * 9 + 8


@pytest.mark.parametrize("new_tokens", [1, 4])
@pytest.mark.parametrize("kv", KV_POLICIES)
@pytest.mark.parametrize("name", ["two codas, all heads", "noise", "attn-all", "dory", "parcae"])
def test_choices_share_the_prompt_to_its_last_token(name, kv, new_tokens):
    """They ran what no whole page, or no whole chunk, held once more each."""
    turn = KV_POLICIES.index(kv)
    length, page = [(9, 4), (9, 16), (8, 4), (7, 1), (10, 3)][turn]
    for policy in ("kl", "latent-change"):
        rule = rule_for(name, policy)
        j = job(TEXT[:length], rule, new_tokens, temperature=1.0, seed=turn, n=5)
        engine = engine_for(name, kv_policy=kv, chunk=4, page_size=page, slots=6)
        first, _ = run(engine, [j, job(TEXT[5:9], rule, 3)])
        for index in range(5):
            wanted = reference(name, j, kv, 1 if kv == "per-loop" else 4, index)
            check(first, wanted, f"choice {index}", index)
        fed = length + 5 * (new_tokens - 1) + 4 + 2
        assert engine.stats()["prelude_rows"] == fed, "the prompt once"
        assert first.reused_tokens == 0 and None not in first.prompt_exit_depths


@pytest.mark.parametrize("kv", ["per-loop", "ring-2"])
def test_choices_are_whole_though_pages_run_out_under_them(kv):
    """The first of them too is thrown out, before and after its prompt is computed."""
    rule = rule_for("add", "kl")
    j = job(TEXT[:9], rule, 7, temperature=1.0, seed=3, n=4)
    urgent = job(TEXT[:12], rule, 4)
    wanted = [reference("add", j, kv, 1 if kv == "per-loop" else 4, i) for i in range(4)]
    for tick in range(1, 40, 9):
        engine = engine_for("add", kv_policy=kv, chunk=4, page_size=4, max_seq=16, pages=5)
        request = j.submit(engine)
        for _ in range(tick):
            engine.step()
        urgent.submit(engine, priority=1)
        finish(engine)
        assert engine.stats()["preempted"] > 0
        for index, answer in enumerate(wanted):
            check(request.generation(), answer, f"tick {tick}, choice {index}", index)


@pytest.mark.parametrize("kv", ["per-loop", "ring-2"])
def test_choices_leave_together_at_any_tick(kv):
    beside = job(TEXT[:9], rule_for("add", "latent-change"), 6)
    for tick in range(1, 24, 5):
        engine = engine_for("add", kv_policy=kv, chunk=4, page_size=4, slots=3)
        gone = job(TEXT[:9], rule_for("add", "kl"), 6, temperature=1.0, n=4).submit(engine)
        stays = beside.submit(engine)
        for _ in range(tick):
            engine.step()
        engine.cancel(gone)
        finish(engine)
        check(stays.generation(), reference("add", beside, kv, 1 if kv == "per-loop" else 4))


# Work and memory.


def test_work_is_the_sum_of_the_depths():
    """U17: exit depths 1, 4, 2 and 8 for 16 tokens each are 240 row-steps, not 512."""
    depths = (1, 4, 2, 8)
    jobs = [job([256], f"fixed:{depth}", 16, temperature=1.0, seed=depth) for depth in depths]
    engine = engine_for("add", max_depth=8)
    found = run(engine, jobs)
    assert engine.stats()["core_row_steps"] == 240
    assert engine.stats()["rows_by_recurrence"] == [64, 48, 32, 32, 16, 16, 16, 16]
    occupancy = list(engine.occupancy())
    assert sum(sum(tick) for tick in occupancy) == 240
    assert max(sum(tick) for tick in occupancy) == 4
    assert len(occupancy) == engine.stats()["ticks"] == 16 * 8
    for j, generation, depth in zip(jobs, found, depths, strict=True):
        assert generation.completions[0].exit_depths == (depth,) * 16
        solo = run(engine_for("add", max_depth=8), [j])[0]
        assert answer_of(solo).token_ids == answer_of(generation).token_ids
    lockstep = engine_for("add", max_depth=8, batching="lockstep")
    together = run(lockstep, jobs)
    assert lockstep.stats()["slot_ticks"] == 512, "every slot is held until the deepest is done"
    assert [answer_of(g) for g in together] == [answer_of(g) for g in found]


def test_one_deep_row_makes_no_other_wait():
    """U18: seven rows stop at 1 and one at 8: 15 row-steps, where a lockstep batch runs 64."""
    engine = engine_for("add", max_depth=8)
    jobs = [job([i], f"fixed:{8 if i == 7 else 1}", 1) for i in range(8)]
    found = run(engine, jobs)
    assert engine.stats()["core_row_steps"] == 15
    depths = [generation.completions[0].exit_depths[0] for generation in found]
    assert sum(depths) / 8 == 1.875


def test_work_skipped_is_not_done():
    """U15, U18: under live exits, in a crowd, row-steps are the depths and nothing else."""
    engine = engine_for("add", prefix_cache=False, page_size=3, chunk=5)
    found = run(engine, strangers("add", random.Random(1), 12))
    depths = [d for generation in found for d in answer_of(generation).depths]
    stats = engine.stats()
    assert stats["core_row_steps"] == sum(depths)
    assert stats["prelude_rows"] == len(depths)
    for r, rows in enumerate(stats["rows_by_recurrence"], 1):
        assert rows == sum(depth >= r for depth in depths)
    assert len(set(depths)) >= 3


def test_a_deep_request_does_not_slow_shallow_ones():
    """U52: in ticks; a shallow token takes as many beside a deep request as without."""

    def ticks(*beside: Job) -> int:
        engine = engine_for("add", max_depth=64)
        for j in beside:
            j.submit(engine)
        requests = [job([i], "fixed:1", 12).submit(engine) for i in range(4)]
        while not all(r.finished for r in requests):
            engine.step()
        count = int(engine.stats()["ticks"])
        for _ in range(70):
            engine.step()
        return count

    assert ticks() == ticks(job(TEXT[:9], "fixed:64", 1)) == 12


@pytest.mark.parametrize("logits_exits", [True, False])
@pytest.mark.parametrize("kv", KV_POLICIES)
@pytest.mark.parametrize("name", ["two codas, all heads", "no prelude, no coda", "attn-all"])
def test_memory_per_token_is_what_the_cost_table_says(name, kv, logits_exits):
    engine = engine_for(name, torch.float32, kv_policy=kv, logits_exits=logits_exits, max_depth=8)
    entries = parse_kv_policy(kv).entries(8)
    geometry = build(name).geometry
    wanted = kv_bytes_per_token(geometry, entries, 4, entries if logits_exits else 1)
    assert engine.cache.bytes_per_token == engine.stats()["kv_bytes_per_token"] == wanted
    shape = engine.cache.shape
    held = sum(t.nbytes for t in (*engine.cache.keys, *engine.cache.values))
    assert held == wanted * (shape.pages + 1) * shape.page_size, "and it holds no more"


def test_last_keeps_one_entry_for_every_recurrence_that_per_loop_keeps():
    def bytes_of(kv: str) -> int:
        return engine_for("no prelude, no coda", kv_policy=kv, max_depth=8).cache.bytes_per_token

    assert bytes_of("per-loop") == 8 * bytes_of("last")


def test_poison_shows_where_it_is_read():
    """The tests above would see an entry that is read before it was written."""
    j = job(TEXT[:9], "fixed:3", 3)
    engine = engine_for("add", torch.float32)
    request = j.submit(engine)
    engine.step()
    poison(engine)
    finish(engine)
    assert request.error is not None
