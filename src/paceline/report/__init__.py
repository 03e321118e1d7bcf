"""Read records and show them; nothing here imports torch."""
