"""The command line: one module a verb; see ``dualflow.cli.main`` for what such a module holds."""
