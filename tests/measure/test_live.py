"""Live exits in parallel equal slow decoding token by token: depths exactly, losses closely."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from naive import Decoded, Naive, documents, log_softmax, roughen

from loopwise.data.packing import NO_TARGET, PackedBlocks, TokenBatch, TokenStore
from loopwise.errors import DepthError, ExitError
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.live import LiveResult, run_live
from loopwise.models.base import LoopedLM
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel

MAX_DEPTH = 6
TINY = RecurrentConfig(
    vocab_size=31,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    d_ff=24,
    n_prelude_layers=1,
    n_core_layers=2,
    n_coda_layers=2,
)
LENGTHS = [5, 9, 3, 14, 2, 8]  # tokens; blocks of 14 cut the second, fourth and last document


def tiny(seed: int = 1, **changes: Any) -> RecurrentModel:
    model = RecurrentModel(replace(TINY, **changes)).double().eval()
    roughen(model, seed, gain=0.7)
    # Small logits: losses come back in float32, which holds 1e-6 only up to a few nats.
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.data *= 0.4
    return model


def packed(lengths: list[int] = LENGTHS, seq: int = 14, seed: int = 0) -> TokenBatch:
    """All blocks of a random corpus as one batch; the last block may end in padding."""
    total = sum(lengths)
    ids = np.random.default_rng(seed).integers(0, 31, total).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    store = TokenStore(ids, offsets, np.zeros(total, np.uint8), text_hash="0")
    blocks = PackedBlocks(store, seq=seq, seed=0, shuffle=False)
    return blocks.batch(0, blocks.n_blocks)


def rows_of(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    return TokenBatch(*(getattr(batch, field.name)[rows] for field in fields(batch)))


def live(model: LoopedLM, batch: TokenBatch, rule: ExitRule) -> LiveResult:
    return run_live(model, [batch], rule, build_policy(rule))


def every_depth(batch: TokenBatch) -> TokenBatch:
    """The batch with a target at every place, so that every exit depth is reported."""
    everywhere = torch.zeros_like(batch.targets)
    return replace_targets(batch, everywhere.masked_fill(batch.document_ids < 0, -100))


def replace_targets(batch: TokenBatch, targets: torch.Tensor) -> TokenBatch:
    return TokenBatch(
        batch.token_ids, targets, batch.document_ids, batch.positions, torch.zeros_like(batch.hops)
    )


def decode_batch(model: LoopedLM, batch: TokenBatch, rule: ExitRule) -> list[Decoded]:
    naive = Naive(model)
    return [
        naive.decode(batch.token_ids[row, columns].tolist(), rule)
        for row, columns in documents(batch)
    ]


def threshold_at(model: LoopedLM, batch: TokenBatch, policy: str, share: float) -> float:
    """In the widest gap between scores near this quantile, so that no rounding decides."""
    rule = ExitRule(policy=policy, threshold=-1.0, max_depth=MAX_DEPTH)
    decoded = decode_batch(model, batch, rule)
    scores = np.array([s for d in decoded for token in d.scores for s in token])
    # From a zero latent the first change is exactly 1 for every token: count such ties once.
    scores = np.unique(scores[np.isfinite(scores)].round(9))
    near = int(share * len(scores))
    window = scores[max(near - 4, 0) : near + 5]
    widest = int(np.diff(window).argmax())
    return float(window[widest : widest + 2].mean())


def check_equal(model: LoopedLM, batch: TokenBatch, rule: ExitRule) -> list[int]:
    """Compare run_live with slow decoding; returns the depths of the targets."""
    decoded = decode_batch(model, batch, rule)
    seen = np.array([s for d in decoded for token in d.scores for s in token])
    assert np.abs(seen - rule.threshold).min() > 1e-6, "a score lies on the threshold"
    depths, losses, argmaxes = [], [], []
    for (row, columns), document in zip(documents(batch), decoded, strict=True):
        for place, column in enumerate(columns):
            target = int(batch.targets[row, column])
            if target == NO_TARGET:
                continue
            depths.append(document.exit_depth[place])
            losses.append(-log_softmax(document.logits[place])[target])
            argmaxes.append(int(document.logits[place].argmax()))
    found = live(model, batch, rule)
    assert max(losses) < 8, "past that, the rounding of a float32 loss nears the tolerance"
    assert found.exit_depth.tolist() == depths
    assert np.abs(found.loss.double().numpy() - losses).max() < 1e-6
    assert found.argmax.tolist() == argmaxes
    return depths


@pytest.mark.parametrize("min_depth", [1, 2])
@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("policy", ["kl", "latent-change"])
def test_depths_and_losses_are_those_of_one_token_after_another(
    policy: str, share: float, patience: int, min_depth: int
) -> None:
    model, batch = tiny(), packed()
    rule = ExitRule(
        policy=policy,
        threshold=threshold_at(model, batch, policy, share),
        patience=patience,
        min_depth=min_depth,
        max_depth=MAX_DEPTH,
    )
    depths = check_equal(model, batch, rule)
    assert len(set(depths)) >= 3, f"depths hardly vary: {depths}"
    assert min(depths) >= max(min_depth, patience)


@pytest.mark.parametrize("policy", ["kl", "latent-change"])
@pytest.mark.parametrize(
    "changes",
    [
        {"injection": "add", "latent_init": "injection"},
        {"n_kv_heads": 4, "tie_embeddings": False, "n_prelude_layers": 0},
        {"n_kv_heads": 1, "n_coda_layers": 0},
        {"n_prelude_layers": 2, "n_core_layers": 3, "n_coda_layers": 1, "latent_init": "injection"},
    ],
    ids=["add", "no-prelude", "no-coda", "deeper"],
)
def test_other_shapes_agree_too(changes: dict[str, Any], policy: str) -> None:
    model, batch = tiny(seed=2, **changes), packed(seed=3)
    threshold = threshold_at(model, batch, policy, 0.4)
    rule = ExitRule(policy=policy, threshold=threshold, max_depth=MAX_DEPTH)
    assert len(set(check_equal(model, batch, rule))) >= 3


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_fixed_depth_agrees_and_is_the_plain_forward_pass(depth: int) -> None:
    model, batch = tiny(), packed()
    assert set(check_equal(model, batch, ExitRule(max_depth=depth))) == {depth}
    for policy in ("kl", "latent-change"):  # never settled, so as deep as fixed
        rule = ExitRule(policy=policy, threshold=-1.0, max_depth=depth)
        assert set(check_equal(model, batch, rule)) == {depth}
    found = live(model, batch, ExitRule(max_depth=depth))
    naive = Naive(model)
    losses = []
    for row, columns in documents(batch):
        logits = naive.forward(batch.token_ids[row, columns].tolist(), depth)
        targets = batch.targets[row, columns].tolist()
        pairs = zip(logits, targets, strict=True)
        losses += [-log_softmax(at)[target] for at, target in pairs if target != NO_TARGET]
    assert np.abs(found.loss.double().numpy() - losses).max() < 1e-6


def test_the_plain_transformer_runs_once_whatever_the_rule() -> None:
    model = FixedModel(FixedConfig(vocab_size=31, d_model=16, n_heads=4, d_ff=24)).double().eval()
    roughen(model, seed=0)
    model.embedding.weight.data *= 0.4
    for policy in ("fixed", "kl", "latent-change"):
        rule = ExitRule(policy=policy, threshold=-1.0, max_depth=1)
        assert set(check_equal(model, packed(), rule)) == {1}
    with pytest.raises(DepthError, match="limit of 1"):
        live(model, packed(), ExitRule(max_depth=2))


@pytest.mark.parametrize("policy", ["kl", "latent-change"])
def test_a_generous_threshold_stops_all_as_soon_as_allowed(policy: str) -> None:
    model, batch = tiny(), packed()
    first = 2 if policy == "kl" else 1  # nothing to compare with at recurrence 1
    for min_depth, patience in ((1, 1), (3, 1), (1, 3), (2, 2)):
        rule = ExitRule(policy=policy, threshold=1e9, patience=patience, min_depth=min_depth)
        wanted = max(min_depth, first - 1 + patience)
        assert set(check_equal(model, batch, rule)) == {wanted}


@pytest.mark.parametrize("policy", ["kl", "latent-change"])
def test_later_tokens_do_not_move_the_depths_of_earlier_ones(policy: str) -> None:
    model, batch = tiny(), every_depth(packed([14, 14, 14, 15]))
    threshold = threshold_at(model, batch, policy, 0.4)
    rule = ExitRule(policy=policy, threshold=threshold, max_depth=MAX_DEPTH)
    whole = live(model, batch, rule)
    shape = batch.token_ids.shape
    depths, losses = whole.exit_depth.reshape(shape), whole.loss.reshape(shape)
    moved = 0
    for cut in range(1, 14):
        ids = batch.token_ids.clone()
        ids[:, cut:] = (ids[:, cut:] + 5) % 31
        changed = TokenBatch(ids, *(getattr(batch, f.name) for f in fields(batch)[1:]))
        found = live(model, changed, rule)
        assert torch.equal(found.exit_depth.reshape(shape)[:, :cut], depths[:, :cut])
        assert (found.loss.reshape(shape) - losses)[:, :cut].abs().max() < 1e-6
        moved += int((found.exit_depth.reshape(shape)[:, cut:] != depths[:, cut:]).sum())
    assert moved > 20, "the changes were too small to test anything"


@pytest.mark.parametrize("latent_init", ["zeros", "injection", "noise"])
@pytest.mark.parametrize("policy", ["kl", "latent-change"])
def test_a_row_does_not_care_who_shares_its_batch(policy: str, latent_init: str) -> None:
    model, batch = tiny(latent_init=latent_init), packed(LENGTHS * 2)
    naive_model = tiny()  # only to find a threshold in the range of the scores
    threshold = threshold_at(naive_model, batch, policy, 0.4)
    rule = ExitRule(policy=policy, threshold=threshold, max_depth=MAX_DEPTH)
    n = batch.token_ids.shape[0]
    alone = [live(model, rows_of(batch, [row]), rule) for row in range(n)]
    assert len(set(torch.cat([a.exit_depth for a in alone]).tolist())) >= 3
    orders: list[list[int]] = [list(range(n)), list(range(n))[::-1], [2, 0, 2, 1], [n - 1, 0]]
    for order in orders:
        crowd = live(model, rows_of(batch, order), rule)
        assert torch.equal(crowd.exit_depth, torch.cat([alone[row].exit_depth for row in order]))
        losses = torch.cat([alone[row].loss for row in order])
        assert (crowd.loss - losses).abs().max() < 1e-6
        assert crowd.core_row_steps == sum(alone[row].core_row_steps for row in order)
    listed = run_live(model, [rows_of(batch, [r]) for r in range(n)], rule, build_policy(rule))
    assert torch.equal(listed.exit_depth, torch.cat([a.exit_depth for a in alone]))
    assert listed.core_row_steps == sum(a.core_row_steps for a in alone)


@pytest.mark.parametrize("policy", ["kl", "latent-change", "fixed"])
def test_work_counted_is_the_sum_of_depths_and_of_readings(policy: str) -> None:
    model, batch = tiny(), packed()
    assert (batch.document_ids == -1).any(), "the last block should end in padding"
    threshold = threshold_at(model, batch, policy, 0.4) if policy != "fixed" else 0.0
    rule = ExitRule(policy=policy, threshold=threshold, max_depth=MAX_DEPTH)
    found = live(model, batch, rule)
    depths = live(model, every_depth(batch), rule).exit_depth
    n_real = int((batch.document_ids >= 0).sum())  # padding is not work
    assert depths.numel() == n_real
    assert found.core_row_steps == int(depths.sum())
    reads = int(depths.sum()) if policy == "kl" else n_real
    assert found.coda_row_steps == found.head_row_steps == reads


def test_one_latent_reading_rule_costs_one_coda_per_token() -> None:
    """The last token of a document has no target but still runs, and is counted."""
    batch = packed([7, 7, 7, 8], seq=14)
    full = rows_of(batch, [0, 1])  # no padding
    rule = ExitRule(max_depth=3)
    found = live(tiny(), full, rule)
    assert found.exit_depth.numel() == full.n_targets < full.token_ids.numel()
    assert (found.core_row_steps, found.coda_row_steps, found.head_row_steps) == (84, 28, 28)


@pytest.mark.parametrize("policy", ["kl", "latent-change"])
def test_a_stricter_rule_never_stops_the_first_token_earlier(policy: str) -> None:
    """Later tokens read what earlier ones left, so only the first must be monotone."""
    model = tiny()
    batch = every_depth(packed([1] * 43))  # every token is a document of its own
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    thresholds = [threshold_at(model, batch, policy, share) for share in shares]
    rules = [ExitRule(policy=policy, threshold=t, max_depth=MAX_DEPTH) for t in thresholds]
    depths = torch.stack([live(model, batch, rule).exit_depth for rule in rules])
    assert (depths.diff(dim=0) <= 0).all()
    assert (depths[0] > depths[-1]).any()
    patient = [live(model, batch, replace(rules[2], patience=p)).exit_depth for p in (1, 2, 3)]
    assert (torch.stack(patient).diff(dim=0) >= 0).all()


def test_scoring_leaves_no_graph_and_draws_nothing() -> None:
    model, batch = tiny(latent_init="noise"), packed()
    rule = ExitRule(policy="kl", threshold=0.01, max_depth=4)
    torch.manual_seed(0)
    first = live(model, batch, rule)
    torch.manual_seed(1)
    again = live(model, batch, rule)
    assert not first.loss.requires_grad
    assert torch.equal(first.loss, again.loss)
    assert torch.equal(first.exit_depth, again.exit_depth)


def test_the_oracle_cannot_decide_live() -> None:
    rule = ExitRule(policy="oracle")
    with pytest.raises(ExitError, match="oracle"):
        live(tiny(), packed(), rule)
