"""``python -m fasim``: the same as the ``fasim`` command."""

from fasim.cli import main

main()
