"""The random numbers of one request, by output position: never by step, batch or draft."""

from hashlib import blake2b

import torch

from dualflow.engine.request import SEED_END


class Uniforms:
    """Numbers in [0, 1), float64, of which number i belongs to output position i.

    They are drawn when first asked for and kept, in the order in which ``model.sampling.Sampler``
    draws its own from the same seed. So a position reads the same number whatever else runs,
    however often it is computed again, and whether it was reached by a guess or not.

    seed:    from 0; above the largest, seeds start again from 0.
    stream:  "" is the tokens' own; any other name gives numbers independent of those.
    """

    def __init__(self, seed: int, stream: str = "") -> None:
        if stream:
            digest = blake2b(f"{stream}\0{seed % SEED_END}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        self._generator = torch.Generator().manual_seed(seed % SEED_END)
        self._drawn: list[float] = []

    def __getitem__(self, index: int) -> float:
        assert index >= 0
        while index >= len(self._drawn):
            # One at a time: the stream is then the naive generator's whatever torch vectorises.
            number = torch.rand((), dtype=torch.float64, generator=self._generator)
            self._drawn.append(float(number))
        return self._drawn[index]
