"""What runs a learner's function, and judges it."""
