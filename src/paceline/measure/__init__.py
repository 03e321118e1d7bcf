"""What can be measured about a machine or a run."""
