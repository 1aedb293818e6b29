"""Checkpoints of other projects, turned into ours; ours as classes of transformers.

After ``import loopwise.hub``, transformers' ``AutoConfig``, ``AutoModelForCausalLM`` and
``AutoTokenizer`` know loopwise checkpoints, whichever was imported first. That imports nothing:
transformers may be absent, and is loaded when it is asked for.
"""

from loopwise.hub.auto.register import register_when_asked

register_when_asked()
