from hypothesis import HealthCheck, settings

# Reproducible runs: examples follow from the test, not from chance or a database; compiling takes its time.
settings.register_profile(
    "fasim", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fasim")
