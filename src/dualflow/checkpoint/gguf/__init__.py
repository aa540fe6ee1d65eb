"""GGUF files both ways: the tables of eight architectures, the file itself, its tokenizers."""
