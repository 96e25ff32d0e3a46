import os

from hypothesis import HealthCheck, settings

# Before NumPy is loaded: the products here are small, and BLAS threads of parallel test processes wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Reproducible runs: examples follow from the test, not from chance or a database; compiling takes its time.
settings.register_profile(
    "fasim", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fasim")
