"""Text on its way to the model: documents, the built-in corpus, files, and packed blocks."""

from loopwise.data.documents import Document, document_hash
from loopwise.data.files import read_documents, split_held_out
from loopwise.data.packing import PackedBlocks, TokenBatch, micro_batch_loader
from loopwise.data.reading import ReadOptions, ReadReport
from loopwise.data.store import TokenStore, load_or_tokenize, tokenize
from loopwise.data.stories import CORPORA, generate

__all__ = [
    "CORPORA",
    "Document",
    "PackedBlocks",
    "ReadOptions",
    "ReadReport",
    "TokenBatch",
    "TokenStore",
    "document_hash",
    "generate",
    "load_or_tokenize",
    "micro_batch_loader",
    "read_documents",
    "split_held_out",
    "tokenize",
]
