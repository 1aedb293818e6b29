"""Training: how depth is drawn, the loss, the optimisers, the loop, exact resume."""
