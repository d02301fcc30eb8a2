"""Data to train on out of the box: bytes of files, in batches that can be drawn again."""

from patrickstar.data.batches import Batches
from patrickstar.data.corpus import CORPUS_LIMIT, Corpus, load_corpus

__all__ = ["CORPUS_LIMIT", "Batches", "Corpus", "load_corpus"]
