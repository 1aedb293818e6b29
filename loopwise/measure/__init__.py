"""Measurement: traces of frozen models, and everything that is computed from them."""
