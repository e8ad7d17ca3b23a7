"""Our decoders under lm-evaluation-harness: `python -m experiments.evaluate`."""
