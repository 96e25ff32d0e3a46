"""From microbenchmark results to an architecture file."""
