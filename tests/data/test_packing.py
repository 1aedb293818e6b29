"""Packing: every token a target once per epoch, documents apart, resuming exact by construction."""

import copy
import errno
import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.data.documents import Document
from loopwise.data.files import ReadOptions, ReadReport, read_documents
from loopwise.data.packing import NO_TARGET, PackedBlocks, TokenBatch, micro_batch_loader
from loopwise.data.store import TokenStore, load_or_tokenize, tokenize
from loopwise.data.stories import generate
from loopwise.errors import ConfigError, DataError, TokenizerError, WriteError
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from tests.conftest import full_disk

BYTES = ByteTokenizer()
STORIES = list(generate("stories", 0, 0, 40))
BPE = BPETokenizer.train([document.text for document in STORIES], vocab_size=400)
TOLD = BYTES.with_special_ids({"bos": 1, "eos": 2})


def numbered_store(lengths: list[int]) -> TokenStore:
    """Documents in which every token is different, so that each can be followed."""
    total = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    hops = (np.arange(total) % 7).astype(np.uint8)
    return TokenStore(np.arange(total, dtype=np.uint32), offsets, hops, text_hash="0")


def targets_of(batches: list[TokenBatch]) -> Counter[int]:
    kept = torch.cat([batch.targets[batch.targets != NO_TARGET] for batch in batches])
    return Counter(kept.tolist())


def check_blocks(blocks: PackedBlocks, epoch: int) -> None:
    """What must hold for one epoch over a `numbered_store`."""
    store = blocks.store
    starts = set(store.offsets[:-1].tolist())
    document_of = np.searchsorted(store.offsets, np.arange(store.n_tokens), side="right")
    batches = [blocks.block(epoch, index) for index in range(blocks.n_blocks)]
    wanted = set(range(store.n_tokens)) - starts
    assert targets_of(batches) == Counter(wanted), "each target exactly once"
    for batch in batches:
        rows = zip(
            *(getattr(batch, f)[0].tolist() for f in TokenBatch.__dataclass_fields__), strict=True
        )
        assert batch.n_targets > 0
        before = None
        for token, target, document, position, hops in rows:
            if document < 0:
                assert (token, target, position, hops) == (0, NO_TARGET, 0, 0)
                continue
            if target != NO_TARGET:
                assert target == token + 1 and document_of[target] == document_of[token]
                assert hops == target % 7
            else:
                assert token + 1 in store.offsets and hops == 0
            if before is None:
                assert (document, position) == (0, 0)
            elif token in starts:
                assert (document, position) == (before[1] + 1, 0)
            else:
                assert (token, document, position) == (before[0] + 1, before[1], before[2] + 1)
            before = token, document, position


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=30),
    seq=st.integers(2, 40),
    shuffle=st.booleans(),
)
def test_every_token_is_a_target_once_per_epoch(lengths, seq, shuffle) -> None:
    store = numbered_store(lengths)
    if store.n_tokens <= seq:
        with pytest.raises(DataError, match=f"has {store.n_tokens} tokens"):
            PackedBlocks(store, seq, seed=0, shuffle=shuffle)
        return
    blocks = PackedBlocks(store, seq, seed=0, shuffle=shuffle)
    for epoch in (0, 1):
        check_blocks(blocks, epoch)


def test_u74_the_order_of_documents_changes_with_epoch_and_seed_only() -> None:
    store = numbered_store([5] * 40)
    epochs = [PackedBlocks(store, 8, seed=s).batch(25 * e, 25) for s in (0, 1) for e in (0, 1)]
    for one, other in itertools.combinations(epochs, 2):
        assert not torch.equal(one.token_ids, other.token_ids)
    again = PackedBlocks(store, 8, seed=0)
    assert again.n_blocks == 25
    assert torch.equal(again.batch(25, 25).token_ids, epochs[1].token_ids), "no state in between"
    ordered = PackedBlocks(store, 8, seed=0, shuffle=False)
    for epoch in (0, 1):
        tokens = ordered.batch(25 * epoch, 25).token_ids.flatten()
        assert torch.equal(tokens, torch.arange(200))


def test_a_batch_is_its_blocks_also_across_epochs() -> None:
    blocks = PackedBlocks(numbered_store([7, 9, 30, 4]), 6, seed=2)
    batch = blocks.batch(blocks.n_blocks - 2, 4)
    last = blocks.n_blocks - 1
    singles = [blocks.block(*at) for at in ((0, last - 1), (0, last), (1, 0), (1, 1))]
    for name in TokenBatch.__dataclass_fields__:
        assert torch.equal(getattr(batch, name), torch.cat([getattr(s, name) for s in singles]))
    dtypes = [getattr(batch, name).dtype for name in TokenBatch.__dataclass_fields__]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.int32, torch.uint8]
    assert batch.to("cpu").n_targets == batch.n_targets


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3")  # on fewer than 3 cores
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_u74_ranks_and_workers_share_an_epoch_exactly(world_size: int, workers: int) -> None:
    store = numbered_store([2 + i % 9 for i in range(54)])
    blocks = PackedBlocks(store, 6, seed=1)
    accumulation = 2 // world_size
    steps, left_over = divmod(blocks.n_blocks, 2 * 3)
    assert left_over == 0, "the example is made to fit"
    seen = []
    for rank in range(world_size):
        loader = micro_batch_loader(
            blocks,
            micro_batch=3,
            accumulation=accumulation,
            rank=rank,
            world_size=world_size,
            workers=workers,
        )
        for micro_batches in itertools.islice(loader, steps):
            assert len(micro_batches) == accumulation
            seen += micro_batches
        del loader
    assert targets_of(seen) == Counter(set(range(store.n_tokens)) - set(store.offsets.tolist()))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2")  # on one core
@pytest.mark.parametrize("workers", [0, 2])
def test_u56_resuming_at_a_step_reads_on_exactly(workers: int) -> None:
    blocks = PackedBlocks(numbered_store([9] * 30), 6, seed=1)
    sizes = {"micro_batch": 2, "accumulation": 2, "world_size": 2, "rank": 1}
    whole = [
        [batch.token_ids for batch in step]
        for step in itertools.islice(micro_batch_loader(blocks, **sizes), 12)
    ]
    resumed = micro_batch_loader(blocks, start_step=7, workers=workers, **sizes)
    for step, expected in zip(resumed, whole[7:], strict=False):
        assert all(map(torch.equal, (batch.token_ids for batch in step), expected))
    first = blocks.batch(7 * 8 + 2, 2).token_ids  # G = 8; rank 1 follows rank 0
    assert torch.equal(whole[7][0], first)


def test_wrong_sizes_are_refused_with_their_values() -> None:
    store = numbered_store([5, 5])
    with pytest.raises(ConfigError, match="seq=1"):
        PackedBlocks(store, 1, seed=0)
    with pytest.raises(DataError, match="10 tokens in 2 documents.*needs 11; add text$"):
        PackedBlocks(store, 10, seed=0)
    with pytest.raises(DataError, match="needs 11; add text, or wait$"):
        PackedBlocks(store, 10, seed=0, remedy="wait")
    blocks = PackedBlocks(store, 4, seed=0)
    for ask in (
        lambda: blocks.block(0, 3),
        lambda: blocks.block(-1, 0),
        lambda: blocks.batch(0, 0),
    ):
        with pytest.raises(DataError, match="no block"):
            ask()
    with pytest.raises(ConfigError, match="rank=2"):
        micro_batch_loader(blocks, micro_batch=1, rank=2, world_size=2)
    with pytest.raises(ConfigError, match="micro_batch=0"):
        micro_batch_loader(blocks, micro_batch=0)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, TOLD], ids=["byte", "bpe", "told"])
def test_u77_special_ids_stand_at_the_ends_of_documents_only(tokenizer) -> None:
    spelled = Document("a <|endoftext|> b <|bos|><|eos|>")
    documents = [spelled, *STORIES[:3], Document("plain")]
    store = tokenize(documents, tokenizer)
    assert store.n_documents == 5 and store.token_ids.dtype == np.uint16
    for index, document in enumerate(documents):
        ids = store.token_ids[store.offsets[index] : store.offsets[index + 1]].tolist()
        assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids[1:-1])
        assert tokenizer.decode(ids[1:-1]) == document.text


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_hops_mark_the_tokens_of_answers(tokenizer) -> None:
    store = tokenize(STORIES, tokenizer)
    for index, document in enumerate(STORIES):
        span = slice(store.offsets[index], store.offsets[index + 1])
        ids, hops = store.token_ids[span], store.hops[span]
        assert set(hops.tolist()) - {0} == {count for *_, count in document.hops}
        runs = [
            list(run)
            for hop, run in itertools.groupby(zip(ids, hops, strict=True), key=lambda p: p[1])
            if hop
        ]
        for run, (start, end, count) in zip(runs, document.hops, strict=True):
            assert run[0][1] == count
            assert document.text[start:end] in tokenizer.decode([token for token, _ in run])


def test_text_no_tokenizer_can_hold_is_refused_with_its_source() -> None:
    documents = [Document("good"), Document("half \ud83d", source="a.jsonl: line 2")]
    with pytest.raises(TokenizerError, match=r"a\.jsonl: line 2: character 5 is U\+D83D"):
        tokenize(documents, BPE)


def test_u72_crlf_and_lf_copies_give_equal_tokens(tmp_path: Path) -> None:
    text = "One line.\nAnother.\n\nA third.\n"
    (tmp_path / "unix.txt").write_bytes(text.encode())
    (tmp_path / "dos.txt").write_bytes(text.replace("\n", "\r\n").encode())
    unix, dos = (
        tokenize(read_documents([tmp_path / name], ReadOptions(), ReadReport()), BPE)
        for name in ("unix.txt", "dos.txt")
    )
    assert np.array_equal(unix.token_ids, dos.token_ids) and unix.text_hash == dos.text_hash


def test_token_files_are_made_once_per_text_and_tokenizer(tmp_path: Path) -> None:
    reads = []

    def documents() -> list[Document]:
        reads.append(1)
        return STORIES

    fresh = tokenize(STORIES, BPE)
    first = load_or_tokenize(documents, BPE, tmp_path)
    again = load_or_tokenize(documents, BPE, tmp_path)
    assert len(reads) == 3, "hash, tokenise, hash"
    for store in (first, again, pickle.loads(pickle.dumps(again)), copy.copy(fresh)):
        assert isinstance(store.token_ids, np.memmap) or store.folder is None
        assert store.text_hash == fresh.text_hash
        for name in ("token_ids", "offsets", "hops"):
            assert np.array_equal(getattr(store, name), getattr(fresh, name))
    assert len(pickle.dumps(again)) < 1000, "a worker gets the folder, not the corpus"
    load_or_tokenize(documents, BYTES, tmp_path)
    load_or_tokenize(lambda: STORIES[1:], BPE, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "nothing is left aside"


@pytest.mark.parametrize("room", [0, 100])
def test_token_files_on_a_full_disk_are_one_line_and_leave_nothing(tmp_path, room) -> None:
    with full_disk(room), pytest.raises(WriteError, match=f"cannot write '{tmp_path}/.*free some"):
        load_or_tokenize(lambda: STORIES, BYTES, tmp_path)
    assert not list(tmp_path.iterdir())
    assert load_or_tokenize(lambda: STORIES, BYTES, tmp_path).n_documents == 40


def test_text_that_cannot_be_read_again_is_not_blamed_on_the_disk_written_to(tmp_path) -> None:
    """It said "cannot write" the token files and to free some space."""
    reads = iter([None, OSError(errno.EIO, "Input/output error")])

    def documents() -> Iterator[Document]:
        yield STORIES[0]
        if (trouble := next(reads)) is not None:
            raise trouble

    with pytest.raises(OSError, match="Input/output error") as caught:
        load_or_tokenize(documents, BYTES, tmp_path)
    assert not isinstance(caught.value, WriteError)
    assert not list(tmp_path.iterdir())


def test_the_text_hash_sees_document_boundaries() -> None:
    hashes = {
        tokenize([Document(text) for text in texts], BYTES).text_hash
        for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", " "])
    }
    assert len(hashes) == 4


def test_damaged_or_changing_text_is_refused(tmp_path: Path) -> None:
    store = load_or_tokenize(lambda: STORIES, BPE, tmp_path)
    assert store.folder is not None
    folder = store.folder
    del store
    (folder / "hops.bin").write_bytes(b"")
    with pytest.raises(DataError, match="damaged token files.*delete that folder"):
        load_or_tokenize(lambda: STORIES, BPE, tmp_path)
    changing = iter([STORIES[:2], STORIES[:3]])
    with pytest.raises(DataError, match="changed between two reads"):
        load_or_tokenize(lambda: next(changing), BPE, tmp_path)
    with pytest.raises(DataError, match="no documents"):
        load_or_tokenize(list, BPE, tmp_path)
    with pytest.raises(DataError, match="no documents"):
        tokenize([], BPE)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
