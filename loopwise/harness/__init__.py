"""Checkpoints under lm-evaluation-harness, and its tasks over local files.

``python -m loopwise.harness`` is ``lm_eval`` with the model ``loopwise`` known to it. From Python,
call :func:`loopwise.harness.model.register` before ``lm_eval.simple_evaluate(model="loopwise")``.
"""
