"""Predictions against measurements: timings, hardware counters, cycle stamps."""
