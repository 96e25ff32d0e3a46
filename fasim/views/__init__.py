"""Views of a :class:`fasim.run.Run`: text report, terminal timeline, picture, Perfetto trace.

A view reads a ``Run`` and its ``Trace`` and nothing else; it never simulates.
"""
