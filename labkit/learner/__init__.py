"""What remembers a learner, and what shows it: predictions, exercises passed, a class."""
