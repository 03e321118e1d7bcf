"""Predict speed, time and cost on other machines from records; nothing here imports torch."""
