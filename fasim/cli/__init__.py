"""The ``fasim`` command: options, printing and exit codes; one module a command."""

from fasim.cli.app import EXAMPLES, app, main

__all__ = ["EXAMPLES", "app", "main"]
