"""Grammar backends: one file for each library that follows grammars, listed in catalog/grammars.py."""
