"""What ``dualflow bench`` measures. Importing this package imports no torch.

A suite is a module here (``core``; others join it) that yields ``Measurement``s; ``results``
writes them down as flat rows and renders those rows, and nothing else, as tables.
"""

CORE: dict[str, str] = {
    "training": "time of a training step, dual against standard",
    "loss-memory": "peak memory of the mixture loss, in row chunks against all logits at once",
    "decode": "time of one token at batch 1, dual against standard",
    "prefill": "time of a prompt at batch 1, dual against standard",
}
"""The benchmarks of the suite ``core``, in the order they run, and what each measures."""
