"""Engines: they execute a lowered image and know neither attention nor a chip's numbers."""
