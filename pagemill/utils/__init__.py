"""Pure helpers used in every plane, one topic per file."""
