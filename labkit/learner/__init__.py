"""A learner's record and its views: predictions, exercises passed, a class."""
