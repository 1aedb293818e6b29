"""loopwise: train, measure and serve depth-recurrent language models."""

__version__ = "0.1.0"
