"""loopwise checkpoints as transformers classes: config, model, tokenizer, and what a folder holds.

Importing this package imports no transformers; its modules do. ``import loopwise.hub`` is enough
for ``AutoConfig``, ``AutoModelForCausalLM`` and ``AutoTokenizer`` to know them.
"""
