"""The library's calls, which arrays they take, and the row machinery that rooms share."""
