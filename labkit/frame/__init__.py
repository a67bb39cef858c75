"""The frame of every panel: picture, page, and an experiment in a learner's hands."""
