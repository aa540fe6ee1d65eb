"""Tiny models and seeded inputs, for our tests and for those of others. Nothing in dualflow imports
this.

Importing this package needs no torch; ``dualflow.testing.tensors`` does.
"""

from dualflow.testing.configs import FAMILIES, FLOWS, family_config, flow_config, tiny_config

__all__ = ["FAMILIES", "FLOWS", "family_config", "flow_config", "tiny_config"]
