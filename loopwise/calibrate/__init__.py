"""``loopwise calibrate``: from a budget in nats to guaranteed exit rules, kept with the weights."""
