"""Results: plain data that knows no view and runs nothing."""
