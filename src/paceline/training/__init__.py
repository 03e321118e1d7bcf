"""Training: the task, the loop, the step, exact validation, and who watches."""
