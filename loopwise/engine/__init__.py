"""Decoding: the slow, obvious reference that everything faster must match."""
