"""Views of a :class:`fasim.results.run.Run`: text report, terminal timeline, picture, Perfetto trace.

A view reads a ``Run`` and its ``Trace`` and nothing else; it never simulates.
"""
