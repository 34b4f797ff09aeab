"""Small things that packages share which do not import each other: Linux calls, files, wording."""
