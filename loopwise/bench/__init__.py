"""Side-by-side measurements: speed with the quality it cost, baselines in the same run."""
