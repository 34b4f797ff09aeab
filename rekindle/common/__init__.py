"""Small things that rooms which may not import each other share: Linux calls, files, wording."""
