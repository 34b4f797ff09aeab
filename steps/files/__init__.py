"""Steps whose raw data is the artifact of an earlier step."""
