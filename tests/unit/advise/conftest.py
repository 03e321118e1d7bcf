from harness.measured import make_phased, make_scale, make_training

__all__ = ["make_phased", "make_scale", "make_training"]
