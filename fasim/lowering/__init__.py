"""From a recorded program to the image that an engine runs: names become indices, demand becomes ticks."""
