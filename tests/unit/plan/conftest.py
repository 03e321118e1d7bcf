from harness.measured import make_scale, make_training

__all__ = ["make_scale", "make_training"]
