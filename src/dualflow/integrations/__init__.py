"""Other people's tools: each integration needs its own extra and is imported by name."""
