"""Cases, found by looking: each module here puts its own into the book."""
