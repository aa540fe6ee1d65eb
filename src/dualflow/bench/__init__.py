"""What ``dualflow bench`` measures. Importing this package imports no torch.

A suite is a module here: ``core`` yields ``Measurement``s of the models' step function, the others
rows about the engine. ``results`` writes them down as flat rows and renders those rows, and nothing
else, as tables.
"""

SUITES: dict[str, str] = {
    "core": "training, memory of the loss, decode and prefill: the step function, dual / standard",
    "latency": "the engine with one request: time to the first token, tokens per second",
    "throughput": "the engine with 1, 8 and 32 requests: tokens per second, and prefill",
    "serve-trace": "the engine under made-up traffic: percentiles, auxiliary off, on and exact",
}
"""The suites by name, and what each measures; the first is the default."""

CORE: dict[str, str] = {
    "training": "time of a training step, dual against standard",
    "loss-memory": "peak memory of the mixture loss, in row chunks against all logits at once",
    "decode": "time of one token at batch 1, dual against standard",
    "prefill": "time of a prompt at batch 1, dual against standard",
}
"""The benchmarks of the suite ``core``, in the order they run, and what each measures."""
