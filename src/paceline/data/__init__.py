"""Where samples come from, in which order, and how they reach a worker's device."""
