"""The likeliest tokens: what a search through the whole row finds, ties and all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopwise.exits import largest
from loopwise.exits.largest import likeliest, top_tokens

# A vocabulary of one, of primes, of squares, of two long factors.
# All of them are searched by groups here, few as they are.
VOCABS = (1, 2, 3, 13, 64, 97, 210, 1024, 50257)


@pytest.fixture(autouse=True, params=[0, 2**17], ids=["by groups", "as it pays"], scope="module")
def fewest(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest, "_FEWEST", request.param)
        yield


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_two_largest_are_those_of_a_search_through_the_row(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.stack([torch.randperm(vocab, generator=generator).float() for _ in range(9)])
    assert torch.equal(top_tokens(logits), logits.topk(min(2, vocab), dim=-1).indices)
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))


@given(
    st.sampled_from([v for v in VOCABS if v < 1000]).flatmap(
        lambda vocab: st.lists(
            st.lists(
                st.sampled_from([-1.0, 0.0, 1.0, 2.0, float("-inf")]),
                min_size=vocab,
                max_size=vocab,
            ),
            min_size=1,
            max_size=3,
        )
    )
)
def test_of_equal_logits_the_first_is_taken_and_two_are_never_the_same(rows):
    logits = torch.tensor(rows)
    values = logits.gather(1, top_tokens(logits))
    assert torch.equal(values, logits.topk(min(2, logits.shape[1]), dim=-1).values)
    assert all(len(set(ids)) == len(ids) for ids in top_tokens(logits).tolist())
    assert likeliest(logits).tolist() == [row.index(max(row)) for row in rows]


def test_a_logit_that_is_not_a_number_is_found_as_argmax_finds_it():
    logits = torch.zeros(2, 12)
    logits[0, 7] = torch.nan
    assert likeliest(logits).tolist() == [7, 0]
