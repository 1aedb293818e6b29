"""Checkpoints of other projects: read strictly, turned into loopwise checkpoints."""
